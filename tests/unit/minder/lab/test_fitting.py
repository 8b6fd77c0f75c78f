"""What the denoising model can learn, and what a few bad windows do to it."""

from types import SimpleNamespace

import numpy as np
import pytest

from planish.base.errors import ConfigError
from planish.minder.detect.config import minder_config
from planish.minder.detect.denoise import windows_of
from planish.minder.detect.frame import Frame
from planish.minder.detect.model_files import default_models, load_models
from planish.minder.lab import vae
from planish.minder.lab.calibrate import Recorded, Thresholds, calibrate, outcome_with, record
from planish.minder.lab.cases import Case, Truth
from planish.minder.lab.evaluate import outcome_of
from planish.minder.lab.prioritise import features, labelled, largest_scores, rank
from planish.minder.lab.replay import Alarm
from planish.minder.lab.score import CaseOutcome
from planish.minder.lab.vae import Training, reconstruction_error, train_vae
from tests.minder_lab.simulator import simulate


def smooth(seed, *, machines=12):
    """Return windows [M, 8] of sines of many periods and amplitudes, with 0.3 % noise."""
    rng = np.random.default_rng(seed)
    period, swing = rng.uniform(30, 60, machines), rng.uniform(0.3, 0.4, machines)
    phase, seconds = rng.uniform(0, 2 * np.pi, machines), np.arange(600)[:, None]
    values = 0.5 + swing * np.sin(2 * np.pi * seconds / period + phase)
    values += rng.normal(0, 0.003, values.shape)
    return np.ascontiguousarray(windows_of(values.astype(np.float32)).reshape(-1, 8))


@pytest.mark.long
def test_the_published_error_is_reached_on_smooth_windows():
    _, losses = train_vae(smooth(1), smooth(2), Training(seed=0))
    assert losses.variance_held_out > 1e-2
    assert losses.mse_held_out < 1e-4
    assert losses.divergence > 1.0


@pytest.mark.long
def test_one_window_in_a_hundred_from_faulty_machines_does_not_break_a_model():
    training = Training(max_epochs=20)
    clean, held_out = smooth(1, machines=8), smooth(2, machines=8)
    rng = np.random.default_rng(3)
    bad = clean.copy()
    rows = rng.choice(len(bad), len(bad) // 100, replace=False)
    bad[rows] = rng.choice([0.0, 1.0, 0.02], (len(rows), 1))
    models = [train_vae(windows, held_out, training)[0] for windows in (clean, bad)]
    errors = [reconstruction_error(model, _tensor(held_out)) for model in models]
    assert errors[0] < 0.1 * held_out.var()
    assert errors[1] < 2 * errors[0]
    # A machine that stands still at a level of its own is still far from the others.
    idle = np.full((50, 8), 0.02, np.float32)
    distances = [_embedded(model, held_out[:50]) - _embedded(model, idle) for model in models]
    near, far = (float(np.linalg.norm(one, axis=1).mean()) for one in distances)
    assert far > 0.8 * near


def _tensor(windows):
    import torch

    return torch.from_numpy(windows)[..., None]


def _embedded(model, windows):
    return model(_tensor(windows))[0].detach().numpy()[..., 0]


def test_the_time_of_a_training_is_its_own_and_not_that_of_the_machine(monkeypatch):
    now, epochs = [0.0], []
    # There is no other clock.
    monkeypatch.setattr(vae, "time", SimpleNamespace(process_time=lambda: now[0]))

    def works(epoch, error):
        epochs.append(epoch)
        now[0] += 1.0

    training = Training(max_epochs=20, max_seconds=2.5, starts=1, patience=99)
    windows = smooth(1, machines=1)
    _, losses = train_vae(windows, windows, training, progress=works)
    assert epochs == [1, 2, 3]
    assert losses.epochs == 3


FAULT = Truth(("b",), "ecc-error", 1000, 1600, detectable=True)
START = Thresholds(2.0, 0.9, {"cpu_usage": 0.05})


def recorded(hits, *, fault=FAULT, machines=64, alerts=()):
    outcome = CaseOutcome("case", fault, machines, 3600, tuple(alerts))
    points = {("cpu_usage", theta, floor): found for (theta, floor), found in hits.items()}
    return Recorded(outcome, points, 3.2, 900)


def test_the_first_call_that_names_a_machine_counts_and_silence_stays():
    silent = Alarm("b", 1500, "silent", "")
    one = recorded({(2.0, 0.05): (("b", 1300), ("c", 1360))}, alerts=[silent])
    alarms = outcome_with(one, START).alarms
    assert [(a.machine, a.time, a.kind) for a in alarms] == [
        ("b", 1300, "dissimilar"),
        ("c", 1360, "dissimilar"),
    ]


def test_too_many_machines_at_once_are_an_event_of_the_job():
    one = recorded({(2.0, 0.05): tuple((name, 1300) for name in "abcd")})
    assert [(a.machine, a.kind) for a in outcome_with(one, START).alarms] == [("", "job_wide")]


def test_the_score_of_small_jobs_is_bounded_by_kappa():
    one = recorded({(1.558846, 0.05): (("b", 1300),)}, machines=4)
    assert outcome_with(one, START).counts("first") == (1, 0, 0)


def test_the_search_takes_the_floor_that_finds_faults_without_false_alarms():
    thetas = (1.5, 2.0, 2.5, 3.0)
    faulty = {(t, f): (("b", 1300),) for t in thetas for f in (0.01, 0.02, 0.03)}
    healthy = {(t, f): (("a", 900),) for t in thetas for f in (0.01, 0.02)}
    jobs = [recorded(faulty)] * 4 + [recorded(healthy, fault=None)] * 2
    config = minder_config({"detect": {"floors": START.floors}})
    found = calibrate(jobs, config, min_precision=0.9)
    assert found.best.floors == {"cpu_usage": 0.03}
    assert [one.f1.value for one in found.scores] == [0.0, 1.0]
    assert found.to_json()["best"]["precision"] == 1.0
    assert "| floor of cpu_usage | 0.05 | 0.03 |" in found.markdown()


@pytest.mark.slow
def test_the_point_of_the_settings_themselves_is_what_a_replay_finds():
    case = simulate(2_500_000, fault="nic-dropout", machines=8, minutes=20)
    config = minder_config({"denoise": {"denoiser": "pca"}})
    models = load_models(default_models(), config.denoise, config.detect.metrics)
    one = record(case, models, config)
    rules = config.detect
    floors = {point[0]: rules.floors[point[0]] for point in one.hits}
    outcome = outcome_with(one, Thresholds(rules.theta, rules.kappa, floors))
    alarms = outcome_of(case, models, config).alarms
    assert [(a.machine, a.time) for a in outcome.alarms] == [(a.machine, a.time) for a in alarms]
    assert outcome.alarms[0].machine in case.truth.machines


METRICS = ["cpu_usage", "gpu_duty_cycle", "memory_usage"]
CONFIG = minder_config({"detect": {"metrics": METRICS}})
BEGIN = 1_000_000


def frame(seconds=120, machines=5, *, odd=None, seed=0):
    rng = np.random.default_rng(seed)
    values = {
        name: (50 + rng.normal(0, 1, (seconds, machines))).astype(np.float32) for name in METRICS
    }
    if odd:
        name, low, high, shift = odd
        values[name][low:high, 2] += shift
    names = tuple(f"m{i}" for i in range(machines))
    return Frame("job", np.arange(BEGIN, BEGIN + seconds), names, values)


def case(seconds=120, fault=(0, 0), **more):
    onset, halt = fault
    truth = Truth(("m2",), "nic", BEGIN + onset, BEGIN + halt) if halt else Truth()
    return Case(frame(seconds, **more), truth)


def test_the_largest_score_of_a_window_is_that_of_its_means():
    one = frame()
    found, starts = features(one, CONFIG, {}, stride=60)
    assert starts.tolist() == [BEGIN, BEGIN + 60]
    means = one.values["cpu_usage"][60:68].mean(axis=0)
    expected = np.abs((means - means.mean()) / means.std()).max()
    assert found[1, 0] == pytest.approx(expected, rel=1e-4)


def test_machines_that_are_alike_or_unknown_have_no_score():
    values = np.array([[1.0, 1.0, 1.0], [0.0, 2.0, 9.0]])
    known = np.array([[True, True, True], [True, True, False]])
    assert largest_scores(values, known).tolist() == [0.0, 1.0]


def test_a_window_is_of_the_fault_when_all_of_it_lies_inside():
    _, labels = labelled([case(fault=(30, 67)), case()], CONFIG, {})
    # Windows begin at 0, 30, 60 and 90; 60 .. 67 is the last one inside.
    assert labels.tolist() == [False, True, True, False] + [False] * 4


def test_the_metric_that_tells_comes_first_and_unused_ones_last_by_name():
    cases = [case(600, (200, 599), odd=("gpu_duty_cycle", 200, 600, 30), seed=i) for i in range(8)]
    found = rank(METRICS, *labelled(cases, CONFIG, {}))
    order = found.ranked
    assert found.tree.startswith("|--- gpu_duty_cycle <= ")
    assert (order[0].metric, order[0].depth) == ("gpu_duty_cycle", 0)
    assert order[0].importance > 0.95
    unused = [one.metric for one in order if one.depth is None]
    assert unused == sorted(unused)
    assert [one.metric for one in order][-len(unused) :] == unused


def test_one_class_alone_is_refused():
    with pytest.raises(ConfigError, match="0 of 30"):
        rank(METRICS, np.zeros((30, 3)), np.zeros(30, bool))
