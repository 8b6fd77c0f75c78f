"""How the studies of the critic split errors, on chains whose values are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from planish.algorithms.advantages import gae
from tests.benchmarks.studies.value_advantage import LABELS, PRETRAINED, compare, decays
from tests.benchmarks.studies.value_bias import value_errors
from tests.benchmarks.studies.value_critics import COUNTS

CHANCES = np.array([0.2, 0.5, 0.8])
"""Of a right answer after each of three tokens."""


def _coins(num, seed):
    """Return rewards after the tokens, [3, num], and the sampled value 0.4 before them."""
    rng = np.random.default_rng(seed)
    returns = (rng.random((3, num)) < CHANCES[:, None]).astype(float)
    before = rng.random((3, num)) < 0.4
    noise = before.var(1, ddof=1) / num
    return returns, before.mean(1), noise


def test_estimates_of_the_reward_alone_have_the_critics_bias_and_the_variance_of_the_coin():
    returns, values, noise = _coins(40_000, 0)
    # lambda 1 with a critic that says 0.7 where the value is 0.4
    found = compare(returns - 0.7, returns, values, noise, np.ones(3, bool))
    assert found["bias_mean"] == pytest.approx(-0.3, abs=0.01)
    assert found["bias_rms"] == pytest.approx(0.3, abs=0.01)
    variance = float(np.mean(CHANCES * (1 - CHANCES)))
    assert found["deviation"] ** 2 == pytest.approx(variance, abs=0.005)
    assert found["rmse"] == pytest.approx((0.3**2 + variance) ** 0.5, abs=0.01)


def test_estimates_by_a_perfect_critic_have_no_error_but_that_of_sampling():
    returns, values, noise = _coins(64, 1)
    guesses = np.repeat((CHANCES - 0.4)[:, None], 64, 1)
    found = compare(guesses, returns, values, noise, np.ones(3, bool))
    assert found["deviation"] == pytest.approx(0.0, abs=1e-7)
    assert found["bias_rms"] < 0.1


def test_the_noise_of_sampling_is_taken_out_of_squared_errors():
    squares = []
    for seed in range(300):
        returns, values, noise = _coins(64, seed)
        guesses = np.repeat((CHANCES - 0.4)[:, None], 64, 1)
        bias = (guesses - returns).mean(1) + values
        spread = (guesses - returns).var(1, ddof=1) / 64 + noise
        squares.append(float(np.mean(bias**2 - spread)))
    assert np.mean(squares) == pytest.approx(0.0, abs=4 * np.std(squares) / 300**0.5)
    assert abs(np.mean(squares)) < 0.001


def test_only_the_chosen_tokens_count():
    returns, values, noise = _coins(20_000, 2)
    found = compare(returns, returns, values, noise, np.array([True, False, False]))
    assert found["bias_mean"] == pytest.approx(0.4, abs=0.02)
    assert found["deviation"] ** 2 == pytest.approx(0.16, abs=0.01)


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
