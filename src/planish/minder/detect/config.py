"""Configuration of the monitor.

`profile = "paper"` is the published behaviour alone; `"default"` adds ours. A key that a file
gives wins over its profile.
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
    """From raw samples to numbers between 0 and 1."""

    max_gap_seconds: int = Field(default=30, ge=0)
    """Longer gaps are not filled and break continuity; 0 fills every gap, as published."""
    min_known_share: float = Field(default=0.9, gt=0.0, le=1.0)
    """A metric needs this share of known seconds, short gaps filled, on enough machines."""
    min_machine_share: float = Field(default=0.8, gt=0.0, le=1.0)
    """How many machines are enough, as a share; never fewer than four."""
    join_grace_seconds: int = Field(default=120, ge=0)
    """Younger machines are left out."""
    mask_broken_exporter: bool = True
    """A GPU metric that is 0 on a single machine, whose other GPU metrics move, is no fault."""
    silent_after_seconds: int = Field(default=60, ge=0)
    """A machine without a sample of any metric for longer is silent; 0 is off, as published."""
    outage_share: float = Field(default=0.2, gt=0.0, le=1.0)
    """More silent machines than this are an outage of the telemetry."""
    widen_limits: bool = True
    """Fitted limits that cut off what most machines of a job show are widened for this job."""
    frozen_after_seconds: int = Field(default=60, ge=0)
    """An exporter of one machine whose values all stand still for longer, while those of its peers
    move, is broken; 0 is off, as published."""


class DenoiseConfig(Section):
    """What takes the noise out of windows before they are compared."""

    denoiser: Literal["vae", "pca", "none"] = "vae"
    """LSTM-VAE as published, principal components, or the windows themselves."""
    embedding: Literal["reconstruction", "latent"] = "reconstruction"
    """What is compared: the reconstructed window or the mean of the latent variable."""
    fall_back_to_pca: bool = True
    """A metric whose VAE failed its gate is denoised by principal components."""


class DetectConfig(Section):
    """When a machine is faulty."""

    metrics: tuple[str, ...] = Field(default=PUBLISHED_ORDER, strict=False)
    """Tried in this order."""
    distance: Literal["euclidean", "manhattan", "chebyshev"] = "euclidean"
    """Between the embeddings of two machines."""
    max_peers: int | None = Field(default=256, ge=16)
    """In larger jobs each machine is compared with so many others, evenly spaced; None: all."""
    theta: float = Field(default=2.0, gt=0.0)
    """Normal score above which a machine is a candidate; the published value is not known."""
    kappa: float | None = Field(default=0.9, gt=0.0, le=1.0)
    """theta is at most this share of the largest possible score of N machines; None is no limit."""
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
    """Smallest distance above the median machine's, in normalised units, by metric; None is off."""
    default_floor: float = Field(default=0.05, ge=0.0)
    """Floor of metrics that `floors` does not name."""
    role_baseline: bool = True
    """Subtract what a machine has differed by in healthy history of the same job."""
    usual_distance: bool = True
    """A machine's floor lies above the distance that it has had in healthy history of the same
    job: hosts that hold their samples, or take them at another moment, are always apart."""
    unknown_role_distance: float = Field(default=0.1, ge=0.0)
    """Distance that is added to the floor of a machine without a baseline, as all are at first; 0
    is off, as published."""
    role_limits: dict[str, float] = Field(default_factory=dict)
    """Largest difference in healthy history that is taken for a machine's role, normalised, by
    metric, as healthy jobs of the site show (`calibrate` fits it). A single machine that is further
    away from its first minute on is faulty; machines that are so alike have a role. A GPU metric
    without an entry has `unknown_role_distance`, its power what boards are capped by, and pauses of
    the network twice as much; a CPU has no limit, since hosts differ by what else they do."""
    rest_share: float = Field(default=0.75, ge=0.0, le=1.0)
    """While the machines together do less than this share of what they mostly do, for at most
    `idle_seconds`, a machine that is like its peers goes on being a candidate: at rest, as in a
    checkpoint, differences shrink. 0 is off, as published."""
    baseline_min_seconds: int = Field(default=600, ge=60)
    """With this much healthy history a baseline is not learned while a machine is candidate."""
    baseline_early_seconds: int = Field(default=120, ge=120)
    """Healthy history that a first baseline needs."""
    compare_within_stage: bool = True
    """Compare machines of the same pipeline stage where a stage has at least four."""
    continuity_seconds: int = Field(default=240, ge=1)
    """A machine must be candidate for more than this without a break; 0 s apart is one window."""
    gap_tolerance: int = Field(default=3, ge=0)
    """Windows in a run that may have no candidate, at most 2 % of the run; 0 as published."""
    max_masked_share: float = Field(default=0.2, gt=0.0, le=1.0)
    """A window with more masked machines neither counts nor resets."""
    only_most_unlike: bool = False
    """Of several machines above the threshold only the most unlike one is candidate, as published;
    two machines that are faulty alike then hide each other."""
    exhaustive: bool = True
    """Go on after the first faulty machine."""
    max_rounds: int = Field(default=3, ge=1)
    """Faulty machines that are looked for one after the other."""
    job_wide_share: float = Field(default=0.05, gt=0.0, le=1.0)
    """More faulty machines than this share, and than two, are an event of the whole job."""
    two_modes: bool = True
    """A part of the machines, larger than `job_wide_share` and up to half of them, that lies apart
    from the rest is such an event too; its machines are too alike to be named one by one."""
    warmup_seconds: int = Field(default=180, ge=0)
    """Ignored after a start of the job; 0 as published."""
    idle_seconds: int = Field(default=60, ge=0)
    """Detection stops when all machines have been idle for this time; 0 is off."""
    min_machines: int = Field(default=4, ge=3)
    """Smaller jobs are not looked at."""

    @model_validator(mode="after")
    def _known_metrics(self) -> DetectConfig:
        for name in (*self.metrics, *(self.floors or {}), *self.role_limits):
            if name not in METRICS:
                raise ValueError(f"a metric must be known, got {name!r}{nearest(name, METRICS)}")
        if not self.metrics or len(set(self.metrics)) != len(self.metrics):
            raise ValueError(f"`metrics` must be unique and at least one, got {self.metrics}")
        return self

    def role_distance(self, metric: str) -> float:
        """Return by how much a machine whose role is not known may differ, normalised."""
        return self.role_limits.get(metric, self.unknown_role_distance)

    def role_limit(self, metric: str) -> float:
        """Return how far a machine's role may lie from its peers; infinite without a limit."""
        if metric in self.role_limits or METRICS[metric].is_gpu:
            return self.role_distance(metric) or math.inf
        is_bounded = METRICS[metric].transform == "log1p"
        return 2 * self.unknown_role_distance * is_bounded or math.inf


class ServiceConfig(Section):
    """How often the monitor looks, and how far back."""

    interval_seconds: int = Field(default=60, ge=1)
    """Between two calls for one job."""
    window_seconds: int = Field(default=900, ge=60)
    """History that a call looks at."""
    call_timeout_seconds: float = Field(default=60.0, gt=0.0)
    """A call that takes longer has failed."""


Range = Annotated[tuple[float, float], Field(strict=False)]
"""Lowest and highest value of a metric, in its unit."""


class MinderConfig(Section):
    """The sections that decide what is found; those of the service are `ServiceSettings`."""

    profile: Profile = "default"
    preprocess: PreprocessConfig = PreprocessConfig()
    denoise: DenoiseConfig = DenoiseConfig()
    detect: DetectConfig = DetectConfig()
    service: ServiceConfig = ServiceConfig()
    limits: dict[str, Range] = Field(default_factory=dict)
    """Metric to its limits at this site, in place of those that the models were trained with: a
    model sees shares of the limits only, so it serves any hardware whose limits are right."""
    boards: dict[str, dict[str, Range]] = Field(default_factory=dict)
    """Board model, or a part of its name, to the limits of jobs that run on it; of several that fit
    the longest counts."""

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
        """Return the limits of a metric at this site, in its unit; None: those of the model."""
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
"""What the published behaviour switches off. `kappa` stays: without it no job of four machines
could ever have an alert, while the smallest published one has four."""


SITE_FILE = "site.toml"
"""Beside the configuration: what `planish minder calibrate` has fitted to the site."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the tables of a configuration, over those of the `site.toml` that lies beside it.

    Raises:
        ConfigError: a file can not be read, or the site's holds other tables than fitted ones.
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
    """Return tables laid over others, key by key."""
    both = {k for k in low if isinstance(low[k], Mapping) and isinstance(high.get(k), Mapping)}
    return {**low, **high, **{key: over(low[key], high[key]) for key in sorted(both)}}


def minder_config(raw: Mapping[str, Any] | None = None) -> MinderConfig:
    """Return the configuration of a table as TOML or JSON gives it.

    Raises:
        ConfigError: unknown sections or keys, or wrong values; all of them are named.
    """
    return parsed(MinderConfig, raw or {})


def parsed(kind: type[Kind], raw: Mapping[str, Any]) -> Kind:
    """Return a configuration of some kind, laid over what its profile switches off."""
    base = PAPER if raw.get("profile") == "paper" else {}
    return parse_section(kind, over(base, raw), section="")
