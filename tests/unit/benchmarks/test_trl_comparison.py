"""What is said of the comparison with TRL, on made-up turns."""

from __future__ import annotations

import pytest

from planish.algorithms import build_algorithm
from planish.base.config import load_preset, merge, resolve_config
from tests.benchmarks.intervals import ratio_interval
from tests.benchmarks.peers.bench_trl import OVERRIDES, SEEDS
from tests.benchmarks.peers.trl_table import ARMS, SYSTEMS, iterations_to, result_rows, summary


def a_seed(trl_seconds: float, trl_accuracy: list[float], accuracy: list[float]) -> dict:
    """Arms of ours take 1 s for each of two iterations."""
    found: dict = {}
    for name in SYSTEMS:
        seconds = trl_seconds if name == "trl" else 1.0
        turn = {"seconds": seconds, "processor_seconds": seconds, "generated_groups": 128.0}
        found[name] = {
            "iterations": [turn, turn],
            "accuracy": trl_accuracy if name == "trl" else accuracy,
        }
    return found


def test_the_fair_arm_makes_every_pass_that_trl_makes() -> None:
    config = resolve_config(merge(load_preset("dapo-tiny"), overrides=list(OVERRIDES["ours"])))
    assert not config["rollout"]["dynamic_sampling"]
    assert config["reward"]["keep_uniform_groups"]
    assert build_algorithm(config["algorithm"]).needs_old_logprobs


def test_every_arm_says_what_differs_and_the_seeds_are_fixed() -> None:
    assert tuple(OVERRIDES) == ARMS
    assert SEEDS == (0, 1, 2, 3, 4, 5)


def test_ratios_are_averaged_on_a_log_scale() -> None:
    found = ratio_interval([2.0, 8.0, 4.0])
    assert found.mean == pytest.approx(4.0)
    # the logarithms are 1, 3 and 2 in units of log 2: a deviation of 1, t = 4.303 over root 3
    assert found.high == pytest.approx(4.0 * 2.0 ** (4.303 / 3**0.5))
    assert found.low * found.high == pytest.approx(16.0)


def test_both_sides_reach_an_accuracy_with_their_first_policy_that_has_it() -> None:
    assert iterations_to(0.3, [0.3, 0.2]) == 1
    seeds = {"0": a_seed(3.0, [0.31, 0.30], [0.20, 0.40]), "1": a_seed(3.0, [0.2, 0.5], [0.3, 0.4])}
    found = summary(seeds)["ours"]["seconds"]["trl_over_it_to_accuracy"]
    # seed 0: the target is TRL's 0.30, which it has after one iteration, ours after two;
    # seed 1: the target is our 0.4, reached after two iterations on both sides
    assert found["by_seed"] == [1.5, 3.0]


def test_accuracies_are_compared_at_equal_iterations_also_where_ours_is_lower() -> None:
    seeds = {str(k): a_seed(2.0 + k, [0.2, 0.5], [0.3, 0.4]) for k in range(3)}
    found = summary(seeds)["ours"]
    assert [d["mean"] for d in found["accuracy_minus_trl"]] == pytest.approx([0.1, -0.1])
    assert found["seconds"]["trl_over_it_per_iteration"]["by_seed"] == [2.0, 3.0, 4.0]
    rows = result_rows({"summary": summary(seeds), "seeds": seeds}, "measured-cpu")
    assert "2.88x [1.21, 6.85]" in rows[0]
    assert "both without dynamic sampling and with recomputed old log-probabilities" in rows[0]
    assert "3 seeds fixed beforehand" in rows[0]
    assert "-0.100 [-0.100, -0.100]" in rows[-1]
