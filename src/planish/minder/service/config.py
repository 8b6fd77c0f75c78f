"""Configuration of the service: one TOML file for everything that `planish minder serve` does.

[prometheus]          url, token, tenant
[metrics.cpu_usage]   other queries than the default ones
[models]              folder = "/models"
[[jobs]]              name = "pretrain", machines = [...]     without Kubernetes
[kubernetes]          jobs are found there when the table exists
[act] [alertmanager] [server], and the tables of `MinderConfig`: what is detected, and how
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from planish.base.config import Section, nearest, parse_section
from planish.minder.act.config import ActConfig, KubernetesConfig
from planish.minder.detect.config import MinderConfig, parsed, read_settings
from planish.minder.detect.metrics_table import METRICS, Aggregation, Kind, Metric
from planish.minder.service.alertmanager import AlertmanagerConfig
from planish.minder.service.prometheus import PrometheusConfig, check_source


class ServerConfig(Section):
    """The process itself."""

    host: str = "0.0.0.0"
    """Address of /healthz, /readyz and /metrics."""
    port: int = Field(default=9470, ge=0, le=65_535)
    """0 picks a free one."""
    concurrency: int = Field(default=4, ge=1)
    """Calls at the same time."""
    discovery_seconds: int = Field(default=30, ge=1)
    """Between two searches for jobs."""
    min_backoff_seconds: float = Field(default=1.0, gt=0.0)
    """Pause before a failed call is tried again; doubles each time."""
    max_backoff_seconds: float = Field(default=60.0, gt=0.0)
    """Longest of those pauses, and each pause after refused credentials."""
    stop_seconds: float = Field(default=8.0, gt=0.0)
    """Calls that last longer than this after SIGTERM are dropped."""
    state_file: str = ""
    """File that keeps the state between restarts; empty: the ConfigMap of `kubernetes`, if any."""
    leader_election: bool = False
    """Only the replica that holds the lease watches and acts; needs `kubernetes`."""


class ModelsConfig(Section):
    """Trained models."""

    folder: str = ""
    """Folder that `planish minder train` wrote; empty: the models that ship with the package."""


class StaticJob(Section):
    """A job that the configuration names; no search in Kubernetes."""

    name: str = Field(min_length=1)
    machines: tuple[str, ...] = Field(min_length=1, strict=False)
    """As the label of the series names them."""
    namespace: str = ""
    started: int = Field(default=0, ge=0)
    """Unix seconds of its last start; 0 when not known."""
    stages: dict[str, str] = Field(default_factory=dict)
    """Machine to stage of pipeline parallelism."""


class MetricConfig(Section):
    """Where one metric is; a key that is not given keeps its default for that metric."""

    promql: str = ""
    """One value for each device or machine; holds `$job_selector` within braces."""
    node_label: str = "node"
    node_regex: str = ""
    kind: Kind = "gauge"
    scale: float = 1.0
    offset: float = 0.0
    agg: Aggregation = "mean"
    required: bool = False


class ServiceSettings(MinderConfig):
    """The whole configuration of the service."""

    prometheus: PrometheusConfig = PrometheusConfig()
    metrics: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Metric to the keys of `MetricConfig` that differ."""
    alertmanager: AlertmanagerConfig = AlertmanagerConfig()
    server: ServerConfig = ServerConfig()
    act: ActConfig = ActConfig()
    kubernetes: KubernetesConfig | None = None
    """None: jobs are listed in `jobs` and nothing is done to machines."""
    models: ModelsConfig = ModelsConfig()
    jobs: tuple[StaticJob, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _fits(self) -> ServiceSettings:
        if not self.prometheus.url:
            raise ValueError("`prometheus.url` must be given, as http://prometheus:9090")
        if self.server.leader_election and self.kubernetes is None:
            raise ValueError("`server.leader_election` needs a table `kubernetes`, got none")
        alertmanager, mode = self.alertmanager, self.act.mode
        if mode != "observe" and alertmanager.honour_silences and not alertmanager.url:
            raise ValueError(
                f"`alertmanager.url` must be given where `act.mode` is {mode!r}, since only "
                "Alertmanager knows the silences; to act without it set "
                "`alertmanager.honour_silences = false`"
            )
        names = [(job.namespace, job.name) for job in self.jobs]
        if len(set(names)) != len(names):
            raise ValueError(f"`jobs` must have different names, got {names}")
        for name in self.metrics:
            if name not in METRICS:
                raise ValueError(f"`metrics.{name}` is no known metric{nearest(name, METRICS)}")
        return self

    @cached_property
    def sources(self) -> dict[str, Metric]:
        """Metric to where it is; those of `detect.metrics`."""
        sources = {}
        for name in self.detect.metrics:
            key = f"metrics.{name}"
            given = parse_section(MetricConfig, self.metrics.get(name, {}), section=key)
            changes = given.model_dump(exclude={"promql"}, exclude_unset=True)
            if given.promql:
                changes["series"] = given.promql
            sources[name] = replace(METRICS[name], **changes)
            check_source(sources[name], key)
        return sources


def load_service_config(path: Path) -> ServiceSettings:
    """Read the configuration of the service."""
    return service_settings(read_settings(path))


def service_settings(raw: Mapping[str, Any]) -> ServiceSettings:
    """Return the settings of a table as TOML gives it; ConfigError names the key."""
    settings = parsed(ServiceSettings, raw)
    assert settings.sources  # looks at the queries
    return settings
