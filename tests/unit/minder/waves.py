"""A job whose machines all follow one wave, as a frame, and models that change nothing."""

import numpy as np

from planish.minder.detect.denoise import Identity, Models
from planish.minder.detect.detector import Detector
from planish.minder.detect.frame import Frame

METRICS = ("cpu_usage", "gpu_duty_cycle")
MODELS = Models({name: Identity(name) for name in METRICS})
START = 1_000_000


def detect(frame, models, config, job=None):
    """Look at one frame on its own."""
    return Detector(models, config).call(frame, job)


def waves(machines: int = 8, seconds: int = 1800, *, swing: float = 20, seed: int = 0) -> Frame:
    """Return a healthy job; the frame of each seed is of a job of its own."""
    rng = np.random.default_rng(seed)
    wave = 60 + swing * np.sin(np.arange(seconds)[:, None] / 4)
    values = {
        name: (wave + rng.normal(0, 1, (seconds, machines))).astype(np.float32) for name in METRICS
    }
    names = tuple(f"node-{i:03d}" for i in range(machines))
    return Frame(f"job-{seed}", np.arange(START, START + seconds), names, values)
