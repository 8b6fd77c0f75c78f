import math

import pytest
import torch

from planish.algorithms.advantages import (
    adaptive_lambda,
    explained_variance,
    gae,
    group_advantages,
    last_value,
    monte_carlo_returns,
    spread,
    terminal_rewards,
)


def test_two_groups_of_three_by_hand():
    # Group 5: rewards 1, 0, 0: mean 1/3, sample deviation sqrt(1/3). Group 2: 2, 4, 6: deviation 2.
    rewards = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.0, 6.0])
    group = torch.tensor([5, 2, 5, 2, 5, 2])
    seen = group_advantages(rewards, group, epsilon=0.0)
    root = math.sqrt(1 / 3)
    wanted = [2 / 3 / root, -1.0, -1 / 3 / root, 0.0, -1 / 3 / root, 1.0]
    assert seen.tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("reward", [1.0, 1 - 1 / 12, -1.7, 0.1])
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(reward):
    seen = group_advantages(torch.full((8,), reward), torch.zeros(8))
    assert seen.tolist() == [0.0] * 8


def test_a_group_of_one_keeps_its_reward():
    seen = group_advantages(torch.tensor([0.7, 1.0, 0.0]), torch.tensor([3, 4, 4]), epsilon=0.0)
    assert seen.tolist() == pytest.approx([0.7, math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-6)


def test_rows_outside_the_statistics_do_not_move_the_mean():
    rewards, group = torch.tensor([1.0, -1.0, -2.0]), torch.zeros(3)
    counted = torch.tensor([True, True, False])
    seen = group_advantages(rewards, group, epsilon=0.0, in_stats=counted)
    # Mean 0 and sample deviation sqrt(2) of the first two.
    assert seen.tolist() == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2), -math.sqrt(2)])


def test_no_rollouts_have_no_advantages():
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_spread_fills_masked_tokens_only():
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    assert spread(torch.tensor([2.0, -1.0]), mask).tolist() == [[0, 2, 2], [0, -1, 0]]


def test_reward_sits_on_the_last_one_of_the_mask_and_unfinished_rows_get_none():
    mask = torch.tensor([[0, 1, 0, 1, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    finished = torch.tensor([True, False, True])
    seen = terminal_rewards(torch.tensor([1.0, 1.0, 1.0]), mask, finished)
    assert seen.tolist() == [[0, 0, 0, 1, 0], [0] * 5, [0] * 5]


def test_gae_carries_over_holes_as_if_they_were_not_there():
    values, rewards = torch.tensor([[0.1, -0.2, 0.4, 0.3]]), torch.tensor([[0.0, 0, 0, 1]])
    plain = gae(rewards, values, torch.ones(1, 4), lam=0.95)
    nan = float("nan")
    holes = gae(
        torch.tensor([[nan, 0.0, 0.0, nan, 0.0, 1.0, nan]]),
        torch.tensor([[nan, 0.1, -0.2, nan, 0.4, 0.3, nan]]),
        torch.tensor([[0, 1, 1, 0, 1, 1, 0]]),
        lam=0.95,
    )
    assert holes[0, [1, 2, 4, 5]].tolist() == plain[0].tolist()
    assert holes[0, [0, 3, 6]].tolist() == [0, 0, 0]


def test_gae_takes_a_decay_per_row():
    values, rewards = torch.rand(2, 5), torch.rand(2, 5)
    both = gae(rewards, values, torch.ones(2, 5), lam=torch.tensor([0.3, 0.9]))
    for row, lam in enumerate((0.3, 0.9)):
        alone = gae(rewards[row : row + 1], values[row : row + 1], torch.ones(1, 5), lam=lam)
        assert torch.equal(both[row], alone[0])


def test_unfinished_rows_with_constant_values_have_no_advantage():
    values, mask = torch.full((1, 6), 0.7), torch.ones(1, 6)
    seen = gae(torch.zeros(1, 6), values, mask, lam=0.9, bootstrap=last_value(values, mask))
    assert seen.abs().max().item() == 0.0


def test_last_value_of_a_row_without_tokens_is_zero():
    values = torch.tensor([[0.5, 0.9], [0.5, 0.9]])
    assert last_value(values, torch.tensor([[1, 0], [0, 0]])).tolist() == [0.5, 0.0]


def test_monte_carlo_returns_sum_what_is_still_to_come():
    rewards = torch.tensor([[0.0, 1.0, 5.0, 2.0, 9.0]])
    seen = monte_carlo_returns(rewards, torch.tensor([[1, 1, 0, 1, 0]]))
    assert seen.tolist() == [[3, 3, 0, 2, 0]]


def test_explained_variance_of_constant_returns_is_undefined():
    assert explained_variance(torch.ones(1, 3), torch.rand(1, 3), torch.ones(1, 3)).isnan()


def test_adaptive_lambda_never_falls_with_length_and_stays_below_one():
    lam = adaptive_lambda(torch.arange(1, 5000), alpha=0.05, minimum=0.95)
    assert lam[0].item() == pytest.approx(0.95)
    assert (lam.diff() >= 0).all()
    assert (lam[401:].diff() > 0).all()
    assert lam.max() < 1
