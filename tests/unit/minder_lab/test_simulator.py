"""Simulated jobs: equal seeds, shares of faults, what is visible, what is lost; who is named."""

import json

import numpy as np
import pytest

from planish.minder.detect.config import minder_config
from planish.minder.detect.model_files import default_models, load_models
from planish.minder.lab.evaluate import outcome_of
from tests import thin
from tests.minder_lab.__main__ import parser
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


FIXED = [
    (4_000_000, "ecc-error", ["node-010"], (1, 0, 0)),
    (4_000_001, "pcie-downgrading", ["node-004"], (1, 0, 0)),
    (4_000_002, None, [], (0, 0, 0)),
]


@pytest.mark.slow
def test_fixed_jobs_come_out_as_ever():
    config = minder_config({})
    models = load_models(default_models(), config.denoise, config.detect.metrics)
    for seed, fault, machines, counts in thin.third(FIXED):
        one = outcome_of(simulate(seed, fault=fault), models, config)
        assert [alarm.machine for alarm in one.alarms] == machines
        assert one.counts("strict") == counts
        assert (one.fault and one.fault.kind) == fault


@pytest.mark.long
def test_evaluate_scores_simulated_jobs(tmp_path, capsys):
    out = tmp_path / "figures.json"
    words = ["evaluate", "--faults", "1", "--normal", "1", "--seed", "4100000", "--json", str(out)]
    options = parser().parse_args(words)
    options.do(options)
    assert "| minder | " in capsys.readouterr().out
    figures = json.loads(out.read_text("utf-8"))
    assert (figures["cases"], figures["faults"]) == (2, 1)
