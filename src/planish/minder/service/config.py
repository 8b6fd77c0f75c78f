"""Configuration of the service: one TOML file for everything that `planish minder serve` does.

profile = "default"
[prometheus]          url, token, tenant
[metrics.cpu_usage]   other queries than the default ones
[models]              folder = "/models"
[[jobs]]              name = "pretrain", machines = [...]     without Kubernetes
[kubernetes]          jobs are found there when the table exists
[act] [alertmanager] [server]
[detect] [preprocess] [denoise] [service]     what is detected, and how
[limits] [boards.NAME]                                        of metrics, for this hardware
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from planish.base.config import Section, nearest, parse_section
from planish.base.errors import ConfigError
from planish.minder.act.config import ActConfig, KubernetesConfig
from planish.minder.detect.config import MinderConfig, minder_config, read_settings
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

    @model_validator(mode="after")
    def _order(self) -> ServerConfig:
        if self.max_backoff_seconds < self.min_backoff_seconds:
            raise ValueError(
                "`max_backoff_seconds` must be at least `min_backoff_seconds`, got "
                f"{self.max_backoff_seconds} < {self.min_backoff_seconds}"
            )
        return self


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
    node_label: str = ""
    node_regex: str | None = None
    kind: Kind | None = None
    scale: float | None = None
    offset: float | None = None
    agg: Aggregation | None = None
    required: bool = False


@dataclass(frozen=True)
class ServiceSettings:
    """The whole configuration of the service."""

    minder: MinderConfig
    prometheus: PrometheusConfig
    sources: dict[str, Metric]
    """Metric to where it is; those of `detect.metrics`."""
    alertmanager: AlertmanagerConfig = field(default_factory=AlertmanagerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    act: ActConfig = field(default_factory=ActConfig)
    kubernetes: KubernetesConfig | None = None
    """None: jobs are listed in `jobs` and nothing is done to machines."""
    models: ModelsConfig = field(default_factory=ModelsConfig)
    jobs: tuple[StaticJob, ...] = ()


_SECTIONS: dict[str, type[Section]] = {
    "prometheus": PrometheusConfig,
    "alertmanager": AlertmanagerConfig,
    "server": ServerConfig,
    "act": ActConfig,
    "models": ModelsConfig,
    "kubernetes": KubernetesConfig,
}


def load_service_config(path: Path) -> ServiceSettings:
    """Read the configuration of the service.

    Raises:
        ConfigError: no such file, no TOML, an unknown key or an invalid value.
    """
    return service_settings(read_settings(path))


def service_settings(raw: Mapping[str, Any]) -> ServiceSettings:
    """Return the settings of a table as TOML gives it.

    Example:
        >>> raw = {"prometheus": {"url": "http://p:9090"}, "detect": {"metrics": ["cpu_usage"]}}
        >>> list(service_settings(raw).sources)
        ['cpu_usage']

    Raises:
        ConfigError: names the key.
    """
    core = {"profile", *MinderConfig.model_fields}
    valid = {*core, *_SECTIONS, "metrics", "jobs"}
    for name, value in raw.items():
        if name not in valid:
            raise ConfigError(
                f"`{name}` is not a known key, got {value!r:.80}"
                f"{nearest(name, valid) or f'; valid keys are {sorted(valid)}'}"
            )
        if name not in core and name != "jobs" and not isinstance(value, Mapping):
            raise ConfigError(f"`{name}` must be a table, got {value!r:.80}")
    minder = minder_config({name: value for name, value in raw.items() if name in core})
    parsed: dict[str, Any] = {
        name: parse_section(cls, raw.get(name, {}), section=name)
        for name, cls in _SECTIONS.items()
        if name != "kubernetes" or name in raw
    }
    if not parsed["prometheus"].url:
        raise ConfigError("`prometheus.url` must be given, as http://prometheus:9090")
    if parsed["server"].leader_election and "kubernetes" not in parsed:
        raise ConfigError("`server.leader_election` needs a table `kubernetes`, got none")
    alertmanager, mode = parsed["alertmanager"], parsed["act"].mode
    if mode != "observe" and alertmanager.honour_silences and not alertmanager.url:
        raise ConfigError(
            f"`alertmanager.url` must be given where `act.mode` is {mode!r}, since only "
            "Alertmanager knows the silences; to act without it set "
            "`alertmanager.honour_silences = false`"
        )
    tables = raw.get("jobs", [])
    if not isinstance(tables, list) or not all(isinstance(item, Mapping) for item in tables):
        raise ConfigError(f"`jobs` must be written as [[jobs]], got {tables!r:.80}")
    jobs = [parse_section(StaticJob, item, section=f"jobs[{i}]") for i, item in enumerate(tables)]
    names = [(job.namespace, job.name) for job in jobs]
    if len(set(names)) != len(names):
        raise ConfigError(f"`jobs` must have different names, got {names}")
    sources = _sources(minder, raw.get("metrics", {}))
    return ServiceSettings(minder=minder, sources=sources, jobs=tuple(jobs), **parsed)


def _sources(minder: MinderConfig, raw: Mapping[str, Any]) -> dict[str, Metric]:
    """Return where the metrics of detection are."""
    for name, value in raw.items():
        if name not in METRICS:
            raise ConfigError(f"`metrics.{name}` is no known metric{nearest(name, METRICS)}")
        if not isinstance(value, Mapping):
            raise ConfigError(f"`metrics.{name}` must be a table, got {value!r:.80}")
    sources = {}
    for name in minder.detect.metrics:
        key, metric = f"metrics.{name}", METRICS[name]
        given = parse_section(MetricConfig, raw.get(name, {}), section=key)
        table = given.model_dump(exclude={"promql"})
        changes = {key: value for key, value in table.items() if value not in (None, "")}
        if given.promql:
            changes["series"] = given.promql
        sources[name] = replace(metric, **changes)
        check_source(sources[name], key)
    return sources
