"""What only comparisons need: one model over all metrics, and limits of static alerts.

Source: Minder, arXiv 2411.01791, section 6 (the integrated model); static limits are ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from planish.base.errors import ConfigError
from planish.minder.detect.config import MinderConfig
from planish.minder.detect.denoise import WINDOW, windows_of
from planish.minder.detect.distances import known_windows
from planish.minder.detect.frame import F32, Frame
from planish.minder.detect.preprocess import Limits, Prepared, prepare
from planish.minder.lab.train import split_by_job
from tests.minder_lab.variants_traces import StaticLimits, static_limits

if TYPE_CHECKING:
    from planish.minder.lab.vae import LstmVae, Training

SCHEMA = "minder-comparison/1"
_WEIGHTS, _FACTS = "integrated.safetensors", "comparison.json"
_SAMPLE_OF_FRAME = 20_000


@dataclass(frozen=True)
class Comparison:
    """The fitted parts."""

    metrics: tuple[str, ...] = ()
    """Of the integrated model, in its order."""
    static_limits: StaticLimits = field(default_factory=dict)
    weights: dict[str, F32] = field(default_factory=dict)
    """Of the integrated model."""

    def integrated(self) -> Integrated:
        """Return the integrated model."""
        import torch

        from planish.minder.lab.vae import LstmVae

        model = LstmVae(width=len(self.metrics))
        model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in self.weights.items()})
        return Integrated(model)


class Integrated:
    """A model over all metrics as a denoiser of windows whose samples stand together."""

    name = "integrated"
    metric = "all_metrics"
    quality = "good"
    version = "int"

    def __init__(self, model: LstmVae) -> None:
        """Wrap a model of some width."""
        self.model, self.width = model.eval(), model.output.out_features

    def embed(self, windows: F32) -> F32:
        """Return reconstructions [K, 8 * width]."""
        import torch

        with torch.no_grad():
            batch = torch.from_numpy(windows).view(len(windows), WINDOW, self.width)
            found: F32 = self.model(batch)[0].reshape(len(windows), -1).numpy()
        return found


def fit_comparison(
    frames: Sequence[Frame],
    folder: Path,
    config: MinderConfig,
    limits: Limits,
    training: Training,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> float:
    """Fit the parts to healthy frames of several jobs and write them.

    Returns:
        The integrated model's mean squared error per sample on held-out jobs.
    """
    from safetensors.numpy import save_file

    from planish.minder.lab.vae import train_vae

    train, held_out = split_by_job(frames, training.seed)
    prepared = [prepare(frame, config, limits) for frame in train]
    metrics = config.detect.metrics
    data = _windows(prepared, metrics, training.seed)
    test = _windows([prepare(f, config, limits) for f in held_out], metrics, training.seed)
    model, losses = train_vae(data, test, training, progress=progress)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FACTS).unlink(missing_ok=True)
    weights = {key: np.ascontiguousarray(t.numpy()) for key, t in model.state_dict().items()}
    save_file(weights, folder / _WEIGHTS)
    facts = {
        "schema": SCHEMA,
        "metrics": list(metrics),
        "static_limits": {k: list(v) for k, v in static_limits(prepared).items()},
        "mse_held_out": losses.mse_held_out,
        "variance_held_out": losses.variance_held_out,
    }
    (folder / _FACTS).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", "utf-8")
    return losses.mse_held_out


def _windows(prepared: Sequence[Prepared], metrics: Sequence[str], seed: int) -> F32:
    """Return [K, 8, metrics], windows of which every metric is known."""
    generator = np.random.default_rng(seed)
    parts = []
    for one in prepared:
        if any(name not in one.values for name in metrics):
            continue
        unknown = np.logical_or.reduce([one.masked[name] for name in metrics])
        rows, columns = np.nonzero(known_windows(unknown))
        kept = np.sort(generator.permutation(len(rows))[:_SAMPLE_OF_FRAME])
        rows, columns = rows[kept], columns[kept]
        stack = [windows_of(one.values[name])[rows, columns] for name in metrics]
        parts.append(np.stack(stack, axis=2).astype(np.float32))
    empty = np.zeros((0, WINDOW, len(metrics)), np.float32)
    return np.concatenate(parts) if parts else empty


def load_comparison(folder: Path, metrics: tuple[str, ...]) -> Comparison:
    """Read the parts.

    Raises:
        ConfigError: they are missing, damaged, or were fitted to other metrics.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        facts = json.loads((folder / _FACTS).read_text("utf-8"))
        weights = load_file(folder / _WEIGHTS)
        limits = {name: (float(a), float(b)) for name, (a, b) in facts["static_limits"].items()}
        seen = (facts["schema"], tuple(facts["metrics"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"`{folder}` must hold {_FACTS} and {_WEIGHTS}, got {error}; run `python -m "
            "tests.minder_lab evaluate --fit-comparison`"
        ) from None
    if seen != (SCHEMA, metrics):
        raise ConfigError(
            f"`{folder / _FACTS}` must be of {SCHEMA} and the metrics {metrics}, got {seen}; run "
            "`python -m tests.minder_lab evaluate --fit-comparison`"
        )
    return Comparison(metrics, limits, {k: v.astype(np.float32) for k, v in weights.items()})
