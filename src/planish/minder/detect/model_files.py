"""Trained models on disk: for each metric a folder with a file of weights and a file of facts.

    models/
      limits.json                       fitted limits of all metrics
      <metric>/model.safetensors        weights of the LSTM-VAE, and the components of its fallback
      <metric>/meta.json                sizes, limits, errors, data digest, seed, versions

Weights are plain numbers, so a folder can not bring code that runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planish.base.errors import ConfigError
from planish.minder.detect.config import DenoiseConfig
from planish.minder.detect.denoise import WINDOW, Denoiser, Identity, Models, Pca, Vae, shapes
from planish.minder.detect.frame import F32
from planish.minder.detect.metrics_table import METRICS

SCHEMA = "minder-model/1"
GATE = 0.5
"""Largest held-out error of a good model, as a share of the variance of the same data."""
_WEIGHTS, _FACTS, _LIMITS = "model.safetensors", "meta.json", "limits.json"


@dataclass(frozen=True)
class Facts:
    """Sizes, errors and origin of one trained model."""

    metric: str
    limits: tuple[float, float]
    """Transformed values that scaled to 0 and 1 in training."""
    transform: str
    mse_train: float
    mse_held_out: float
    """Mean squared error per sample on held-out jobs."""
    variance_held_out: float
    """Variance per sample on held-out jobs, which is the error of a constant."""
    mse_pca: float
    """Mean squared error of four principal components on the same held-out windows."""
    divergence: float
    """Divergence of the latent variable from the standard normal, in nats."""
    n_windows: int
    data_sha256: str
    """Digest of the training windows."""
    seed: int
    version: str
    """Version of this package."""
    hidden: int = 4
    latent: int = 8
    window: int = WINDOW
    schema: str = SCHEMA

    @property
    def quality(self) -> str:
        """`good`, or `degraded` for a model whose error is too large."""
        good = self.mse_held_out <= GATE * self.variance_held_out
        return "good" if good and math.isfinite(self.mse_held_out) else "degraded"

    @property
    def model_id(self) -> str:
        """Short name that changes with the data and the seed."""
        return f"{self.data_sha256[:8]}-{self.seed}"


def default_models() -> Path:
    """Return the folder of the models that come with this package, trained on simulated jobs."""
    return Path(__file__).resolve().parent / "models"


def save_model(folder: Path, facts: Facts, weights: Mapping[str, F32], pca: Pca) -> None:
    """Write one metric's model. The facts are written last, so an interrupted write leaves no
    model.
    """
    from safetensors.numpy import save_file

    place = folder / facts.metric
    place.mkdir(parents=True, exist_ok=True)
    (place / _FACTS).unlink(missing_ok=True)
    tensors = {f"vae.{name}": np.ascontiguousarray(array) for name, array in weights.items()}
    tensors |= {"pca.mean": pca.mean, "pca.components": pca.components}
    save_file(tensors, place / _WEIGHTS)
    (place / _FACTS).write_text(json.dumps(asdict(facts), indent=1, sort_keys=True) + "\n", "utf-8")


def save_limits(folder: Path, limits: Mapping[str, tuple[float, float]]) -> None:
    """Write the fitted limits of all metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: list(pair) for name, pair in limits.items()}, indent=1, sort_keys=True)
    (folder / _LIMITS).write_text(text + "\n", "utf-8")


def load_models(folder: Path, config: DenoiseConfig, metrics: tuple[str, ...]) -> Models:
    """Read the models of some metrics from a folder that `save_model` and `save_limits` wrote.

    Raises:
        ConfigError: a model is missing, damaged, or has another schema, size or metric.
    """
    path, limits = folder / _LIMITS, {}
    for name, pair in _read_json(path).items():
        try:
            low, high = map(float, pair)
        except (TypeError, ValueError):
            low = high = math.nan
        if name not in METRICS or not (math.isfinite(low) and math.isfinite(high)):
            raise _refused(path, "map known metrics to two finite numbers", {name: pair})
        limits[name] = (low, high)
    return Models({name: _denoiser(folder, name, config) for name in metrics}, limits)


def _denoiser(folder: Path, metric: str, config: DenoiseConfig) -> Denoiser:
    """Return the denoiser of one metric: its VAE, or its principal components if the configuration
    or a degraded VAE asks for them.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if config.denoiser == "none":
        return Identity(metric)
    facts, path = read_facts(folder, metric), folder / metric / _WEIGHTS
    try:
        tensors = {name: array.astype(np.float32) for name, array in load_file(path).items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise _refused(path, "be a safetensors file", error) from None
    if config.denoiser == "pca" or (config.fall_back_to_pca and facts.quality == "degraded"):
        mean, components = (tensors.get(f"pca.{name}") for name in ("mean", "components"))
        if (
            mean is None
            or components is None
            or not (components.shape[1:] == mean.shape == (WINDOW,))
        ):
            what = f"hold a mean and components over {WINDOW} samples"
            raise _refused(path, what, sorted(tensors))
        pca = Pca(metric, mean, components)
        pca.version, pca.quality = facts.model_id, facts.quality
        return pca
    wanted = {f"vae.{name}": shape for name, shape in shapes(facts.hidden, facts.latent).items()}
    seen = {name: array.shape for name, array in tensors.items() if name.startswith("vae.")}
    if wanted != seen:
        raise _refused(path, f"hold the weights {wanted}", seen)
    return Vae(
        metric,
        {name.removeprefix("vae."): tensors[name] for name in wanted},
        version=facts.model_id,
        quality=facts.quality,
    )


def read_facts(folder: Path, metric: str) -> Facts:
    """Return the facts of one metric's model.

    Raises:
        ConfigError: the model is missing, or has another schema, metric or size.
    """
    place = folder / metric / _FACTS
    raw, names = _read_json(place), set(Facts.__dataclass_fields__)
    if set(raw) != names:
        raise _refused(place, f"have the keys {sorted(names)}", sorted(raw))
    expected = {"schema": SCHEMA, "metric": metric, "window": WINDOW}
    wrong = {key: raw[key] for key, value in expected.items() if raw[key] != value}
    numbers = [raw[k] for k in ("hidden", "latent")]
    if wrong or not all(isinstance(n, int) and 1 <= n <= 1024 for n in numbers):
        raise _refused(place, f"be of {expected} with sizes of 1 to 1,024", wrong or numbers)
    return Facts(**{**raw, "limits": tuple(raw["limits"])})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"`{path}` must be there, got nothing; run `planish minder train`, or name another "
            "folder of models"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, "be JSON", error) from None
    if not isinstance(raw, dict):
        raise _refused(path, "be a JSON object", type(raw).__name__)
    return raw


def _refused(path: Path, what: str, seen: object) -> ConfigError:
    return ConfigError(f"`{path}` must {what}, got {seen}; train the models again")
