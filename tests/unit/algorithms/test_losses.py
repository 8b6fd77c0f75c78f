import math

import pytest
import torch

from planish.algorithms.advantages import group_advantages
from planish.algorithms.base import Denominators
from planish.algorithms.losses import aggregate, loss_counts, policy_ratio
from planish.algorithms.masked import masked_mean, masked_sum
from planish.algorithms.mismatch import correction_weights, mismatch_metrics

X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [7.0, 7.0, 7.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()


def test_ratio_of_far_apart_logprobs_is_finite():
    ratio = policy_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token-mean", 10 / 4),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum", (6 + 4) / 2),
        ("seq-sum-norm", 10 / (2 * 50)),
        ("batch-token", 10 / 40 * 5),
    ],
)
def test_each_aggregation_by_hand_leaves_out_the_empty_sequence(mode, wanted):
    counts = loss_counts(MASK)
    assert counts == {"tokens": 4.0, "sequences": 2.0}
    denominators = Denominators(counts, {"tokens": 40.0, "sequences": 9.0}, 5)
    seen = aggregate(X, MASK, mode, denominators, norm_tokens=50)
    assert seen.item() == pytest.approx(wanted)


OLD = torch.tensor([[0.0, math.log(0.5), math.log(0.9)]])
ENGINE = torch.tensor([[0.0, math.log(0.1), math.log(0.9)]])
ONES = torch.ones(1, 3)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("off", [1, 1, 1]),
        ("bypass", [1, 1, 1]),
        ("token_truncate", [1, 2, 1]),
        ("sequence_truncate", [2, 2, 2]),
        ("token_mask", [1, 0, 1]),
        ("sequence_mask", [0, 0, 0]),
    ],
)
def test_correction_weights_by_hand(mode, wanted):
    seen = correction_weights(OLD, ENGINE, ONES, mode=mode, minimum=0.5, maximum=2.0)
    assert seen[0].tolist() == pytest.approx(wanted)


def test_sequence_mask_inside_the_band_weighs_tokens_by_their_own_ratio():
    seen = correction_weights(OLD, ENGINE, ONES, mode="sequence_mask", maximum=6.0)
    assert seen[0].tolist() == pytest.approx([1, 5, 1])


def test_mismatch_metrics_by_hand():
    metrics = mismatch_metrics(OLD, ENGINE, ONES)
    assert metrics["mismatch_logprob_max"] == pytest.approx(math.log(5))
    assert metrics["mismatch_logprob_mean"] == pytest.approx(math.log(5) / 3)
    assert metrics["mismatch_probability_max"] == pytest.approx(0.4)
    assert metrics["mismatch_probability_mean"] == pytest.approx(0.4 / 3)
    assert metrics["mismatch_k3"] == pytest.approx((5 - math.log(5) - 1) / 3)
    assert metrics["mismatch_ppl_ratio"] == pytest.approx(5 ** (-1 / 3))
    assert metrics["mismatch_effective_samples"] == pytest.approx(49 / (3 * 27))


def test_mismatch_of_nothing_is_left_out():
    assert mismatch_metrics(OLD, ENGINE, torch.zeros(1, 3)) == {}


@pytest.mark.parametrize("reward", [1.0, 1 - 1 / 12, -1.7, 0.1])
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(reward):
    seen = group_advantages(torch.full((8,), reward), torch.zeros(8))
    assert seen.tolist() == [0.0] * 8


STEP = 1 / 4096
"""A token's part of the overlong punishment at the published size."""


@pytest.mark.parametrize(
    ("rewards", "counted", "wanted"),
    [
        ([1.0, 1.0, -2.0, -2.0], "1100", [0.0] * 4),
        ([1.0, 1.0, 1.0, -2.0], "1110", [0.0] * 4),
        ([-1.0, 1.0, -2.0, 0.0], "1000", [0.0] * 4),
        ([1.0, -2.0, -1.5, -1.0], "0000", [0.0] * 4),
        ([0.1, 0.1, 0.1, -1.0, -0.5, 0.1], "111000", [0.0] * 6),
        ([1.0, 1.0 - STEP, -2.0, -2.0], "1100", [math.sqrt(0.5), -math.sqrt(0.5), -4.0, -4.0]),
        ([0.0, -STEP, 1.0, 1.0], "1100", [math.sqrt(0.5), -math.sqrt(0.5), 4.0, 4.0]),
        ([1.0, -1.0, -2.0], "110", [math.sqrt(0.5), -math.sqrt(0.5), -math.sqrt(2)]),
        ([1.0, 1.0, -1.0, -2.0], "1110", [3**-0.5, 3**-0.5, -(2 * 3**-0.5), -(7 / 3) * 0.75**0.5]),
        ([0.5], "0", [0.5]),
    ],
)
def test_rows_outside_of_the_statistics_are_guarded_by_the_rows_inside(rewards, counted, wanted):
    # A group beside it, whose rows all count, is as it would be alone.
    beside = [2.0, 3.0]
    index = torch.tensor([4] * len(rewards) + [1, 1])
    inside = torch.tensor([c == "1" for c in counted] + [True, True])
    given = torch.tensor(rewards + beside)
    seen = group_advantages(given, index, epsilon=0.0, in_stats=inside).tolist()
    assert seen[: len(rewards)] == pytest.approx(wanted, rel=1e-3)
    assert seen[len(rewards) :] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_a_group_of_one_keeps_its_reward():
    seen = group_advantages(torch.tensor([0.7, 1.0, 0.0]), torch.tensor([3, 4, 4]), epsilon=0.0)
    assert seen.tolist() == pytest.approx([0.7, math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-6)


def test_no_rollouts_have_no_advantages():
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_half_precision_is_summed_in_float32():
    total = masked_sum(torch.ones(1, 4096, dtype=torch.bfloat16), torch.ones(1, 4096))
    assert (total.dtype, total.item()) == (torch.float32, 4096.0)


def test_an_empty_mask_has_mean_zero_per_row_and_over_all():
    x = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    assert masked_mean(x, torch.tensor([[0, 0], [1, 1]]), 1).tolist() == [0.0, 6.0]
    assert masked_mean(x, torch.zeros(2, 2)).item() == 0.0
