"""Machines that are always apart, by the clock of their samples or before anything is known."""

import numpy as np

from planish.minder.detect.config import minder_config
from planish.minder.detect.denoise import Identity, Models
from planish.minder.detect.frame import Frame
from planish.minder.detect.job_monitor import JobMonitor

METRIC = "gpu_tensor_core_activity"
MODELS = Models({METRIC: Identity(METRIC)})
START = 1_000_000


def made(machines=8, seconds=1500, *, late=0, seed=0):
    """Iterations of 12 s with sharp edges; the last machine shows them some seconds late."""
    rng = np.random.default_rng(seed)
    wave = np.where(np.arange(seconds + 60) % 12 < 9, 0.5, 0.05)[:, None]
    values = np.repeat(wave[60:], machines, axis=1)
    values[:, -1] = wave[60 - late : len(wave) - late, 0]
    values = np.clip(values + rng.normal(0, 0.01, values.shape), 0, 1)
    names = tuple(f"m{i}" for i in range(machines))
    return Frame(
        "job", np.arange(START, START + seconds), names, {METRIC: values.astype(np.float32)}
    )


def alarms(frame, **detect):
    config = minder_config({"detect": {"metrics": [METRIC], **detect}})
    monitor = JobMonitor("job", MODELS, config)
    found = {}
    for end in range(START + 60, START + frame.num_seconds + 1, 60):
        for one in monitor.call(frame.slice(end - 900, end)).findings:
            found.setdefault(one.machine, end - START)
    return found


def test_a_machine_that_samples_late_alarms_only_where_its_usual_distance_does_not_count():
    frame = made(late=4)
    assert set(alarms(frame, usual_distance=False)) == {"m7"}
    assert alarms(frame) == {}


def test_a_fault_of_a_machine_that_samples_late_is_found():
    frame = made(late=2)
    frame.values[METRIC][800:1300, 7] = 0.0
    found = alarms(frame)
    assert set(found) == {"m7"}
    assert 1040 <= found["m7"] <= 1140


def test_what_has_always_been_so_is_no_fault_while_no_baseline_is_accepted():
    frame = made()
    frame.values[METRIC][:, 3] += 0.12
    late = {"baseline_early_seconds": 600}
    assert alarms(frame, **late, unknown_role_distance=0.0) == {"m3": 300}
    assert alarms(frame, **late) == {}
