"""Detection in made frames: who is named, from when, and independence of earlier calls."""

import dataclasses

import numpy as np
import pytest

from planish.minder.detect.config import minder_config
from planish.minder.detect.denoise import Identity, Models
from planish.minder.detect.detector import Detector
from planish.minder.detect.frame import Frame, Job
from tests.unit.minder.waves import METRICS, MODELS, START, detect, waves


def made(machines, *, odd=(), length=300, onset=300, seconds=900, shift=30.0):
    """The odd machines lie below the others for a while."""
    frame = waves(machines, seconds)
    for machine in odd:
        frame.values["cpu_usage"][onset : onset + length, machine] -= shift
    return frame


def config(profile="default", **detect):
    return minder_config({"profile": profile, "detect": {"metrics": list(METRICS), **detect}})


@pytest.mark.parametrize("profile", ["paper", "default"])
@pytest.mark.parametrize("machines", [4, 8, 64])
def test_the_odd_machine_is_named_with_its_onset(profile, machines):
    result = detect(made(machines, odd=[2]), MODELS, config(profile))
    (finding,) = result.findings
    assert (result.status, finding.machine, finding.metric) == ("fault", "node-002", "cpu_usage")
    # The windows that hold the onset begin up to 7 seconds before it.
    assert START + 293 <= finding.run_start <= START + 300
    assert finding.confirmed_at == finding.run_start + 247
    assert finding.evidence["gpu_duty_cycle"].candidate_share < 0.1


@pytest.mark.parametrize(
    ("machines", "odd", "length", "status"),
    [
        *((16, [2], 225, "ok"), (16, [2], 250, "fault")),
        *((8, range(4), 230, "ok"), (8, range(4), 300, "fault")),
    ],
)
def test_what_lasts_less_than_four_minutes_is_no_fault(machines, odd, length, status):
    assert detect(made(machines, odd=odd, length=length), MODELS, config()).status == status


def scraped(frame, every):
    """The frame as a slow scrape holds it; machines are asked one after the other."""
    rows, places = np.arange(frame.num_seconds)[:, None], np.arange(frame.num_machines)
    phase = places * every // frame.num_machines
    asked = np.maximum(0, (rows - phase) // every * every + phase)
    values = {name: array[asked, places] for name, array in frame.values.items()}
    return dataclasses.replace(frame, values=values)


def iterations(machines):
    """A job whose GPUs rest for a sixth of each iteration of 25 seconds."""
    frame = waves(machines, 900)
    rest = np.arange(900)[:, None] % 25 < 4
    frame.values["gpu_duty_cycle"] += np.where(rest, -40, 0).astype(np.float32)
    return frame


@pytest.mark.parametrize("machines", [8, 16])
def test_a_scrape_as_slow_as_an_iteration_names_nobody_but_the_odd_machine(machines):
    gpu = config(metrics=["gpu_duty_cycle"])
    # Each machine shows the same part of an iteration each time.
    assert detect(scraped(iterations(machines), 25), MODELS, gpu).status == "ok"
    odd = waves(machines, 900, swing=5)
    odd.values["gpu_duty_cycle"][500:840, 2] -= 40
    (finding,) = detect(scraped(odd, 20), MODELS, gpu).findings
    assert finding.machine == "node-002"


WORK = "gpu_tensor_core_activity"


def with_work(*differ, seconds=900):
    """A job with tensor cores; (machine, rows, GPU activity, tensor cores) say what is missing."""
    frame = waves(8, seconds, swing=5)
    values = {**frame.values, WORK: frame.values["gpu_duty_cycle"] / 100}
    for machine, rows, activity, work in differ:
        values["gpu_duty_cycle"][rows, machine] -= activity
        values[WORK][rows, machine] -= work
    return scraped(dataclasses.replace(frame, values=values, mask={}), 20)


def of_gpus(frame, **job):
    """Machines that are named by GPU metrics."""
    models = Models({name: Identity(name) for name in frame.values})
    gpu = config(metrics=["gpu_duty_cycle", WORK])
    return [finding.machine for finding in detect(frame, models, gpu, Job(**job)).findings]


@pytest.mark.parametrize(("work", "named"), [(0.0, ["node-002"]), (0.16, [])])
def test_a_slow_scrape_shows_another_part_of_an_iteration_in_the_tensor_cores_too(work, named):
    # One machine has its turn, another differs for longer: in all that its GPUs do, or in one.
    frame = with_work((5, slice(400, 500), 40, 0.4), (2, slice(500, 840), 40, work))
    assert of_gpus(frame) == named


@pytest.mark.parametrize(("is_young", "named"), [(True, []), (False, ["node-002"])])
def test_another_part_of_an_iteration_may_last_since_a_young_job_began(is_young, named):
    frame = with_work((2, slice(0, 450), 40, 0.4), seconds=450)
    assert of_gpus(frame, is_young=is_young) == named


def test_a_gpu_that_does_less_little_by_little_has_no_fewer_rows_where_its_tensor_cores_go_on():
    steps = ((2, slice(400, 500), 9, 0), (2, slice(500, 860), 20, 0))
    assert of_gpus(with_work(*steps)) == ["node-002"]


def test_a_slow_scrape_shows_a_fault_in_two_steps():
    frame = waves(8, 900, swing=5)
    frame.values["gpu_duty_cycle"][500:540, 2] -= 18
    frame.values["gpu_duty_cycle"][540:880, 2] -= 40
    (finding,) = detect(scraped(frame, 20), MODELS, config()).findings
    assert finding.machine == "node-002"


@pytest.mark.parametrize(("is_young", "named"), [(True, []), (False, ["node-002"])])
def test_a_slight_difference_from_the_second_sample_on_names_nobody_in_a_young_job(is_young, named):
    frame = waves(8, 450, swing=1)
    noise = np.random.default_rng(0).normal(0, 0.2, (450, 8))
    frame.values["gpu_duty_cycle"][:] = 60 + noise
    frame.values["gpu_duty_cycle"][20:, 2] -= 7
    findings = detect(scraped(frame, 20), MODELS, config(), Job(is_young=is_young)).findings
    assert [finding.machine for finding in findings] == named


@pytest.mark.parametrize(
    ("onset", "length", "status"), [(0, 500, "ok"), (300, 450, "ok"), (350, 500, "fault")]
)
def test_a_machine_is_named_by_a_held_gpu_metric_while_its_run_goes_on(onset, length, status):
    frame = waves(8, 900, swing=5)
    frame.values["gpu_duty_cycle"][onset : onset + length, 3] -= 40
    result = detect(scraped(frame, 20), MODELS, config())
    assert result.status == status
    assert [finding.machine for finding in result.findings] == ["node-003"] * (status == "fault")


def test_two_odd_machines_are_both_named_and_nobody_else():
    result = detect(made(32, odd=[3, 17]), MODELS, config())
    assert [f.machine for f in result.findings] == ["node-003", "node-017"]


@pytest.mark.parametrize(
    ("machines", "odd"),
    [(8, range(4)), (32, range(0, 32, 2)), (32, range(20, 28)), (6, [1, 3, 5]), (64, range(13))],
)
def test_a_part_of_the_job_that_differs_is_an_event_of_the_whole_job(machines, odd):
    (finding,) = detect(made(machines, odd=odd), MODELS, config()).findings
    assert (finding.machine, finding.kind) == ("", "job_wide")
    smaller = set(odd) if 2 * len(odd) < machines or 0 not in odd else set(range(4, 8))
    smaller = set(range(1, 32, 2)) if len(odd) == 16 else smaller
    assert finding.machines == tuple(f"node-{i:03d}" for i in sorted(smaller))
    assert START + 290 <= finding.run_start <= START + 330
    assert detect(made(machines, odd=odd), MODELS, config(two_modes=False)).findings != (finding,)


def test_parts_that_have_always_differed_are_no_event_while_nothing_is_known_of_the_roles():
    frame = made(8, odd=range(4), onset=0, length=900)
    unknown = Job(unknown={"cpu_usage": frame.machines})
    assert detect(frame, MODELS, config(), unknown).status == "ok"
    assert detect(frame, MODELS, config()).status == "fault"


def test_a_job_without_two_modes_has_no_such_event_whatever_its_spread():
    frame = made(12)
    frame.values["cpu_usage"] += np.linspace(-12, 12, 12, dtype=np.float32)
    assert detect(frame, MODELS, config(floors={"cpu_usage": 0.05})).status == "ok"


def test_a_small_lasting_offset_is_no_fault_by_default_and_one_as_published():
    frame = made(16, odd=[5], length=900, onset=0, shift=2.8)
    assert detect(frame, MODELS, config()).status == "ok"
    assert detect(frame, MODELS, config("paper")).findings[0].machine == "node-005"


def test_machines_are_compared_within_their_stage():
    frame = made(16)
    frame.values["cpu_usage"][:, 8:] += 15
    frame.values["cpu_usage"][200:600, 9] -= 15
    stages = {name: "late" if i >= 8 else "early" for i, name in enumerate(frame.machines)}
    result = detect(frame, MODELS, config(), Job(stages=stages))
    assert [f.machine for f in result.findings] == ["node-009"]


def test_a_machine_that_gives_no_sample_is_silent():
    frame = made(10)
    for name in METRICS:
        frame.values[name][600:, 4] = np.nan
        frame.mask[name][600:, 4] = False
    (finding,) = detect(frame, MODELS, config()).findings
    assert (finding.machine, finding.kind, finding.duration_s) == ("node-004", "silent", 300.0)
    for name in METRICS:
        frame.mask[name][600:, 4:7] = False
    assert detect(frame, MODELS, config()).status == "outage"


def test_permuting_machines_permutes_the_result_and_a_common_shift_changes_nothing():
    frame = made(12, odd=[4])
    order = np.random.default_rng(3).permutation(12)
    permuted = {name: values[:, order] for name, values in frame.values.items()}
    moved = detect(Frame("job", frame.ts, frame.machines, permuted), MODELS, config())
    assert moved.findings[0].machine == f"node-{list(order).index(4):03d}"
    shifted = {name: values - 5 for name, values in frame.values.items()}
    plain = detect(frame, MODELS, config()).findings[0]
    other = detect(Frame("job", frame.ts, frame.machines, shifted), MODELS, config()).findings[0]
    assert (other.machine, other.run_start) == (plain.machine, plain.run_start)


def test_calls_of_one_detector_equal_calls_of_new_ones_and_look_at_new_windows_only():
    frame = made(16, odd=[7], seconds=1200, length=500)
    detector = Detector(MODELS, config())
    computed = []
    for end in range(900, 1201, 60):
        piece = frame.slice(START + end - 900, START + end)
        if end == 1080:
            # A late sample: the windows that it touches are looked at again.
            frame.values["cpu_usage"][1000, 3] += 1
        known = dataclasses.replace(detector.call(piece), call_seconds=0.0)
        assert known == dataclasses.replace(detect(piece, MODELS, config()), call_seconds=0.0)
        computed.append(detector.windows_computed)
    assert computed == [2 * 893, 120, 120, 128, 120, 120]
