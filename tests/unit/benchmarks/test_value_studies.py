"""How the studies of the critic split errors, on chains whose values are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from planish.algorithms.advantages import gae
from tests.benchmarks.studies.value_advantage import LABELS, PRETRAINED, Outcomes, compare, decays
from tests.benchmarks.studies.value_bias import value_errors
from tests.benchmarks.studies.value_critics import COUNTS

CHANCES = np.array([0.2, 0.5, 0.8])
"""Of a right answer after each of three tokens."""


def _coins(num, seed):
    """Return rewards after each of three tokens, and those of states worth 0.4 before them."""
    rng = np.random.default_rng(seed)
    after = (rng.random((3, num)) < CHANCES[:, None]).astype(float)
    return after, (rng.random((3, num)) < 0.4).astype(float)


def test_the_reward_less_a_wrong_value_has_no_bias_but_a_baseline_and_the_variance_of_the_coin():
    after, before = _coins(40_000, 0)
    # lambda 1 with a critic that says 0.7 where the value is 0.4
    found = compare(Outcomes(after - 0.7, after, before - 0.7, before))
    assert found["bias"] == pytest.approx(0.0, abs=0.01)
    assert found["baseline"] == pytest.approx(0.3, abs=0.01)
    variance = float(np.mean(CHANCES * (1 - CHANCES)))
    assert found["deviation"] ** 2 == pytest.approx(variance, abs=0.005)
    assert found["rmse"] == pytest.approx(variance**0.5, abs=0.01)


def test_a_critic_that_sees_no_difference_between_tokens_has_their_advantage_as_its_bias():
    after, before = _coins(40_000, 1)
    # lambda 0 with a critic that says 0.5 everywhere
    found = compare(Outcomes(0 * after, after, 0 * before, before))
    assert found["bias"] == pytest.approx(float(np.mean((CHANCES - 0.4) ** 2)) ** 0.5, abs=0.01)
    assert (found["deviation"], found["baseline"]) == (0.0, 0.0)


def test_a_perfect_critic_has_no_error_but_that_of_sampling():
    squares = []
    for seed in range(200):
        after, before = _coins(64, seed)
        guesses = np.repeat((CHANCES - 0.4)[:, None], 64, 1)
        found = compare(Outcomes(guesses, after, 0 * before, before))
        assert found["deviation"] < 1e-7
        squares.append(found["bias"] ** 2)
    # Half of the squares are cut off at 0, the others are as small as their noise.
    assert np.mean(squares) < 0.003


def test_only_the_chosen_tokens_count():
    after, before = _coins(20_000, 2)
    outcomes = Outcomes(0 * after, after, 0 * before, before)
    found = compare(outcomes.take(np.array([False, False, True])))
    assert found["bias"] == pytest.approx(0.4, abs=0.02)


def test_value_errors_are_split_by_place():
    places = np.array([0, 1, 0, 1])
    found = value_errors(
        np.array([0.5, 0.9, 0.7, 0.9]), np.array([0.5, 0.5, 0.5, 0.7]), np.zeros(4), places, 2
    )
    assert found["bias"] == pytest.approx([0.1, 0.3])
    assert found["rmse"] == pytest.approx([0.02**0.5, 0.1**0.5])
    assert found["bias_all"] == pytest.approx(0.2)
    assert found["rmse_all"] == pytest.approx(0.06**0.5)


def test_decays_are_those_of_their_names():
    lengths = torch.tensor([10, 40, 100])
    made = decays()
    assert list(made) == list(LABELS)
    assert made["fixed 0.95"](lengths).tolist() == pytest.approx([0.95, 0.95, 0.95])
    assert made["adaptive 0.5"](lengths).tolist() == pytest.approx([0.8, 0.95, 0.98])
    assert made["adaptive 0.05"](lengths).tolist() == pytest.approx([0.0, 0.5, 0.8])


def test_the_weight_of_the_reward_falls_with_the_distance_for_a_fixed_decay():
    rewards = torch.zeros(1, 60)
    rewards[0, -1] = 1.0
    mask = torch.ones(1, 60, dtype=torch.bool)
    found = gae(rewards, torch.zeros(1, 60), mask, lam=0.9)
    assert float(found[0, 0]) == pytest.approx(0.9**59, rel=1e-4)


def test_both_studies_examine_critics_that_are_kept():
    assert set(PRETRAINED) <= set(COUNTS)
