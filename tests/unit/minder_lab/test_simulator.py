"""Simulated jobs: who is named in them, and what scores them."""

import json

import pytest

from planish.minder.detect.config import minder_config
from planish.minder.detect.model_files import default_models, load_models
from planish.minder.lab.evaluate import outcome_of
from tests import thin
from tests.minder_lab.simulator import simulate
from tests.minder_lab.verbs import parser

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
