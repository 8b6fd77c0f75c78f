import math

import pytest
import torch

from planish.algorithms.base import Denominators
from planish.algorithms.losses import (
    aggregate,
    clipped_surrogate,
    kl_estimate,
    loss_counts,
    policy_ratio,
    value_losses,
)
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


def test_an_empty_mask_aggregates_to_zero():
    none = torch.zeros_like(MASK)
    counts = loss_counts(none)
    assert aggregate(X, none, "token-mean", Denominators(counts, counts, 1)).item() == 0.0


def test_gradient_vanishes_only_where_the_clip_bites():
    # Ratio above 1 + high: no gradient for a positive advantage, some for a negative one.
    for advantage, flows in ((1.0, False), (-1.0, True)):
        logprob = torch.tensor(0.5, requires_grad=True)
        loss = clipped_surrogate(
            policy_ratio(logprob, torch.tensor(0.0)), torch.tensor(advantage),
            clip_low=0.2, clip_high=0.28,
        )  # fmt: skip
        loss.backward()
        assert (logprob.grad.item() != 0.0) is flows


def test_dual_clip_takes_the_gradient_of_far_tokens_with_negative_advantage():
    logprob = torch.tensor(math.log(12.0), requires_grad=True)
    clipped_surrogate(
        policy_ratio(logprob, torch.tensor(0.0)), torch.tensor(-1.0),
        clip_low=0.2, clip_high=0.28, dual_clip=3.0,
    ).backward()  # fmt: skip
    assert logprob.grad.item() == 0.0


def test_kl_estimators_by_hand_and_k3_is_never_negative():
    policy, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -0.5])
    assert kl_estimate(policy, reference, "k1").tolist() == [0.5, -0.5]
    assert kl_estimate(policy, reference, "k2").tolist() == [0.125, 0.125]
    k3 = kl_estimate(policy, reference, "k3")
    assert k3.tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5])
    assert kl_estimate(torch.tensor([-99.0]), torch.tensor([0.0]), "k3").item() == 10.0


def test_asymmetric_value_clip_by_hand():
    # old 0; new 1 is cut to 0.6: errors (1 - 2)^2 = 1 and (0.6 - 2)^2 = 1.96.
    seen = value_losses(
        torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0]), clip_low=0.5, clip_high=0.6
    )
    assert seen.item() == pytest.approx(0.98)


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
