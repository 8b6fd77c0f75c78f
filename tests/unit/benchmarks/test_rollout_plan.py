"""The stored figures of the planner are those that its code gives; variants differ in one thing."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.facts import RESULTS
from tests.benchmarks.rollout_plan import tables
from tests.benchmarks.rollout_plan.conclusions import conclusions, worlds


@pytest.fixture(scope="module")
def stored():
    return json.loads((RESULTS / "rollout_plan.json").read_text())["result"]


@pytest.mark.parametrize("table", [tables.ratios, tables.micro_batches, tables.replicas])
def test_stored_figures_are_those_of_the_code(stored, table):
    made = json.loads(json.dumps(table(tables.World())))
    assert flat(made) == pytest.approx(flat(stored[table.__name__]), rel=1e-9)


def flat(value, path=""):
    """Return the numbers of nested tables by their paths."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {path: value} if isinstance(value, float | int) else {}
    return {k: v for key, one in items for k, v in flat(one, f"{path}/{key}").items()}


def test_all_but_speed_is_within_its_target(stored):
    checks = {name: check["met"] for name, check in stored["targets"].items()}
    assert [name for name, met in checks.items() if not met and not name.endswith(", s")] == []


@pytest.mark.slow
def test_conclusions_hold_as_stored_and_each_variant_differs_in_one_thing(stored):
    variants = dict(worlds())
    assert len(variants) == len(stored["sensitivity"]["turned"]) + 1
    assert conclusions(variants["as published"]) == stored["sensitivity"]["conclusions"]
    base = vars(variants.pop("as published"))
    for one in variants.values():
        assert sum(value != base[name] for name, value in vars(one).items()) == 1


def test_every_pair_of_gpus_was_planned_for_every_model(stored):
    assert len(stored["pairs"]) == 6 * 8 * 8
    assert all(row["feasible"] for row in stored["pairs"].values())
