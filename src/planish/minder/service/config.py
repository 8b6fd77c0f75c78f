"""Configuration of the service: one TOML file for everything that `planish minder serve` does.

[prometheus]          url, token, tenant
[metrics.cpu_usage]   own queries in place of the default ones
[models]              folder = "/models"
[[jobs]]              name = "pretrain", machines = [...]     without Kubernetes
[kubernetes]          if this table exists, the service finds jobs there
[act] [alertmanager] [server], and the tables of `MinderConfig`: rules of the detector
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
    """The process: ports, threads, pauses, state."""

    host: str = "0.0.0.0"
    """Address on which /healthz, /readyz and /metrics are served."""
    port: int = Field(default=9470, ge=0, le=65_535)
    """Port of the pages; 0 picks a free one."""
    concurrency: int = Field(default=4, ge=1)
    """Calls that run at the same time."""
    discovery_seconds: int = Field(default=30, ge=1)
    """Seconds from one search for jobs to the next."""
    min_backoff_seconds: float = Field(default=1.0, gt=0.0)
    """Seconds before a failed call is repeated; the pause doubles each time."""
    max_backoff_seconds: float = Field(default=60.0, gt=0.0)
    """Longest pause in seconds; after refused credentials every pause is this long."""
    stop_seconds: float = Field(default=8.0, gt=0.0)
    """Seconds after SIGTERM in which running calls may end; after that they are dropped."""
    state_file: str = ""
    """File that keeps the state over restarts; empty: the ConfigMap of `kubernetes`, if any."""
    leader_election: bool = False
    """Let only the replica that holds the lease watch and act; needs `kubernetes`."""


class ModelsConfig(Section):
    """Trained models."""

    folder: str = ""
    """Folder that `planish minder train` wrote; empty: the models that come with the package."""


class StaticJob(Section):
    """A job that the configuration lists, so that it need not be found in Kubernetes."""

    name: str = Field(min_length=1)
    machines: tuple[str, ...] = Field(min_length=1, strict=False)
    """Names of the machines, as in the label of the series."""
    namespace: str = ""
    started: int = Field(default=0, ge=0)
    """Unix seconds of the job's last start; 0 if not known."""
    stages: dict[str, str] = Field(default_factory=dict)
    """Map from machine to pipeline-parallel stage."""


class MetricConfig(Section):
    """Query of one metric; a key that is not set keeps the metric's default."""

    promql: str = ""
    """PromQL with one value for each device or machine; contains `$job_selector` within braces."""
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
    """Map from metric to those keys of `MetricConfig` that are set."""
    alertmanager: AlertmanagerConfig = AlertmanagerConfig()
    server: ServerConfig = ServerConfig()
    act: ActConfig = ActConfig()
    kubernetes: KubernetesConfig | None = None
    """Connection to Kubernetes; None: `jobs` lists the jobs, and the monitor takes no actions."""
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
        """Map from metric to its query, for the metrics in `detect.metrics`."""
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
    """Read the configuration of the service from a file."""
    return service_settings(read_settings(path))


def service_settings(raw: Mapping[str, Any]) -> ServiceSettings:
    """Return the settings that a TOML table describes; a ConfigError names the wrong key."""
    settings = parsed(ServiceSettings, raw)
    assert settings.sources  # looks at the queries
    return settings
