"""One job over time: warm-up, idle machines, coming and going, restarts, baselines."""

import json

import numpy as np
import pytest

from planish.minder.detect.baseline import Baseline, History
from planish.minder.detect.config import minder_config
from planish.minder.detect.denoise import Identity, Models
from planish.minder.detect.distances import compared_values
from planish.minder.detect.frame import Frame, Job
from planish.minder.detect.job_monitor import JobMonitor
from planish.minder.detect.preprocess import Prepared
from tests.unit.minder.waves import METRICS, MODELS, START, waves

OFF = {"role_baseline": False, "usual_distance": False}


def config(**sections):
    detect = {"metrics": list(METRICS), **sections.pop("detect", {})}
    return minder_config({"detect": detect, **sections})


def calls(frame, settings=None, *, begin=60, monitor=None, **facts):
    """Call every minute from the start of the frame on; returns minute -> faulty machines."""
    monitor = monitor or JobMonitor("job", MODELS, settings or config())
    found = {}
    for end in range(begin, frame.num_seconds + 1, 60):
        result = monitor.call(frame.slice(START, START + end), **facts)
        found[end // 60] = [finding.machine for finding in result.findings]
    return found


def alarms(found):
    return sorted({machine for machines in found.values() for machine in machines})


@pytest.mark.slow
def test_a_lasting_offset_never_alarms_and_a_later_fault_of_the_same_machine_does():
    frame = waves()
    frame.values["cpu_usage"][:, 2] += 9
    assert alarms(calls(frame)) == []
    frame.values["cpu_usage"][900:1300, 2] -= 40
    found = calls(frame)
    assert alarms(found) == ["node-002"]
    assert min(minute for minute, names in found.items() if names) == 20
    assert alarms(calls(frame, config(detect=OFF)))[0] == "node-002"


def test_a_switch_that_slows_half_of_a_job_is_one_event_and_stages_are_none():
    frame = waves()
    frame.values["cpu_usage"][:, 4:] += 15
    assert alarms(calls(frame)) == []
    frame.values["cpu_usage"][900:1300, ::2] -= 30
    found = calls(frame)
    assert alarms(found) == [""]
    assert min(minute for minute, names in found.items() if names) in (20, 21)


def powered(scale):
    """Power of a busy job whose third machine loses a third of its for six minutes."""
    rng, seconds = np.random.default_rng(4), 1500
    wave = np.where(np.arange(seconds) % 12 < 9, 300.0, 170.0)[:, None]
    watts = wave * (1 + 0.01 * rng.normal(size=(seconds, 8)))
    watts[900:1260, 2] *= 0.67
    names = tuple(f"node-{i:03d}" for i in range(8))
    values = {"gpu_power_draw": (scale * watts).astype(np.float32)}
    return Frame("job", np.arange(START, START + seconds), names, values)


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_a_gpu_that_is_bad_from_the_first_second_is_named_and_does_not_become_its_role(share):
    frame = powered(1.0)
    frame.values["gpu_power_draw"][:, 2] = share * frame.values["gpu_power_draw"][:, 1]
    found, monitor = power_calls(frame)
    assert min(minute for minute, names in found.items() if names) == 5
    assert alarms(found) == ["node-002"]
    assert monitor.baseline.unknown("gpu_power_draw") == ["node-002"]
    # A board that is capped by a tenth has a role.
    capped = powered(1.0).slice(START, START + 900)
    capped.values["gpu_power_draw"][:, 2] *= 0.9
    assert alarms(power_calls(capped)[0]) == []
    # Healthy jobs of another site have shown more.
    wide = {"role_limits": {"gpu_power_draw": 1.0}, "metrics": ["gpu_power_draw"]}
    monitor = JobMonitor("job", POWER, minder_config({"detect": wide}))
    assert alarms(calls(frame, monitor=monitor)) == []


POWER = Models({"gpu_power_draw": Identity("gpu_power_draw")}, {"gpu_power_draw": (0.0, 332.0)})


def power_calls(frame, **sections):
    settings = minder_config({"detect": {"metrics": ["gpu_power_draw"]}, **sections})
    monitor = JobMonitor("job", POWER, settings)
    return calls(frame, monitor=monitor), monitor


@pytest.mark.parametrize("scale", [1.0, 2.1, 4.0])
def test_a_power_fault_is_found_whatever_the_board_may_draw(scale):
    found, monitor = power_calls(powered(scale))
    assert alarms(found) == ["node-002"]
    assert min(minute for minute, names in found.items() if names) == 20
    steps = monitor.to_json()["scales"]["gpu_power_draw"]
    assert steps == 1.0 if scale == 1.0 else scale * 0.8 < steps < scale * 1.1
    again = JobMonitor.from_json(json.loads(json.dumps(monitor.to_json())), POWER, monitor.config)
    assert again.to_json()["scales"] == monitor.to_json()["scales"]


def test_limits_that_are_wrong_are_told_although_they_are_widened():
    frame = powered(2.1)
    off = {"preprocess": {"widen_limits": False}}
    assert alarms(power_calls(frame, **off)[0]) == []
    for preprocess in ({"widen_limits": True}, {"widen_limits": False}):
        monitor = power_calls(frame, preprocess=preprocess)[1]
        assert monitor.call(frame).clipped["gpu_power_draw"] > 0.5


def test_limits_of_the_site_and_of_the_board_take_the_place_of_the_trained_ones():
    frame = powered(2.1)
    off = {"preprocess": {"widen_limits": False}}
    right = {"gpu_power_draw": [0.0, 700.0]}
    for limits in (
        {"limits": right},
        {"boards": {"H100": right}, "limits": {"gpu_power_draw": [0, 99]}},
    ):
        found, monitor = power_calls(frame, **off, **limits)
        if "boards" in limits:
            assert alarms(found) == []
            monitor = JobMonitor("job", POWER, monitor.config)
            found = calls(frame, monitor=monitor, board="NVIDIA H100 80GB HBM3")
        assert alarms(found) == ["node-002"]
        assert monitor.call(frame, board="H100").clipped["gpu_power_draw"] == 0.0


def test_a_fault_is_not_learned_as_a_baseline():
    frame = waves(seconds=3600)
    frame.values["cpu_usage"][1500:, 5] -= 20
    found = calls(frame)
    assert found[30] == found[60] == ["node-005"]


def test_the_warm_up_after_a_start_is_ignored():
    frame = waves(seconds=900)
    frame.values["cpu_usage"][0:300, 1] += 25
    assert alarms(calls(frame, config(detect=OFF))) == ["node-001"]
    assert alarms(calls(frame, started=START)) == []


def test_what_differs_while_all_are_idle_is_ignored_and_silence_is_not():
    frame = waves(seconds=1500)
    frame.values["gpu_duty_cycle"][600:] = 0.0
    frame.values["cpu_usage"][600:, 3] += 25
    assert alarms(calls(frame)) == []
    assert alarms(calls(frame, config(detect={"idle_seconds": 0}))) == ["node-003"]
    for name in METRICS:
        frame.mask[name][700:, 6] = False
    assert alarms(calls(frame)) == ["node-006"]


def test_a_machine_that_joins_is_left_out_while_it_is_young():
    frame = waves(seconds=1500)
    for name in METRICS:
        frame.mask[name][:700, 7] = False
    # It copies its data at first.
    frame.values["cpu_usage"][700:960, 7] += 25
    members, late = frame.machines[:7], frame.machines
    for grace, expected in ((120, []), (0, ["node-007"])):
        settings = config(preprocess={"join_grace_seconds": grace},
                          detect=OFF)  # fmt: skip
        monitor = JobMonitor("job", MODELS, settings)
        seen = set()
        for end in range(60, 1501, 60):
            names = members if end <= 700 else late
            result = monitor.call(frame.slice(START, START + end).select(names))
            seen |= {finding.machine for finding in result.findings}
            assert result.n_machines == (7 if end < 700 + grace else 8)
        assert sorted(seen) == expected


def test_a_job_on_other_nodes_has_a_new_baseline():
    frame = waves(machines=16, seconds=1800)
    frame.values["cpu_usage"][:, 2] += 9
    monitor = JobMonitor("job", MODELS, config())
    first, second = frame.machines[:8], frame.machines[8:]
    calls(frame.select(first).slice(START, START + 900), monitor=monitor)
    assert set(monitor.baseline.table()["cpu_usage"]) == {"node-002"}
    monitor.call(frame.select(second))
    assert monitor.baseline.table() == {}
    assert monitor.baseline.machines == second


def test_many_newcomers_do_not_blind_the_monitor():
    frame = waves(machines=8, seconds=1800)
    for name in METRICS:
        frame.mask[name][:800, 5:] = False
    frame.values["cpu_usage"][1000:1500, 1] -= 30
    monitor, seen = JobMonitor("job", MODELS, config()), set()
    for end in range(60, 1801, 60):
        names = frame.machines[:5] if end <= 800 else frame.machines
        result = monitor.call(frame.slice(START, START + end).select(names))
        seen |= {finding.machine for finding in result.findings}
    assert seen == {"node-001"}


def test_a_monitor_goes_on_after_a_restart():
    frame = waves()
    frame.values["cpu_usage"][:, 2] += 9
    monitor = JobMonitor("job", MODELS, config())
    calls(frame.slice(START, START + 900), monitor=monitor)
    state = json.loads(json.dumps(monitor.to_json()))
    again = JobMonitor.from_json(state, MODELS, config())
    assert again.baseline.table() == monitor.baseline.table()
    assert alarms(calls(frame, begin=960, monitor=again)) == []


def test_a_small_job_and_an_empty_frame_are_told():
    monitor = JobMonitor("job", MODELS, config())
    assert monitor.call(waves(machines=3, seconds=300)).status == "too_few_machines"
    empty = waves(seconds=300).slice(0, 1)
    assert monitor.call(empty).status == "skipped"


NAMES = ("a", "b", "c", "d", "e")
CONFIG = minder_config().detect


def prepared(minutes, offsets, *, start=0, seed=0):
    """Machines around 0.3 that differ by `offsets` [minutes, N]."""
    rng = np.random.default_rng(seed)
    wave = 0.3 + 0.1 * np.sin(np.arange(60 * minutes) / 3)[:, None]
    values = wave + np.repeat(offsets, 60, axis=0) + rng.normal(0, 0.005, (60 * minutes, 5))
    values = values.astype(np.float32)
    frame = Frame("j", np.arange(start, start + 60 * minutes), NAMES, {"cpu_usage": values})
    masked = {"cpu_usage": np.zeros(values.shape, bool)}
    return Prepared(frame, {"cpu_usage": values}, masked, {}, {}, {}, {}, np.zeros(5))


def history(minutes, offsets, **options):
    piece = prepared(minutes, offsets, **options)
    return History(piece.frame.ts, piece.values, piece.masked, [np.arange(5)])


def learned(offsets):
    offsets = np.asarray(offsets, float)
    baseline = Baseline(CONFIG)
    baseline.keep(NAMES)
    for minute, row in enumerate(offsets):
        baseline.add(history(1, row[None], start=60 * minute), 1 << 40, np.zeros(5, bool))
    return baseline


def test_a_lasting_offset_is_learned_after_two_minutes():
    lasting = [[0, 0, 0.09, 0, 0]] * 12
    assert learned(lasting[:1]).table() == {}
    found = learned(lasting[:2]).table()["cpu_usage"]
    assert set(found) == {"c"}
    assert found["c"] == pytest.approx(0.09, abs=0.003)
    baseline = learned(lasting)
    assert baseline.table()["cpu_usage"]["c"] == pytest.approx(0.09, abs=0.003)
    assert baseline.mature.all()


def test_halves_that_disagree_are_refused_and_the_last_accepted_value_stays():
    late = [[0, 0, 0, 0, 0]] * 6 + [[0, -0.2, 0, 0, 0]] * 6
    assert learned(late).table() == {}
    shifted = [[0, 0.05, 0, 0, 0]] * 6 + [[0, -0.2, 0, 0, 0]] * 6
    assert learned(shifted).table()["cpu_usage"]["b"] == pytest.approx(0.05, abs=0.003)


def test_a_minute_of_jitter_changes_nothing():
    rows = np.zeros((12, 5))
    rows[[4, 9], 3] = 0.3
    assert learned(rows).table() == {}


def test_nothing_is_learned_of_unsure_machines_and_skipped_time():
    baseline = Baseline(CONFIG)
    baseline.keep(NAMES)
    piece = history(6, np.tile([0, 0, 0.09, 0.06, 0], (6, 1)))
    baseline.add(piece, 1 << 40, np.array([False, False, True, False, False]))
    assert set(baseline.table()["cpu_usage"]) == {"d"}
    other = Baseline(CONFIG)
    other.keep(NAMES)
    other.skip(300)
    other.add(piece, 1 << 40, np.zeros(5, bool))
    assert other.table() == {}


def test_a_machine_that_leaves_is_forgotten_and_a_new_one_learned_on_its_own():
    baseline = learned([[0, 0, 0.09, 0, 0.04]] * 12)
    baseline.keep(("a", "b", "d", "e", "new"))
    assert set(baseline.table()["cpu_usage"]) == {"e"}
    assert list(baseline.mature) == [True, True, True, True, False]
    baseline.keep(NAMES)
    assert set(baseline.table()["cpu_usage"]) == {"e"}
    assert not baseline.mature[2]


def test_long_histories_take_bounded_space_and_keep_their_value():
    baseline = learned([[0.08, 0, 0, 0, 0]] * 300)
    chunks = baseline._chunks["cpu_usage"]
    assert len(chunks) < 64
    assert baseline.table()["cpu_usage"]["a"] == pytest.approx(0.08, abs=0.003)


def test_only_as_much_is_taken_away_as_a_machine_shows():
    job = Job(baseline={"cpu_usage": {"c": 0.09}})
    shows, lost, more = ([[0, 0, x, 0, 0]] for x in (0.09, 0.0, 0.29))
    for offsets, expected in ((shows, 0.0), (lost, 0.0), (more, 0.2)):
        piece = prepared(1, np.array(offsets))
        values = compared_values(piece, "cpu_usage", CONFIG, job, [np.arange(5)])
        gap = np.median(values[:, 2] - np.median(values, axis=1))
        assert gap == pytest.approx(expected, abs=0.004)
