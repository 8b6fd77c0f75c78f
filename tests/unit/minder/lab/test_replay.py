"""Replays: one line for each alert, who belonged to the job when, and results in time."""

import numpy as np
import pytest

from planish.minder.detect.config import minder_config
from planish.minder.detect.denoise import Identity, Models
from planish.minder.detect.frame import Frame
from planish.minder.lab.replay import Membership, notes_of, replay
from tests.minder_lab.simulator.sampling import thinned

METRICS = ("cpu_usage", "gpu_tensor_core_activity")
MODELS = Models({name: Identity(name) for name in METRICS})
CONFIG = minder_config({"detect": {"metrics": list(METRICS)}})
START = 2_000_007


def made(machines=8, seconds=1500, seed=0):
    rng = np.random.default_rng(seed)
    wave = np.sin(np.arange(seconds)[:, None] / 4)
    noise = rng.normal(0, 1, (2, seconds, machines))
    values = {
        "cpu_usage": (30 + 5 * wave + noise[0]).astype(np.float32),
        "gpu_tensor_core_activity": (0.4 + 0.1 * wave + 0.01 * noise[1]).astype(np.float32),
    }
    names = tuple(f"node-{i:03d}" for i in range(machines))
    return Frame("job", np.arange(START, START + seconds), names, values)


def lines(frame, **options):
    return [alert for call in replay(frame, MODELS, CONFIG, **options) for alert in call.alarms]


def scraped(frame, *, every=1, missing=0.0):
    return thinned(frame, np.random.default_rng(1), every=every, missing=missing)


@pytest.mark.parametrize("missing", [0.1, 0.3])
def test_a_fault_is_found_where_many_samples_are_missing(missing):
    frame = made()
    frame.values["cpu_usage"][610:, 3] -= 20
    calls = list(replay(scraped(frame, missing=missing), MODELS, CONFIG))
    (alert,) = [alert for call in calls for alert in call.alarms]
    assert alert.machine == "node-003"
    assert notes_of([call.result for call in calls]) == []


@pytest.mark.parametrize(("seconds", "every", "named"), [(230, 1, 0), (230, 20, 0), (300, 20, 1)])
@pytest.mark.parametrize("burst", [0, 20])
def test_what_a_held_sample_makes_longer_is_not_named(seconds, every, named, burst):
    frame = made()
    frame.values["cpu_usage"][610 : 610 + seconds, 3] += 20
    # A short burst before it meets just one sample, which is held until the next one.
    frame.values["cpu_usage"][570 : 570 + burst, 3] += 20
    calls = list(replay(scraped(frame, every=every), MODELS, CONFIG))
    assert len([alert for call in calls for alert in call.alarms]) == named
    notes = notes_of([call.result for call in calls])
    assert any("come every 20 s" in note for note in notes) == (every == 20)


def without(frame, machine, start=0, stop=10**6):
    for name in METRICS:
        frame.mask[name][start:stop, machine] = False
        frame.values[name][start:stop, machine] = np.nan


@pytest.mark.parametrize("every", [0, 30, 240])
def test_a_fault_gives_one_line_at_the_first_call_that_can_know(every):
    frame = made()
    frame.values["cpu_usage"][610:, 3] -= 20
    (alert,) = lines(frame, every=every)
    step = every or 60
    # Windows that reach over the onset count; the seventh second of the last one ends the run.
    expected = START + -(-(610 + 243) // step) * step
    assert alert.time == pytest.approx(expected, abs=step)
    assert (alert.machine, alert.kind, alert.metric) == ("node-003", "dissimilar", "cpu_usage")


def test_a_healthy_trace_gives_no_line_and_one_call_for_each_minute():
    calls = list(replay(made(seconds=601), MODELS, CONFIG))
    assert [call.now - START for call in calls] == [*range(60, 601, 60), 601]
    assert not any(call.alarms for call in calls)


@pytest.mark.parametrize("others_wait", [True, False])
def test_a_machine_that_nobody_replaces_is_silent_whatever_the_others_do(others_wait):
    frame = made()
    without(frame, 5, start=700)
    if others_wait:
        frame.values["gpu_tensor_core_activity"][702:] = 0.01
    (alert,) = lines(frame)
    assert (alert.machine, alert.kind) == ("node-005", "silent")
    assert START + 940 < alert.time <= START + 1020


def test_another_machine_takes_the_place_of_one_that_is_gone():
    frame = made(machines=9)
    without(frame, 8, stop=800)
    without(frame, 2, start=700)
    frame.values["gpu_tensor_core_activity"][702:790] = 0.01
    members = Membership(frame, CONFIG)
    assert members.at(START + 600) == frame.machines[:8]
    assert members.at(START + 900) == tuple(n for n in frame.machines if n != "node-002")
    assert lines(frame) == []
