"""Scores by hand: avg@n, its errors, pass@k, cons@n."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import ConfigError
from planish.stages.evaluate.score import (
    average,
    bootstrap,
    consensus,
    majority,
    mean_pass_at_k,
    pass_at_k,
    sampling_error,
)

TABLE = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])


def test_average_is_the_mean_over_prompts_of_mean_accuracies():
    assert average(TABLE) == pytest.approx((0.5 + 1.0 + 0.25) / 3)


def test_sampling_error_by_hand():
    # Sample variances: 4 * 0.25 / 3 = 1/3, 0, and 4 * 0.25 * 0.75 / 3 = 1/4.
    assert sampling_error(TABLE) == pytest.approx(math.sqrt((1 / 3 + 0 + 1 / 4) / 4) / 3)


def test_sampling_error_of_equal_samples_is_zero_and_of_one_sample_unknown():
    assert sampling_error(np.ones((5, 3))) == 0.0
    assert math.isnan(sampling_error(np.ones((5, 1))))


def test_sampling_error_matches_repeated_experiments():
    generator = np.random.default_rng(0)
    chances = generator.random((20, 1))
    draws = (generator.random((4000, 20, 8)) < chances).astype(float)
    spread = np.std([average(draw) for draw in draws])
    expected = np.mean([sampling_error(draw) for draw in draws[:400]])
    assert expected == pytest.approx(spread, rel=0.05)


def test_bootstrap_spread_is_that_of_the_mean_over_prompts():
    accuracy = np.repeat(np.array([[0.0], [1.0]]), 50, axis=0)
    error, (low, high) = bootstrap(accuracy, num_resamples=4000, seed=3)
    assert error == pytest.approx(0.05, rel=0.05)
    assert low == pytest.approx(0.4, abs=0.02)
    assert high == pytest.approx(0.6, abs=0.02)


def test_bootstrap_is_a_function_of_its_seed():
    first, second, other = (bootstrap(TABLE, num_resamples=50, seed=s) for s in (1, 1, 2))
    assert first == second
    assert first != other


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 4, 1.0),
        (4, 0, 4, 0.0),
        (4, 2, 2, 1 - 1 / 6),
        (4, 4, 1, 1.0),
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k_golden_numbers(num_samples, num_correct, k, expected):
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-6)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case):
    num_samples, num_correct = case
    right = [i < num_correct for i in range(num_samples)]
    for k in range(1, num_samples + 1):
        subsets = list(itertools.combinations(right, k))
        share = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_outside_the_samples_is_refused(k):
    with pytest.raises(ConfigError, match=r"must lie in 1\.\.4"):
        pass_at_k(4, 1, k)


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
