"""Numbers for people beside the rollouts."""

from __future__ import annotations

from planish.stages.rollout.job import Session


def test_ranks_that_wait_and_experts_that_are_busy_show():
    ranks = [
        {"rank": 0, "role": "attention", "busy_s": 3.0},
        {"rank": 1, "role": "expert", "busy_s": 1.0},
    ]
    stats = {"occupancy": 0.5, "imbalance": 1.25, "step_seconds": 4.0, "ranks": ranks}
    session = Session(None, 3, stats, load_seconds=2.0, sample_seconds=5.0)
    assert session.timing(100) == {
        "load_seconds": 2.0,
        "sample_seconds": 5.0,
        "tokens_per_second": 20.0,
        "engine_occupancy": 0.5,
        "expert_imbalance": 1.25,
        "bubble_ratio/attention_0": 0.25,
        "bubble_ratio/expert_1": 0.75,
    }


def test_an_engine_without_ranks_shows_none():
    timing = Session(None, 3, {"occupancy": 0.5}).timing(0)
    assert list(timing) == [
        *("load_seconds", "sample_seconds", "tokens_per_second", "engine_occupancy"),
    ]
