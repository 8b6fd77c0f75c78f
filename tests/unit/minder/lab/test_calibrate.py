"""Calibration: the grid by hand, and recorded jobs against real replays."""

import pytest

from planish.minder.detect.config import minder_config
from planish.minder.detect.model_files import default_models, load_models
from planish.minder.lab.calibrate import (
    Recorded,
    Thresholds,
    calibrate,
    outcome_with,
    record,
)
from planish.minder.lab.cases import Truth
from planish.minder.lab.evaluate import outcome_of
from planish.minder.lab.replay import Alarm
from planish.minder.lab.score import CaseOutcome
from tests.minder_lab.simulator import simulate

FAULT = Truth(("b",), "ecc-error", 1000, 1600, detectable=True)
START = Thresholds(2.0, 0.9, {"cpu_usage": 0.05})


def recorded(hits, *, fault=FAULT, machines=64, alerts=(), limit=3.2):
    outcome = CaseOutcome("case", fault, machines, 3600, tuple(alerts))
    points = {("cpu_usage", theta, floor): found for (theta, floor), found in hits.items()}
    return Recorded(outcome, points, limit, 900)


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
