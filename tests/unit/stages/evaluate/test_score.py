"""Scores by hand: avg@n, its errors, pass@k, cons@n, and all of them from judged rollouts."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.records.rollouts import FinishReason
from planish.stages.evaluate.config import EvaluateConfig
from planish.stages.evaluate.score import (
    Judged,
    average,
    bootstrap,
    consensus,
    majority,
    mean_pass_at_k,
    pass_at_k,
    sampling_error,
    scalars,
)
from planish.verifiers.verdict import failed, not_found, right, wrong
from tests.unit.records.samples import build_rollouts

TABLE = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])


def test_average_and_sampling_error_by_hand():
    assert average(TABLE) == pytest.approx((0.5 + 1.0 + 0.25) / 3)
    # Sample variances: 4 * 0.25 / 3 = 1/3, 0, and 4 * 0.25 * 0.75 / 3 = 1/4.
    assert sampling_error(TABLE) == pytest.approx(math.sqrt((1 / 3 + 0 + 1 / 4) / 4) / 3)
    assert sampling_error(np.ones((5, 3))) == 0.0
    assert math.isnan(sampling_error(np.ones((5, 1))))


def test_bootstrap_spread_is_that_of_the_mean_over_prompts_and_follows_from_its_seed():
    accuracy = np.repeat(np.array([[0.0], [1.0]]), 50, axis=0)
    error, (low, high) = bootstrap(accuracy, num_resamples=4000, seed=3)
    assert error == pytest.approx(0.05, rel=0.05)
    assert low == pytest.approx(0.4, abs=0.02)
    assert high == pytest.approx(0.6, abs=0.02)
    first, second, other = (bootstrap(TABLE, num_resamples=50, seed=s) for s in (1, 1, 2))
    assert first == second
    assert first != other


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case):
    num_samples, num_correct = case
    right = [i < num_correct for i in range(num_samples)]
    for k in range(1, num_samples + 1):
        subsets = list(itertools.combinations(right, k))
        share = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share)
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)


def test_mean_pass_at_one_is_the_average():
    assert mean_pass_at_k(TABLE, 1) == pytest.approx(average(TABLE))
    assert mean_pass_at_k(TABLE, 2) == pytest.approx((5 / 6 + 1.0 + 0.5) / 3)


@pytest.mark.parametrize(
    ("answers", "position"),
    [
        (["7", "8", "8"], 1),
        (["7", "8", "8", "7"], 0),
        (["8", "7", "7", "8"], 0),
        ([None, None, "3"], 2),
        ([None, None, None], None),
        ([], None),
        (["07", "8", "+7"], 0),
        (["-0", "1", "0"], 0),
        (["a", "b", "b"], 1),
        (["\u0667", "7", "7"], 1),
        (["9" * 65, "1", "9" * 65], 0),
    ],
)
def test_majority_takes_the_first_of_the_largest_class(answers, position):
    assert majority(answers) == position


def test_consensus_counts_prompts_whose_majority_is_right():
    accuracy = np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    answers = [["1", "2", "2"], ["5", "6", "6"], [None, None, "4"]]
    assert consensus(accuracy, answers) == pytest.approx(2 / 3)


def rollouts_of(lengths, num_samples, finish):
    found = build_rollouts(
        [[1]] * (len(lengths) // num_samples),
        [[1] * n for n in lengths],
        finish=finish,
        answer=["7"] * len(lengths),
        verifier=["trace"] * len(lengths),
    )
    found.validate()
    return found


def judged():
    """Two prompts of three samples: right, wrong, invalid; then right, right, verifier error."""
    stop, length, abort = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
    verdicts = [right("7"), wrong("8"), not_found(), right("7"), right("7"), failed("9")]
    finish = [stop, stop, length, stop, stop, abort]
    return Judged(rollouts_of([2, 2, 4, 3, 3, 0], 3, finish), verdicts, 3)


def test_scalars_by_hand():
    assert judged().answers() == [["7", "8", None], ["7", "7", None]]
    found = scalars(judged(), None, [0, 1], EvaluateConfig(pass_at=[1, 2, 32]), seed=0)
    assert found["accuracy"] == pytest.approx(0.5)
    assert found["accuracy_standard_error"] == pytest.approx((2 / 3 / 3) ** 0.5 / 2)
    assert found["pass@1"] == pytest.approx(0.5)
    assert found["pass@2"] == pytest.approx((2 / 3 + 1.0) / 2)
    assert "pass@32" not in found
    assert found["cons@3"] == pytest.approx(1.0)
    assert found["invalid_fraction"] == pytest.approx(1 / 6)
    assert found["truncated_fraction"] == pytest.approx(1 / 6)
    assert found["refused_fraction"] == pytest.approx(1 / 6)
    assert found["verifier_errors"] == 1.0
    assert found["verifier_timeouts"] == 0.0
    assert found["response_length_mean"] == pytest.approx(14 / 6)
    assert found["num_generated_tokens"] == 14.0
    assert (found["num_prompts"], found["num_samples"]) == (2.0, 3.0)
    assert "greedy" not in found


def test_scalars_of_some_prompts_see_only_their_rows():
    greedy = Judged(rollouts_of([2, 2], 1, [0, 0]), [wrong("8"), right("7")], 1)
    found = scalars(judged(), greedy, [1], EvaluateConfig(), seed=0)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["greedy"] == 1.0
    assert found["num_generated_tokens"] == 6.0
    assert found["invalid_fraction"] == 0.0


def test_one_sample_has_no_standard_error():
    one = Judged(rollouts_of([2, 2], 1, [0, 0]), [right("7"), wrong("8")], 1)
    found = scalars(one, None, [0, 1], EvaluateConfig(), seed=0)
    assert "accuracy_standard_error" not in found
    assert found["accuracy"] == 0.5


@pytest.mark.parametrize("pass_at", [[0], [1, 1], [-1]])
def test_pass_at_must_hold_different_positive_numbers(pass_at):
    with pytest.raises(ValueError, match="different numbers of at least 1"):
        EvaluateConfig(pass_at=pass_at)
