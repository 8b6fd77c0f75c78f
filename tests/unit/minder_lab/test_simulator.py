"""Simulated jobs: equal seeds, shares of faults, what is visible, what is lost."""

from __future__ import annotations

import numpy as np

from tests.minder_lab.simulator import simulate


def test_equal_seeds_give_equal_cases_and_others_do_not():
    one, two, other = (simulate(seed, machines=6, minutes=12, fault="any") for seed in (3, 3, 4))
    assert one.truth == two.truth != other.truth
    for name, values in one.frame.values.items():
        np.testing.assert_array_equal(values, two.frame.values[name])
    assert one.frame.ts[0] == two.frame.ts[0] != other.frame.ts[0]


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
