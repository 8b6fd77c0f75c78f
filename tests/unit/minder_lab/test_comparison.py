"""Evaluation of whole detectors on three fixed jobs, and its tables."""

from __future__ import annotations

import json

import pytest

from planish.base.errors import ConfigError
from planish.minder.detect.config import minder_config
from planish.minder.detect.model_files import default_models
from planish.minder.lab.cases import Truth
from planish.minder.lab.replay import Alarm
from planish.minder.lab.score import CaseOutcome
from tests import thin
from tests.minder_lab.__main__ import COMPARISON
from tests.minder_lab.evaluate import Plan, evaluate
from tests.minder_lab.report import GOALS, markdown, report
from tests.minder_lab.variants import RECIPES, build

WANTED = [(4_000_000, "ecc-error"), (4_000_001, "pcie-downgrading"), (4_000_002, None)]


EXPECTED = [
    ("ecc-error", ["node-010"], (1, 0, 0)),
    ("pcie-downgrading", ["node-004"], (1, 0, 0)),
    ("", [], (0, 0, 0)),
]


@pytest.mark.slow
def test_fixed_jobs_come_out_as_ever():
    found = evaluate(Plan(("minder",), default_models(), COMPARISON), thin.third(WANTED))
    ours = found["minder"]
    seen = [
        (one.fault.kind if one.fault else "", [a.machine for a in one.alarms], one.counts("strict"))
        for one in ours
    ]
    assert seen == thin.third(EXPECTED)


def outcomes(hits, total=10):
    fault = Truth(("b",), "ecc-error", 1000, 1600, detectable=True)
    hit = (Alarm("b", 1300, "dissimilar", "cpu_usage"),)
    cost = (0.5,)
    found = [
        CaseOutcome(f"{i}", fault, 8, 3600, hit if i < hits else (), cost) for i in range(total)
    ]
    return [*found, CaseOutcome("normal", None, 8, 3600, (), cost)]


def test_the_tables_say_what_was_found_and_whether_the_goals_were_held():
    document = report(
        {"minder": outcomes(10), "pca": outcomes(4), "raw": outcomes(10)}, {"minder": "ours"}
    )
    text = markdown(document)
    assert "| minder | 1.000 (1.00-1.00) |" in text
    assert text.count("| held |") == len(GOALS)
    assert "The LSTM-VAE beats `pca`: F1 +0.429" in text
    assert "The LSTM-VAE and `raw` do not differ: F1 +0.000" in text
    assert document["variants"]["pca"]["first"]["recall"]["value"] == 0.4
    assert [one["case"] for one in document["wrong"]["pca"]] == ["4", "5", "6", "7", "8", "9"]
    json.dumps(document, allow_nan=False)


def test_every_variant_can_be_built_and_starts_from_given_settings():
    base = {"detect": {"theta": 2.5}}
    for name in RECIPES:
        variant = build(name, default_models(), base=base, comparison=COMPARISON)
        assert variant.make().config is variant.config
    made = build("pca", default_models(), base=base, comparison=COMPARISON)
    assert made.config.detect.theta == 2.5
    made = build("minder", default_models(), comparison=COMPARISON)
    assert made.config == minder_config({})
    with pytest.raises(ConfigError, match="did you mean `minder`"):
        build("mindr", default_models(), comparison=COMPARISON)
