"""Simulated jobs: equal seeds, shares of faults, what is visible, what is lost."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from planish.minder.detect.frame import align
from tests.minder_lab.simulator import FAULTS, simulate
from tests.minder_lab.simulator.faults import draw_kind

RNG = np.random.default_rng


def test_equal_seeds_give_equal_cases_and_others_do_not():
    one, two, other = (simulate(seed, machines=6, minutes=12, fault="any") for seed in (3, 3, 4))
    assert one.truth == two.truth != other.truth
    for name, values in one.frame.values.items():
        np.testing.assert_array_equal(values, two.frame.values[name])
    assert one.frame.ts[0] == two.frame.ts[0] != other.frame.ts[0]


def test_kinds_come_by_their_published_shares():
    rng = RNG(0)
    counts = collections.Counter(draw_kind(rng) for _ in range(4000))
    total = sum(kind.share for kind in FAULTS.values())
    assert total == pytest.approx(1.0, abs=0.01)
    for name, kind in FAULTS.items():
        assert counts[name] / 4000 == pytest.approx(kind.share / total, abs=0.025)


def test_healthy_metrics_have_their_typical_levels():
    frame = simulate(11, machines=16, minutes=20).frame
    bounds = {
        "cpu_usage": (10, 33),
        "gpu_duty_cycle": (85, 100),
        "gpu_power_draw": (150, 330),
        "gpu_tensor_core_activity": (0.2, 0.65),
        "gpu_nvlink_bandwidth": (80, 230),
        "memory_usage": (38, 53),
        "pfc_tx_packet_rate": (5, 100),
    }
    for name, (low, high) in bounds.items():
        assert low < np.nanmedian(frame.values[name]) < high, name
    lost = 1 - np.mean([frame.mask[name].mean() for name in frame.values])
    assert 0.004 < lost < 0.03


def normal_difference(case, name):
    """Median over the fault of the faulty machine minus its peers, and the same before it."""
    frame, truth = case.frame, case.truth
    column = frame.machines.index(truth.machines[0])
    gap = frame.values[name][:, column] - np.nanmedian(frame.values[name], axis=1)
    inside = (frame.ts > truth.onset + 10) & (frame.ts < truth.halt)
    return np.nanmedian(gap[inside]), np.nanmedian(gap[frame.ts < truth.onset])


def test_a_hang_lets_all_others_spin_and_then_all_stop_alike():
    case = next(
        case
        for seed in range(50)
        if (case := simulate(seed, machines=8, fault="nic-dropout")).truth.visible["cpu_usage"]
        and len(case.truth.machines) == 1
    )
    frame, truth = case.frame, case.truth
    spinning = (frame.ts > truth.onset + 30) & (frame.ts < truth.halt)
    peers = [i for i, name in enumerate(frame.machines) if name not in truth.machines]
    for name, low, high in (
        ("gpu_duty_cycle", 96, 100),
        ("gpu_tensor_core_activity", 0, 0.03),
        ("gpu_power_draw", 70, 200),
    ):
        found = np.nanmedian(frame.values[name][spinning][:, peers])
        assert low <= found <= high, name
    after = frame.ts > truth.halt + 10
    assert np.nanmedian(frame.values["gpu_duty_cycle"][after]) == 0
    inside, before = normal_difference(case, "cpu_usage")
    assert abs(inside - before) > 1.5


@pytest.mark.slow
def test_a_downgraded_link_slows_all_and_shows_in_pause_frames():
    cases = [simulate(seed, machines=12, fault="pcie-downgrading") for seed in range(12)]
    shown = [case for case in cases if case.truth.visible.get("pfc_tx_packet_rate", 0) > 285]
    assert len(shown) >= 10
    for case in shown:
        inside, before = normal_difference(case, "pfc_tx_packet_rate")
        assert inside > 250 > 100 > before
        assert "cpu_usage" not in case.truth.visible


def test_a_silent_machine_sends_nothing_more_and_is_detectable():
    case = next(
        case
        for seed in range(30)
        if "silent"
        in (case := simulate(seed, machines=6, fault="machine-unreachable")).truth.visible
    )
    column = case.frame.machines.index(case.truth.machines[0])
    late = case.frame.ts >= case.truth.onset + 3
    assert all(not mask[late, column].any() for mask in case.frame.mask.values())
    assert case.truth.detectable


@pytest.mark.slow
def test_some_faults_show_too_briefly_or_nowhere():
    truths = [simulate(seed, machines=4, fault="any").truth for seed in range(60)]
    share = np.mean([truth.detectable for truth in truths])
    assert 0.7 < share < 0.97
    for truth in truths:
        longest = max(truth.visible.values(), default=0)
        assert longest >= 285 or not truth.detectable


def test_what_the_machines_sent_aligns_to_the_frame():
    case = simulate(9, machines=4, minutes=5, keep_samples=True)
    ts, _ = case.samples["cpu_usage"]["node-001"]
    assert (np.diff(ts) < 0).any()
    assert len(np.unique(ts)) < len(ts)
    frame = case.frame
    again = align(frame.job, int(frame.ts[0]), int(frame.ts[-1]) + 1, frame.machines, case.samples)
    np.testing.assert_array_equal(again.values["cpu_usage"], frame.values["cpu_usage"])
