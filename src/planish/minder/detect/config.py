"""Configuration of the monitor.

`profile = "paper"` is the published behaviour. `profile = "default"` adds our extensions. A key in
the file overrides the profile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from planish.base.config import Section, nearest, parse_section, read_toml
from planish.base.errors import ConfigError
from planish.minder.detect.metrics_table import METRICS, PUBLISHED_ORDER

Profile = Literal["default", "paper"]


class PreprocessConfig(Section):
    """Conversion of raw samples into numbers between 0 and 1."""

    max_gap_seconds: int = Field(default=30, ge=0)
    """Longest gap in a series that is filled, in seconds. A longer gap ends a run; 0 fills every
    gap, as the paper does."""
    join_grace_seconds: int = Field(default=120, ge=0)
    """Seconds after which a machine that joined a running job is compared with the others."""
    mask_broken_exporter: bool = True
    """Ignore a GPU metric that is 0 on a single machine whose other GPU metrics still change: its
    exporter is broken."""
    silent_after_seconds: int = Field(default=60, ge=0)
    """Seconds without a sample of any metric after which a machine is silent; 0 switches this off,
    as in the paper."""
    widen_limits: bool = True
    """Widen fitted limits for a job if most of its machines exceed them."""
    frozen_after_seconds: int = Field(default=60, ge=0)
    """Seconds after which an exporter is broken if all its values on one machine stand still while
    values on the peers change; 0 switches this off, as in the paper."""


class DenoiseConfig(Section):
    """Smoothing of windows before machines are compared."""

    denoiser: Literal["vae", "pca", "none"] = "vae"
    """LSTM-VAE as published, principal components, or no smoothing."""
    fall_back_to_pca: bool = True
    """Use principal components for a metric whose VAE was fitted badly."""


class DetectConfig(Section):
    """Rules that decide when a machine is faulty."""

    metrics: tuple[str, ...] = Field(default=PUBLISHED_ORDER, strict=False)
    """Metrics in the order in which they are tried."""
    max_peers: int | None = Field(default=256, ge=16)
    """Number of evenly spaced peers that each machine of a larger job is compared with; None:
    all."""
    theta: float = Field(default=2.0, gt=0.0)
    """Normal score above which a machine is a candidate. The paper does not give its value."""
    kappa: float | None = Field(default=0.9, gt=0.0, le=1.0)
    """Upper bound of theta, as a share of the largest score that is possible with N machines; None:
    no bound."""
    floors: dict[str, float] | None = Field(
        default={
            "pfc_tx_packet_rate": 0.04,
            "cpu_usage": 0.02,
            "gpu_duty_cycle": 0.05,
            "gpu_power_draw": 0.05,
            "gpu_graphics_engine_activity": 0.05,
            "gpu_tensor_core_activity": 0.05,
            "gpu_nvlink_bandwidth": 0.05,
        }
    )
    """Smallest distance above the median machine that counts, in normalised units, by metric; None
    switches floors off. Other metrics have the floor 0.05."""
    role_baseline: bool = True
    """Subtract the difference that a machine showed in healthy history of the same job."""
    usual_distance: bool = True
    """Raise a machine's floor by the distance that it showed in healthy history of the same job.
    Hosts whose samples are cached or taken at another moment are always some distance apart."""
    unknown_role_distance: float = Field(default=0.1, ge=0.0)
    """Distance that is added to the floor of a machine as long as it has no baseline, so at first
    to the floors of all machines; 0 switches this off, as in the paper."""
    role_limits: dict[str, float] = Field(default_factory=dict)
    """Largest lasting difference that counts as a machine's role, normalised, by metric. `planish
    minder calibrate` fits it to healthy jobs of the site. A single machine that differs by more
    from its first minute on is faulty; several machines with similar differences have a role.
    Without an entry the limit of a GPU metric is `unknown_role_distance`, the limit of power is
    14.5 % of the fleet's, and the limit of network pauses is twice `unknown_role_distance`. CPU has
    no limit, since hosts differ by their other work."""
    rest_share: float = Field(default=0.75, ge=0.0, le=1.0)
    """Share of the usual activity below which the machines rest, e.g. during a checkpoint, when
    differences shrink. While they rest for at most `idle_seconds`, a run of a candidate does not
    end. 0 switches this off, as in the paper."""
    baseline_early_seconds: int = Field(default=120, ge=120)
    """Seconds of healthy history that a first baseline needs."""
    compare_within_stage: bool = True
    """Compare machines only within their pipeline stage, if every stage has at least four
    machines."""
    continuity_seconds: int = Field(default=240, ge=1)
    """Seconds without a break after which a candidate is named. Windows are one second apart."""
    gap_tolerance: int = Field(default=3, ge=0)
    """Windows without the candidate that a run may have, at most 2 % of the run; 0 as published."""
    only_most_unlike: bool = False
    """Let only the machine with the highest score be a candidate, as published. Two machines with
    the same fault then hide each other."""
    exhaustive: bool = True
    """Look for further faulty machines after the first one."""
    two_modes: bool = True
    """Look for a group of machines, more than a twentieth and at most half of them, whose
    values differ from the rest. The group is an event of the whole job too, since its machines are
    too similar to be found one by one."""
    warmup_seconds: int = Field(default=180, ge=0)
    """Seconds after a start of the job that are ignored; 0 as published."""
    idle_seconds: int = Field(default=60, ge=0)
    """Seconds for which all machines must be idle before the stretch is ignored; 0 switches this
    off."""
    min_machines: int = Field(default=4, ge=3)
    """Fewest machines of a job whose machines are compared."""

    @model_validator(mode="after")
    def _known_metrics(self) -> DetectConfig:
        for name in (*self.metrics, *(self.floors or {}), *self.role_limits):
            if name not in METRICS:
                raise ValueError(f"a metric must be known, got {name!r}{nearest(name, METRICS)}")
        if not self.metrics or len(set(self.metrics)) != len(self.metrics):
            raise ValueError(f"`metrics` must be unique and at least one, got {self.metrics}")
        return self

    def role_distance(self, metric: str) -> float:
        """Return the difference that a machine without a known role may have, normalised."""
        return self.role_limits.get(metric, self.unknown_role_distance)

    def role_limit(self, metric: str) -> float:
        """Return the largest difference that counts as a role, normalised; infinite if there is no
        limit.
        """
        if metric in self.role_limits or METRICS[metric].is_gpu:
            return self.role_distance(metric) or math.inf
        is_bounded = METRICS[metric].transform == "log1p"
        return 2 * self.unknown_role_distance * is_bounded or math.inf


class ServiceConfig(Section):
    """Interval of the detector's calls, and length of the history that a call reads."""

    interval_seconds: int = Field(default=60, ge=1)
    """Seconds from one call for a job to the next."""
    window_seconds: int = Field(default=900, ge=60)
    """Seconds of history that a call reads."""
    call_timeout_seconds: float = Field(default=60.0, gt=0.0)
    """Seconds after which a call has failed."""


Range = Annotated[tuple[float, float], Field(strict=False)]
"""Lowest and highest value of a metric, in its unit."""


class MinderConfig(Section):
    """Settings of the detector; `ServiceSettings` adds the settings of the service."""

    profile: Profile = "default"
    preprocess: PreprocessConfig = PreprocessConfig()
    denoise: DenoiseConfig = DenoiseConfig()
    detect: DetectConfig = DetectConfig()
    service: ServiceConfig = ServiceConfig()
    limits: dict[str, Range] = Field(default_factory=dict)
    """Map from metric to its limits at this site, in place of the limits that the models were
    trained with. A model sees only values scaled by the limits, so it fits any hardware whose
    limits are right."""
    boards: dict[str, dict[str, Range]] = Field(default_factory=dict)
    """Map from board model, or a part of its name, to the limits of jobs on such boards. If several
    entries match, the longest name wins."""

    @model_validator(mode="after")
    def _known_limits(self) -> MinderConfig:
        for where, limits in (("limits", self.limits), *self.boards.items()):
            for name, (low, high) in limits.items():
                if name not in METRICS:
                    raise ValueError(
                        f"`{where}` must name known metrics, got {name!r}{nearest(name, METRICS)}"
                    )
                if not (math.isfinite(low) and math.isfinite(high) and low < high):
                    raise ValueError(
                        f"`{where}.{name}` must be two finite numbers, the lower one first, got "
                        f"{[low, high]}"
                    )
        return self

    def site_limits(self, metric: str, board: str = "") -> tuple[float, float] | None:
        """Return the limits of a metric at this site, in its unit; None if only the model has
        limits.
        """
        fitting = [name for name in self.boards if name in board and metric in self.boards[name]]
        if fitting:
            return self.boards[max(fitting, key=lambda name: (len(name), name))][metric]
        return self.limits.get(metric)


Kind = TypeVar("Kind", bound=MinderConfig)

PAPER: dict[str, dict[str, Any]] = {
    "preprocess": {
        "max_gap_seconds": 0,
        "join_grace_seconds": 0,
        "mask_broken_exporter": False,
        "silent_after_seconds": 0,
        "widen_limits": False,
        "frozen_after_seconds": 0,
    },
    "denoise": {"fall_back_to_pca": False},
    "detect": {
        "kappa": 0.9,
        "max_peers": None,
        "floors": None,
        "role_baseline": False,
        "usual_distance": False,
        "unknown_role_distance": 0.0,
        "rest_share": 0.0,
        "compare_within_stage": False,
        "gap_tolerance": 0,
        "only_most_unlike": True,
        "two_modes": False,
        "exhaustive": False,
        "warmup_seconds": 0,
        "idle_seconds": 0,
    },
    "service": {"interval_seconds": 480, "window_seconds": 900},
}
"""Settings that the profile "paper" changes. `kappa` stays: without it no job of four machines, the
smallest of the paper, could have an alert."""


SITE_FILE = "site.toml"
"""File beside the configuration with the values that `planish minder calibrate` fitted to the
site."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the tables of a configuration file, merged over those of the `site.toml` beside it.

    Raises:
        ConfigError: a file can not be read, or `site.toml` has tables that `calibrate` does not
            write.
    """
    raw, beside = read_toml(path), path.parent / SITE_FILE
    if path.name == SITE_FILE or not beside.is_file():
        return raw
    site = read_toml(beside)
    other = sorted(site.keys() - {"limits", "boards", "detect"})
    if other:
        raise ConfigError(
            f"`{beside}` must hold the tables that `planish minder calibrate` writes, got {other} "
            f"too; settings of your own belong into `{path}`"
        )
    return over(site, raw)


def over(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of `high` merged over the tables of `low`, key by key."""
    both = {k for k in low if isinstance(low[k], Mapping) and isinstance(high.get(k), Mapping)}
    return {**low, **high, **{key: over(low[key], high[key]) for key in sorted(both)}}


def minder_config(raw: Mapping[str, Any] | None = None) -> MinderConfig:
    """Return the configuration that a table of TOML or JSON describes.

    Raises:
        ConfigError: sections or keys are unknown or values are wrong; the message names all of
            them.
    """
    return parsed(MinderConfig, raw or {})


def parsed(kind: type[Kind], raw: Mapping[str, Any]) -> Kind:
    """Return a configuration of class `kind`: the table `raw` merged over its profile."""
    base = PAPER if raw.get("profile") == "paper" else {}
    return parse_section(kind, over(base, raw), section="")
