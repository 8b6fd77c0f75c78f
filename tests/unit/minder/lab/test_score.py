"""Scores on hand-made cases: who counts, when, and how sure the figures are."""

import numpy as np
import pytest

from planish.minder.lab.cases import Truth
from planish.minder.lab.replay import Alarm
from planish.minder.lab.score import CaseOutcome, score, summary

FAULT = Truth(("b",), "ecc_error", 1000, 1600, detectable=True)


def alert(machine, time):
    return Alarm(machine, time, "dissimilar" if machine else "job_wide", "cpu_usage")


def case(*alerts, fault=FAULT, machines=8, seconds=3600, calls=()):
    return CaseOutcome("case", fault, machines, seconds, tuple(alerts), calls)


@pytest.mark.parametrize(
    ("alerts", "first", "strict"),
    [
        ((), (0, 0, 1), (0, 0, 1)),
        ((alert("b", 1000),), (1, 0, 0), (1, 0, 0)),
        ((alert("b", 2080),), (1, 0, 0), (1, 0, 0)),
        # Too late is a miss and no false alarm.
        ((alert("b", 2081),), (0, 0, 1), (0, 0, 1)),
        # The right machine before anything has happened is a false alarm.
        ((alert("b", 999),), (0, 1, 1), (0, 1, 1)),
        ((alert("a", 1200), alert("b", 1300)), (0, 1, 1), (1, 1, 0)),
        ((alert("b", 1200), alert("a", 1300), alert("c", 1400)), (1, 0, 0), (1, 2, 0)),
        # An event of the whole job names nobody.
        ((alert("", 1200),), (0, 0, 1), (0, 0, 1)),
        ((alert("", 900),), (0, 1, 1), (0, 1, 1)),
    ],
)
def test_alerts_of_a_faulty_case_count_by_machine_and_time(alerts, first, strict):
    one = case(*alerts)
    assert (one.counts("first"), one.counts("strict")) == (first, strict)


def test_any_alert_without_a_fault_is_false():
    one = case(alert("a", 100), alert("", 200), fault=None)
    assert (one.counts("first"), one.counts("strict")) == ((0, 1, 0), (0, 2, 0))
    figures = summary([one, case(fault=None)])
    assert figures["normal_without_alert"] == 0.5
    # Two false alarms in two hours of eight machines.
    assert figures["false_alarms_per_1000_machine_hours"] == pytest.approx(2 / 16 * 1000)


def test_precision_recall_and_f1_of_a_small_table():
    found = [case(alert("b", 1300))] * 6 + [case()] * 2 + [case(alert("a", 1300))] * 2
    found += [case(fault=None)] * 9 + [case(alert("a", 5), fault=None)]
    result = score(found, "first")
    counts = (result.true_positives, result.false_positives, result.false_negatives)
    assert counts == (6, 3, 4)
    assert result.precision.value == pytest.approx(6 / 9)
    assert result.recall.value == pytest.approx(0.6)
    assert result.f1.value == pytest.approx(12 / 19)
    # Ten draws with a probability of 0.6: the interval of a share is about +- 0.3.
    assert 0.25 < result.recall.low < 0.35 < 0.85 < result.recall.high <= 0.95


def test_faults_that_cannot_be_seen_are_no_misses_but_their_false_alarms_stay():
    hidden = Truth(("b",), "others", 1000, 1600)
    found = [case(alert("b", 1300)), case(alert("a", 1300), fault=hidden), case(fault=hidden)]
    result = score(found, "first", detectable=True)
    counts = (result.true_positives, result.false_positives, result.false_negatives)
    assert counts == (1, 1, 0)


def test_nobody_named_is_precise_and_finds_nothing():
    result = score([case(), case(fault=None)], "first")
    assert (result.precision.value, result.recall.value, result.f1.value) == (1.0, 0.0, 0.0)


def test_the_summary_has_delays_costs_kinds_and_sizes():
    found = [
        case(alert("b", 1000 + 60 * i), calls=(0.1, 0.3), machines=m)
        for i, m in ((5, 4), (6, 64), (7, 64))
    ]
    figures = summary([*found, case(fault=None, machines=16)])
    assert (figures["delay_median_s"], figures["delay_p90_s"]) == (360.0, 408.0)
    assert figures["call_mean_s"] == pytest.approx(0.2)
    assert figures["calls"] == 6
    assert figures["call_max_s"] == 0.3
    assert figures["machine_hours"] == 4 + 64 + 64 + 16
    assert set(figures["by_kind"]) == {"ecc_error"}
    assert figures["by_size"]["64+"]["detectable_recall"] == 1.0
    assert figures["by_size"]["16-31"]["faults"] == 0
    assert np.isfinite(figures["first"]["f1"]["high"])
