"""Jobs whose machines differ by design, again and again, or whose telemetry stops."""

import numpy as np
import pytest

from planish.minder.detect.config import minder_config
from planish.minder.detect.denoise import Identity, Models
from planish.minder.detect.frame import Frame
from planish.minder.detect.job_monitor import JobMonitor

START = 1_000_000
LEVELS = {
    "pfc_tx_packet_rate": 40.0,
    "cpu_usage": 25.0,
    "gpu_power_draw": 280.0,
    "gpu_tensor_core_activity": 0.5,
    "gpu_duty_cycle": 95.0,
}
MODELS = Models(
    {name: Identity(name) for name in LEVELS},
    {"gpu_power_draw": (0.0, 420.0), "pfc_tx_packet_rate": (0.0, 9.0)},
)


def job(machines=16, seconds=1800):
    """A healthy job of synchronous training, as a frame."""
    rng = np.random.default_rng(0)
    rest = np.where(np.arange(seconds) % 11 < 9, 1.0, 0.7)[:, None]
    values = {}
    for name, level in LEVELS.items():
        spread = 0.3 if name.startswith("pfc") else 0.02
        noise = np.exp(spread * rng.normal(size=(seconds, machines)))
        values[name] = (level * rest * noise).astype(np.float32)
    names = tuple(f"n{i:02d}" for i in range(machines))
    return Frame("job", np.arange(START, START + seconds), names, values)


def results(frame, every=60, **facts):
    """Call again and again from the start of the frame on."""
    config = minder_config({"detect": {"metrics": [*LEVELS]}})
    monitor = JobMonitor("job", MODELS, config)
    ends = range(START + 60, START + frame.num_seconds + 1, every)
    return [monitor.call(frame.slice(end - 900, end), **facts) for end in ends]


def named(frame, **facts):
    """Return each machine that is named, an event of the job as ""."""
    return sorted({f.machine for result in results(frame, **facts) for f in result.findings})


def ahead(samplers, machines=12, seconds=2400):
    """A healthy job whose samplers sample while the others train, wait for them, and train."""
    frame = job(machines, seconds)
    trainers = [n for n in range(machines) if n not in samplers]
    waits = np.flatnonzero(np.arange(seconds) % 400 >= 280)
    for name, share, waiting in (
        ("gpu_tensor_core_activity", 0.3, 0.0),
        ("gpu_power_draw", 0.7, 0.3),
        ("gpu_duty_cycle", 0.9, 0.0),
        ("cpu_usage", 1.6, 0.5),
    ):
        frame.values[name][:, samplers] *= np.float32(share)
        frame.values[name][np.ix_(waits, trainers)] *= np.float32(waiting)
    return frame


def uneven(machines):
    """A healthy job whose hosts do unlike amounts of other work."""
    frame = job(machines)
    frame.values["cpu_usage"] += np.linspace(-9, 9, machines, dtype=np.float32)
    return frame


def gone(frame, machines, start):
    """Let machines send nothing from some second on."""
    for name in frame.values:
        frame.values[name][start:, machines] = np.nan
        frame.mask[name][start:, machines] = False


@pytest.mark.parametrize(
    ("machines", "stages", "share"),
    [(16, 2, 0.65), (16, 4, 0.5), (12, 3, 0.6), (9, 3, 0.7), (8, 4, 0.75)],
)
def test_stages_that_no_label_tells_are_roles(machines, stages, share):
    frame = job(machines)
    of = np.arange(machines) * stages // machines
    for name in ("gpu_power_draw", "gpu_tensor_core_activity"):
        frame.values[name] *= np.float32(1 - (1 - share) * of / (stages - 1))
    assert named(frame) == []


@pytest.mark.parametrize("others", [[3, 9], [0, 15], [4, 5, 6], [1, 2, 8, 14]])
def test_machines_in_another_role_are_not_named_and_one_of_their_faults_is(others):
    frame = job()
    for name in ("gpu_power_draw", "gpu_tensor_core_activity"):
        frame.values[name][:, others] *= 0.4
    frame.values["cpu_usage"][:, others] += 20
    assert named(frame) == []
    frame.values["cpu_usage"][900:1400, others[0]] -= 35
    assert named(frame) == [f"n{others[0]:02d}"]


@pytest.mark.parametrize(
    ("metric", "factor"),
    [
        *(("gpu_power_draw", 0.65), ("gpu_power_draw", 0.75), ("gpu_power_draw", 0.84)),
        *(("pfc_tx_packet_rate", 12), ("pfc_tx_packet_rate", 60)),
    ],
)
def test_a_single_machine_that_is_bad_from_the_start_is_named(metric, factor):
    frame = job(seconds=900)
    frame.values[metric][:, 6] *= factor
    assert named(frame) == ["n06"]


@pytest.mark.parametrize(
    ("machines", "place", "less"), [(5, 2, 5), (6, 3, 6), (6, 2, 6), (4, 1, 6)]
)
def test_in_a_small_job_of_uneven_hosts_one_that_does_less_is_named(machines, place, less):
    frame = uneven(machines)
    frame.values["cpu_usage"][1200:1600, place] -= less
    assert named(frame) == [frame.machines[place]]


@pytest.mark.parametrize("machines", [5, 6, 16])
def test_a_machine_that_alone_loses_what_it_differs_by_is_named(machines):
    frame = uneven(machines)
    frame.values["cpu_usage"][1200:1600, -1] -= 9
    assert named(frame) == [frame.machines[-1]]


def test_a_host_that_was_busy_when_its_role_was_learned_is_not_named_once_it_is_not():
    frame = job(16, 1200)
    frame.values["cpu_usage"][60:190, 4] += 15
    assert named(frame) == []


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_machines_that_all_lose_what_they_differ_by_are_not_named(share):
    frame = uneven(12)
    offsets = np.linspace(-9, 9, 12, dtype=np.float32)
    frame.values["cpu_usage"][1200:1600] -= np.float32(1 - share) * offsets
    assert named(frame) == []


def test_a_machine_that_was_named_within_a_day_has_no_role():
    frame = job(seconds=900)
    frame.values["cpu_usage"][:, 4] -= 10
    assert named(frame) == []
    assert named(frame, suspects={"n04": int(frame.ts[0])}) == ["n04"]


@pytest.mark.parametrize("pause", [15, 40, 60])
@pytest.mark.parametrize(
    ("metric", "factor"),
    [("gpu_power_draw", 0.75), ("cpu_usage", 0.5), ("gpu_tensor_core_activity", 0.5)],
)
def test_a_machine_that_differs_again_and_again_is_named(metric, factor, pause):
    frame = job(seconds=2400)
    for start in range(700, 2200, 200 + pause):
        frame.values[metric][start : start + 200, 5] *= factor
    assert named(frame) == ["n05"]


@pytest.mark.parametrize("others", [0, 2, 14])
def test_a_machine_that_says_that_it_waits_is_compared_with_nobody(others):
    frame = job()
    waits = slice(700, 1250 if others < 14 else 1700)
    columns = list(range(8 - others // 2, 9 + others // 2))
    for name in LEVELS:
        frame.values[name][waits, columns] *= 0.05
    stretch = (START + waits.start, START + waits.stop)
    waiting = {frame.machines[column]: [stretch] for column in columns}
    assert named(frame, waiting=waiting) == []
    if not others:
        assert named(frame) == ["n08"]
    # What differs before and after is found, and what differs on another machine meanwhile.
    frame.values["cpu_usage"][300:650, 8] *= 0.4
    assert named(frame, waiting=waiting) == ["n08"]
    if others < 14:
        frame.values["cpu_usage"][waits, 0] *= 0.4
        assert named(frame, waiting=waiting) == ["n00", "n08"]


@pytest.mark.parametrize("every", [5, 7, 8, 30])
def test_calls_that_are_seconds_apart_find_what_calls_a_minute_apart_find(every):
    frame = job(machines=6, seconds=1200)
    frame.values["cpu_usage"][500:, 2] *= 0.5
    assert named(frame, every=every) == named(frame) == ["n02"]


def test_machines_that_differ_in_turn_are_not_named_for_that():
    frame = job(seconds=2400)
    for turn, start in enumerate(range(700, 2200, 130)):
        frame.values["cpu_usage"][start : start + 120, turn % 4] *= 0.5
    assert named(frame) == []


@pytest.mark.parametrize("idle_after", [0, 90, 160])
def test_a_machine_whose_rows_run_out_draws_less_power_before_its_gpus_are_idle(idle_after):
    frame = job(seconds=1200)
    late = 300 + idle_after
    frame.values["gpu_power_draw"][300:620, 5] *= 0.6
    frame.values["gpu_tensor_core_activity"][300:620, 5] *= 0.5
    frame.values["gpu_duty_cycle"][late:620, 5] = 0
    # A fault shows in all of them at once.
    assert named(frame) == ([] if idle_after else ["n05"])


@pytest.mark.parametrize("steps", [(1.0,), (0.25, 1.0), (0.2, 0.4, 0.6, 0.8, 1.0)])
def test_a_fault_that_begins_while_all_are_nearly_idle_is_no_work_that_runs_out(steps):
    frame = job(seconds=1600)
    for metric in ("gpu_power_draw", "gpu_tensor_core_activity", "gpu_duty_cycle"):
        frame.values[metric][900:1220, 5] *= 0.3
    for place, step in enumerate(steps[:-1]):
        rows = slice(900 + 40 * place, 940 + 40 * place)
        for metric in ("gpu_power_draw", "gpu_tensor_core_activity", "gpu_duty_cycle"):
            frame.values[metric][rows] *= step
    # Little by little the distance grows as well, as where work runs out.
    assert named(frame) == ([] if len(steps) > 2 else ["n05"])


@pytest.mark.parametrize("points", [20, -15])
def test_beside_a_dead_machine_a_host_that_differs_alone_is_not_named(points):
    frame = job()
    frame.values["cpu_usage"][1000:1400, 3] += points
    assert named(frame) == ["n03"]
    gone(frame, [9], 900)
    assert named(frame) == ["n09"]
    # Its GPUs differ as well.
    frame.values["gpu_power_draw"][1000:1400, 3] *= 0.5
    assert named(frame) == ["n03", "n09"]


def test_a_machine_that_is_the_first_in_two_turns_is_not_named_for_that():
    frame = job(seconds=2400)
    metrics = ("cpu_usage", "gpu_power_draw", "gpu_tensor_core_activity", "gpu_duty_cycle")
    for start, machine in ((400, 3), (750, 2), (1100, 1), (1450, 0), (1900, 0)):
        for metric in metrics:
            frame.values[metric][start : start + 170, machine] *= 0.4
    assert named(frame) == []


@pytest.mark.parametrize(("points", "seconds"), [(6, 380), (10, 600), (4, 300)])
def test_a_host_that_is_busy_beside_its_job_is_not_named(points, seconds):
    frame = job()
    frame.values["cpu_usage"][900 : 900 + seconds, 2] += points
    assert named(frame) == []
    # The job stops because of it.
    frame.values["gpu_tensor_core_activity"][905 : 900 + seconds] *= 0.03
    assert named(frame) == ["n02"]


HALVES = [[0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10], [8, 9, 10, 11]]


@pytest.mark.parametrize("samplers", HALVES)
@pytest.mark.parametrize("metric", ["cpu_usage", "gpu_power_draw"])
@pytest.mark.parametrize("is_trainer", [False, True])
def test_samplers_and_trainers_are_each_compared_with_their_own(samplers, metric, is_trainer):
    frame = ahead(samplers)
    machine = 7 if is_trainer else samplers[-1]
    assert named(frame) == []
    frame.values[metric][1300:1900, machine] *= 0.75
    assert named(frame) == [f"n{machine:02d}"]


def test_roles_need_as_many_machines_as_a_job_that_is_looked_at():
    frame = ahead(HALVES[0])
    rules = {"detect": {"metrics": [*LEVELS], "min_machines": 7}}
    monitor = JobMonitor("job", MODELS, minder_config(rules))
    for end in range(START + 60, START + 1201, 60):
        monitor.call(frame.slice(end - 900, end))
    assert monitor.known.stages == {}


def test_roles_outlast_a_restart_and_not_a_machine_of_which_none_is_known():
    frame, config = ahead(HALVES[0]), minder_config({"detect": {"metrics": [*LEVELS]}})
    monitor = JobMonitor("job", MODELS, config)
    for end in range(START + 60, START + 1201, 60):
        monitor.call(frame.slice(end - 900, end))
    roles = {f"n{i:02d}": "n00" if i < 6 else "n06" for i in range(12)}
    assert monitor.known.stages == roles
    again = JobMonitor.from_json(monitor.to_json(), MODELS, config)
    again.call(frame.slice(START + 360, START + 1260))
    assert again.known.stages == roles
    wide = ahead(HALVES[0], machines=13)
    again.call(wide.slice(START + 420, START + 1320))
    assert again.known.stages == {}


def test_machines_that_end_their_rollouts_at_other_moments_have_no_roles():
    frame, rng = job(12, 2400), np.random.default_rng(3)
    config = minder_config({"detect": {"metrics": [*LEVELS]}})
    for begin in range(0, 2400, 400):
        for machine, tail in enumerate(rng.uniform(0, 200, 12).astype(int)):
            rest = slice(begin + 200 + tail, begin + 400)
            for name in ("gpu_tensor_core_activity", "gpu_power_draw", "gpu_duty_cycle"):
                frame.values[name][rest, machine] *= 0.3
    monitor = JobMonitor("job", MODELS, config)
    for end in range(START + 60, START + 2401, 60):
        monitor.call(frame.slice(end - 900, end))
        assert monitor.known.stages == {}


def test_machines_that_change_their_roles_are_compared_with_their_new_peers():
    frame, other = ahead(HALVES[0], seconds=1200), ahead(HALVES[1], seconds=1200)
    config = minder_config({"detect": {"metrics": [*LEVELS]}})
    monitor = JobMonitor("job", MODELS, config)
    for end in range(START + 60, START + 1201, 60):
        monitor.call(frame.slice(end - 900, end))
    assert monitor.known.stages["n01"] == monitor.known.stages["n00"]
    values = {name: np.concatenate([frame.values[name], other.values[name]]) for name in LEVELS}
    both = Frame("job", np.arange(START, START + 2400), frame.machines, values)
    for end in range(START + 1260, START + 2401, 60):
        monitor.call(both.slice(end - 900, end))
    assert monitor.known.stages == {f"n{i:02d}": f"n0{i % 2}" for i in range(12)}


@pytest.mark.parametrize("only", [LEVELS, [name for name in LEVELS if name.startswith("gpu")]])
def test_exporters_that_all_stand_still_are_an_outage_of_the_telemetry(only):
    frame = job()
    for name in only:
        frame.values[name][900:] = frame.values[name][900]
    found = results(frame)
    assert [f for result in found for f in result.findings] == []
    assert found[-1].status == "outage"
    assert found[-1].silent == frame.machines
    assert found[14].status == "ok"


def test_four_of_sixteen_machines_that_fall_silent_are_dead_where_the_others_stop():
    frame = job()
    gone(frame, [1, 4, 9, 12], 900)
    assert results(frame)[-1].status == "outage"
    frame.values["gpu_tensor_core_activity"][905:] *= 0.02
    (finding,) = results(frame)[-1].findings
    assert finding.kind == "job_wide"
    assert finding.machines == ("n01", "n04", "n09", "n12")


def test_machines_that_fall_silent_one_after_the_other_are_dead():
    frame = job()
    for place, machine in enumerate((1, 4, 9, 12)):
        gone(frame, [machine], 900 + 70 * place)
    assert results(frame)[-1].findings[0].machines == ("n01", "n04", "n09", "n12")


@pytest.mark.parametrize("machines", [2, 3])
def test_in_a_small_job_a_silent_machine_is_named_and_nobody_else(machines):
    frame = job(machines)
    frame.values["cpu_usage"][300:, 0] *= 3
    assert named(frame) == []
    gone(frame, [1], 900)
    assert named(frame) == ["n01"]


@pytest.mark.parametrize(("machine", "watts"), [(3, 78.0), (12, 150.0)])
def test_one_bad_gpu_of_eight_is_seen_in_the_worst_device(machine, watts):
    frame = job()
    mean, seconds = frame.values["gpu_power_draw"], slice(900, 1440)
    mean[seconds, machine] -= (mean[seconds, machine] - watts) / 8
    assert named(frame) == []
    worst = 0.98 * mean
    worst[seconds, machine] = np.minimum(worst[seconds, machine], watts)
    worse = Frame("job", frame.ts, frame.machines, {**frame.values, "gpu_power_draw_worst": worst})
    found = [f for result in results(worse) for f in result.findings]
    assert {f.machine for f in found} == {f"n{machine:02d}"}
    assert found[0].metric == "gpu_power_draw_worst"


@pytest.mark.parametrize(("start", "stop", "is_named"), [(900, 1800, True), (900, 1100, False)])
def test_a_gpu_whose_series_vanish_is_a_fault_of_its_machine(start, stop, is_named):
    frame = job()
    counts = np.full((1800, 16), 8, np.float32)
    counts[:, 2] = 4
    counts[start:stop, 7] = 7
    frame = Frame("job", frame.ts, frame.machines, {**frame.values, "gpu_count": counts})
    assert named(frame) == ["n07"] * is_named
