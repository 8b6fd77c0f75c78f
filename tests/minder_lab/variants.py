"""The detectors that an evaluation compares, each with its settings.

Source: Minder, arXiv 2411.01791, section 6, for what is compared. Where thresholds of the default
profile mean nothing to another detector it has its own, set by hand on jobs of the calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planish.base.config import nearest
from planish.base.errors import ConfigError
from planish.minder.detect.config import MinderConfig, minder_config
from planish.minder.detect.denoise import Models
from planish.minder.detect.detector import Detector
from planish.minder.detect.model_files import load_models
from tests.minder_lab.variants_fit import Comparison, load_comparison
from tests.minder_lab.variants_traces import (
    ConcatenatedDetector,
    IntegratedDetector,
    MahalanobisDetector,
    StaticDetector,
    ZscoreDetector,
)

Settings = Mapping[str, Any]
Factory = Callable[[Models, MinderConfig, Comparison], Detector]


@dataclass(frozen=True)
class Recipe:
    """How one detector is made."""

    about: str
    settings: Settings = field(default_factory=dict)
    """Sections that differ from those of the default profile."""
    make: Factory = lambda models, config, _: Detector(models, config)
    denoises: bool = True
    """Whether it needs a model of each metric."""
    compares: bool = False
    """Whether it needs what only comparisons need: the integrated model, static limits."""


_NO_FLOOR: Settings = {"floors": None}

RECIPES: dict[str, Recipe] = {
    "minder-paper": Recipe("as published, nothing of ours", {"profile": "paper"}),
    "minder": Recipe("default profile"),
    "pca": Recipe(
        "principal components in place of the LSTM-VAE", {"denoise": {"denoiser": "pca"}}
    ),
    "raw": Recipe(
        "windows as they are: no denoising",
        {"denoise": {"denoiser": "none"}},
        denoises=False,
    ),
    "con": Recipe(
        "embeddings of all metrics as one vector",
        {"detect": {"floors": {}, "default_floor": 0.03}},
        lambda models, config, _: ConcatenatedDetector(models, config),
    ),
    "int": Recipe(
        "one model over all metrics",
        {"detect": {"floors": {}, "default_floor": 0.03}},
        lambda models, config, extra: IntegratedDetector(models, config, extra.integrated()),
        denoises=False,
        compares=True,
    ),
    "mahalanobis": Recipe(
        "Mahalanobis distance of window statistics",
        {"detect": {**_NO_FLOOR, "theta": 1.5, "kappa": 0.7}},
        lambda models, config, _: MahalanobisDetector(models, config),
        denoises=False,
    ),
    "no-continuity": Recipe(
        "default profile that names the first machine at once",
        {"detect": {"continuity_seconds": 1, "exhaustive": False}},
    ),
    "threshold": Recipe(
        "static alerts on each metric",
        {"detect": {**_NO_FLOOR, "theta": 0.5, "kappa": None}},
        lambda models, config, extra: StaticDetector(models, config, extra.static_limits),
        denoises=False,
        compares=True,
    ),
    "zscore-only": Recipe(
        "z-score of window means, without floor, baseline and denoising",
        {"detect": {**_NO_FLOOR, "role_baseline": False}},
        lambda models, config, _: ZscoreDetector(models, config),
        denoises=False,
    ),
}
"""By name, in the order of the table."""


@dataclass(frozen=True)
class Variant:
    """One detector, ready to look at jobs."""

    name: str
    about: str
    config: MinderConfig
    models: Models
    make: Callable[[], Detector]
    """Gives a new detector, which knows nothing of any job."""


def build(
    name: str,
    folder: Path,
    *,
    base: Mapping[str, Any] | None = None,
    comparison: Path,
) -> Variant:
    """Make one detector.

    Args:
        name: key of `RECIPES`.
        folder: of the trained models.
        base: configuration that it starts from, as TOML gives it; its profile does not count.
        comparison: folder of what only comparisons need.

    Raises:
        ConfigError: no such detector, or a model is missing.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"a variant must be one of {sorted(RECIPES)}, got {name!r}{nearest(name, RECIPES)}"
        )
    recipe = RECIPES[name]
    config = minder_config(_merged({**(base or {}), "profile": "default"}, recipe.settings))
    metrics = config.detect.metrics
    loaded = load_models(folder, config.denoise, metrics)
    models = loaded if recipe.denoises or not recipe.compares else Models({}, loaded.limits)
    extra = load_comparison(comparison, metrics) if recipe.compares else Comparison()
    return Variant(name, recipe.about, config, models, lambda: recipe.make(models, config, extra))


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of both; where both have a table, its keys of both."""
    result = dict(base)
    for key, value in over.items():
        mine = result.get(key)
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            value = {**mine, **value}
        result[key] = value
    return result
