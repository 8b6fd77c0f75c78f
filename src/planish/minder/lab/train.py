"""Training: fits the models of all metrics to healthy frames of several jobs.

Source: Minder, arXiv 2411.01791, section 4.2: one model for each metric, unsupervised. The split by
job, the quality gate and the fallback are ours.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from planish import __version__
from planish.base.errors import ConfigError
from planish.minder.detect.config import MinderConfig
from planish.minder.detect.denoise import WINDOW, Pca, touching, windows_of
from planish.minder.detect.frame import F32, Frame
from planish.minder.detect.metrics_table import METRICS
from planish.minder.detect.model_files import Facts, save_limits, save_model
from planish.minder.detect.preprocess import Limits, fit_limits, prepare
from planish.minder.lab.vae import Training, train_vae

HELD_OUT_SHARE = 0.2
_SAMPLE_OF_FRAME = 60_000


def train_models(
    frames: Sequence[Frame],
    folder: Path,
    config: MinderConfig,
    training: Training,
    *,
    progress: Callable[[str, int, float], None] = lambda metric, epoch, error: None,
) -> dict[str, Facts]:
    """Fit limits and one model for each configured metric, and write them to a folder.

    `frames` are of at least two healthy jobs. `progress` is called with metric, epoch and held-out
    error.

    Returns:
        The facts of each model; a metric that no frame has is left out.

    Raises:
        ConfigError: there are fewer than two jobs, or no metric at all.
    """
    train, held_out = split_by_job(frames, training.seed)
    limits: dict[str, tuple[float, float]] = {
        name: fit_limits(train, METRICS[name])
        for name in config.detect.metrics
        if METRICS[name].limits is None and any(name in frame.values for frame in train)
    }
    save_limits(folder, limits)
    facts: dict[str, Facts] = {}
    for name in config.detect.metrics:
        windows = training_windows(train, name, config, limits, seed=training.seed)
        test = training_windows(held_out, name, config, limits, seed=training.seed)
        if len(windows) and len(test):
            bounds = METRICS[name].limits or limits[name]
            show = functools.partial(progress, name)
            facts[name] = _train_one(name, windows, test, folder, bounds, training, show)
    if not facts:
        raise ConfigError(
            f"training needs frames with some of {list(config.detect.metrics)}, got "
            f"{sorted({name for frame in frames for name in frame.values})}"
        )
    return facts


def split_by_job(frames: Sequence[Frame], seed: int) -> tuple[list[Frame], list[Frame]]:
    """Split frames 80 to 20 so that no job is on both sides; ConfigError if there are fewer than
    two jobs.
    """
    jobs = sorted({frame.job for frame in frames})
    if len(jobs) < 2:
        raise ConfigError(
            f"training needs frames of at least two jobs, one of them held out, got {jobs}"
        )
    order = np.random.default_rng(seed).permutation(len(jobs))
    count = max(1, round(HELD_OUT_SHARE * len(jobs)))
    chosen = {jobs[i] for i in order[:count]}
    return (
        [frame for frame in frames if frame.job not in chosen],
        [frame for frame in frames if frame.job in chosen],
    )


def training_windows(
    frames: Sequence[Frame], name: str, config: MinderConfig, limits: Limits, *, seed: int
) -> F32:
    """Return the known windows [M, 8] of one metric; large frames give a random subset."""
    # A model is trained with the limits of its own frames, not with those of the site.
    detect = config.detect.model_copy(update={"metrics": (name,)})
    own = config.model_copy(update={"detect": detect, "limits": {}, "boards": {}})
    generator = np.random.default_rng(seed)
    parts = []
    for frame in frames:
        prepared = prepare(frame, own, limits)
        if name not in prepared.values:
            continue
        windows = windows_of(prepared.values[name]).reshape(-1, WINDOW)
        known = np.flatnonzero(~touching(prepared.masked[name]))
        if len(known) > _SAMPLE_OF_FRAME:
            known = np.sort(generator.choice(known, _SAMPLE_OF_FRAME, replace=False))
        parts.append(windows[known].astype(np.float32))
    return np.concatenate(parts) if parts else np.zeros((0, WINDOW), np.float32)


def _train_one(
    name: str,
    windows: F32,
    test: F32,
    folder: Path,
    limits: tuple[float, float],
    training: Training,
    progress: Callable[[int, float], None],
) -> Facts:
    pca = Pca.fit(name, windows)
    model, losses = train_vae(windows, test, training, progress=progress)
    facts = Facts(
        metric=name,
        limits=limits,
        transform=METRICS[name].transform,
        mse_train=losses.mse_train,
        mse_held_out=losses.mse_held_out,
        variance_held_out=losses.variance_held_out,
        mse_pca=float(np.mean((pca.embed(test) - test) ** 2)),
        divergence=losses.divergence,
        n_windows=min(len(windows), training.max_windows),
        data_sha256=hashlib.sha256(np.ascontiguousarray(windows).tobytes()).hexdigest(),
        seed=training.seed,
        version=__version__,
    )
    weights = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    save_model(folder, facts, weights, pca)
    return facts
