"""The KL penalty to a reference policy: loss and gradient by hand, edge cases, configuration."""

import math

import pytest
import torch

from planish.algorithms import ALGORITHMS, build_algorithm
from planish.algorithms.base import Denominators
from planish.algorithms.clipped_policy import ClippedPolicyConfig, clipped_policy_loss
from planish.algorithms.dapo import Dapo
from planish.algorithms.grpo import GrpoConfig
from planish.algorithms.losses import loss_counts
from planish.base.config import config_sha256, load_preset, merge, preset_names, resolve_config
from planish.base.errors import ConfigError
from tests.unit.algorithms.batches import make_batch, ragged_mask, whole_step

MASK = torch.tensor([[0, 1, 1], [0, 1, 0]]).bool()
NEW = torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, 0.0]])
REFERENCE = torch.tensor([[0.0, -1.5, -1.0], [0.0, -0.75, 0.0]])
D = [0.5, -1.0, 0.25]
"""Policy minus reference of the three tokens."""

VALUE = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) + d - 1}
SLOPE = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: 1 - math.exp(-d)}
"""Derivatives by the log-probability of the token."""


def penalty_alone(config, batch, new=NEW):
    """Loss, gradient and metric of a batch without advantages: the surrogate is 0."""
    leaf = new.clone().requires_grad_()
    counts = loss_counts(batch.policy_mask)
    whole = Denominators(counts, {"tokens": 30.0, "sequences": 20.0}, 5)
    output = clipped_policy_loss(leaf, torch.zeros_like(new), batch, whole, config)
    output.loss.backward()
    return output, leaf.grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(
    ("aggregation", "shares"),
    [
        ("token-mean", [1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-mean", [1 / 4, 1 / 4, 1 / 2]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 1 / 2]),
        ("seq-sum-norm", [1 / 20, 1 / 20, 1 / 20]),
        ("batch-token", [1 / 6, 1 / 6, 1 / 6]),
    ],
)
def test_loss_and_gradient_by_hand(estimator, aggregation, shares):
    config = ClippedPolicyConfig(
        kl_coefficient=0.3, kl_estimator=estimator, aggregation=aggregation, norm_tokens=10
    )
    output, gradient = penalty_alone(config, make_batch(MASK, old=NEW, reference=REFERENCE))
    wanted = [0.3 * s * VALUE[estimator](d) for s, d in zip(shares, D, strict=True)]
    assert output.loss.item() == pytest.approx(sum(wanted), abs=1e-6)
    slopes = [0.3 * s * SLOPE[estimator](d) for s, d in zip(shares, D, strict=True)]
    assert gradient[MASK].tolist() == pytest.approx(slopes, abs=1e-6)
    assert (gradient[~MASK] == 0).all()
    total, count = output.means["reference_kl"]
    mean = sum(VALUE[estimator](d) for d in D) / 3
    assert (total / count).item() == pytest.approx(mean, abs=1e-6)


def test_the_penalty_is_added_to_the_clipped_loss_of_the_same_batch():
    batch = make_batch(MASK, old=NEW + 0.1, reward=[1.0, -1.0], reference=REFERENCE)

    def loss(**changes):
        algorithm = Dapo(GrpoConfig(**changes))
        filled = algorithm.advantages(batch)
        entropy = torch.zeros_like(NEW)
        return algorithm.loss(NEW, entropy, filled, whole_step(algorithm, filled))

    plain, penalised = loss(), loss(kl_coefficient=0.04)
    k3 = [VALUE["k3"](d) for d in D]
    wanted = plain.loss.item() + 0.04 * ((k3[0] + k3[1]) / 2 + k3[2]) / 2
    assert penalised.loss.item() == pytest.approx(wanted, abs=1e-6)
    assert penalised.means.keys() - plain.means.keys() == {"reference_kl"}


def test_weights_of_a_mismatch_correction_do_not_scale_the_penalty():
    # Engine and trainer differ by a factor of e: the weight is cut to 2, the penalty is not.
    batch = make_batch(MASK, old=NEW, rollout=NEW - 1.0, reference=REFERENCE)
    off, on = (
        penalty_alone(ClippedPolicyConfig(kl_coefficient=0.3, correction=mode), batch)[0].loss
        for mode in ("off", "token_truncate")
    )
    assert on.item() == off.item() > 0


def test_bypass_compares_with_the_reference_and_not_with_the_engine():
    engine = NEW - 0.1
    batch = make_batch(MASK, old=NEW, rollout=engine, reward=[1.0, -1.0], reference=REFERENCE)
    algorithm = Dapo(GrpoConfig(kl_coefficient=0.04, correction="bypass"))
    assert (algorithm.needs_old_logprobs, algorithm.needs_reference) == (False, True)
    filled = algorithm.advantages(batch)
    assert torch.equal(filled.old_logprobs, engine)
    output = algorithm.loss(NEW, torch.zeros_like(NEW), filled, whole_step(algorithm, filled))
    total, count = output.means["reference_kl"]
    mean = sum(VALUE["k3"](d) for d in D) / 3
    assert (total / count).item() == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_stands_in_padding_has_no_effect_on_loss_or_gradient(estimator, bad):
    config = ClippedPolicyConfig(kl_coefficient=0.3, kl_estimator=estimator)
    clean = make_batch(MASK, old=NEW, reference=REFERENCE)
    dirty = clean.updated(reference_logprobs=REFERENCE.masked_fill(~MASK, bad))
    wanted, wanted_gradient = penalty_alone(config, clean)
    seen, gradient = penalty_alone(config, dirty, NEW.masked_fill(~MASK, bad))
    assert seen.loss.item() == wanted.loss.item()
    assert torch.equal(gradient, wanted_gradient)
    assert seen.means["reference_kl"] == wanted.means["reference_kl"]


def test_far_from_the_reference_k3_is_cut_and_pulls_no_more():
    mask = ragged_mask([3], 3)
    new, reference = torch.tensor([[-60.0, -4.0, -1.0]]), torch.tensor([[-1.0, -0.1, -60.0]])
    config = ClippedPolicyConfig(kl_coefficient=1.0, aggregation="seq-mean-token-sum")
    batch = make_batch(mask, old=new, reference=reference)
    output, gradient = penalty_alone(config, batch, new)
    # Differences of -59, -3.9 and 59: each estimate is above 10.
    assert output.loss.item() == 30.0
    assert gradient.tolist() == [[0.0, 0.0, 0.0]]


def test_without_a_coefficient_the_reference_is_not_looked_at():
    batch = make_batch(MASK, old=NEW, reference=torch.full(MASK.shape, math.nan))
    output, gradient = penalty_alone(ClippedPolicyConfig(kl_estimator="k1"), batch)
    assert output.loss.item() == 0.0
    assert not gradient.any()
    assert "reference_kl" not in output.means


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_penalty_is_off_in_every_recipe_and_each_can_have_it(name):
    assert not build_algorithm({"name": name}).needs_reference
    assert build_algorithm({"name": name, "kl_coefficient": 0.04}).needs_reference


def test_a_penalty_that_is_off_is_in_no_digest():
    for name in preset_names():
        resolved = resolve_config(load_preset(name))
        assert not {"kl_coefficient", "kl_estimator"} & resolved["algorithm"].keys()
        assert "reference_policy" not in resolved["train"]
        off = merge(load_preset(name), overrides=["algorithm.kl_coefficient=0.0"])
        assert config_sha256(resolve_config(off)) == config_sha256(resolved)
    on = resolve_config({"algorithm": {"kl_coefficient": 0.04}})
    assert (on["algorithm"]["kl_coefficient"], on["algorithm"]["kl_estimator"]) == (0.04, "k3")
    assert resolve_config(on) == on


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kl_coefficient": -0.1}, "greater than or equal to 0"),
        ({"kl_coefficient": math.inf}, "finite number"),
        ({"kl_estimator": "k4"}, "'k1', 'k2' or 'k3'"),
        ({"kl_coeficient": 0.1}, "did you mean `kl_coefficient`"),
    ],
)
def test_impossible_penalties_are_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        resolve_config({"algorithm": table})
