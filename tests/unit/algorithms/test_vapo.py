"""VAPO, PPO and VC-PPO: published constants, numbers by hand, edge cases."""

import importlib
import math

import pytest
import torch

from planish.algorithms import build_algorithm
from planish.algorithms.advantages import gae
from planish.algorithms.masked import masked_whiten
from planish.algorithms.ppo import PpoConfig
from planish.algorithms.vapo import Vapo, VapoConfig
from planish.algorithms.vc_ppo import VcPpoConfig
from planish.base.config import parse_section
from planish.base.errors import ConfigError
from tests.unit.algorithms.batches import make_batch, ragged_mask, value_step, whole_step

NAN = float("nan")


def vapo(**changes):
    """VAPO whose advantages are not whitened, so that they can be told by hand."""
    return Vapo(VapoConfig(**({"whiten_advantages": False} | changes)))


def run_loss(algorithm, batch, new):
    batch = algorithm.advantages(batch)
    return algorithm.loss(new, torch.zeros_like(new), batch, whole_step(algorithm, batch))


def run_value_loss(algorithm, batch, values):
    return algorithm.value_loss(values, batch, value_step(algorithm, batch))


def test_vapo_defaults_are_the_published_ones():
    # VAPO section 5.1: discount 1, critic's decay 1, alpha 0.05, clip 0.2 / 0.28, positive 0.1.
    config = VapoConfig()
    assert (config.gamma, config.lambda_critic, config.lambda_alpha) == (1.0, 1.0, 0.05)
    assert (config.clip_low, config.clip_high) == (0.2, 0.28)
    assert (config.aggregation, config.positive_coefficient) == ("token-mean", 0.1)
    assert config.decoupled_gae
    # Not in the paper: off, or as the T-PPO authors' code has it, or ours.
    assert (config.dual_clip, config.value_clip_low, config.value_clip_high) == (None, None, None)
    assert (config.advantage_clip, config.correction) == (None, "off")
    assert (config.lambda_min, config.whiten_advantages) == (0.95, True)
    assert config.value_aggregation == "token-mean"


def test_ppo_and_vc_ppo_defaults_are_the_published_ones():
    # VAPO section 5.1 on its baseline: decay 0.95 for both, clip 0.2, sample-level loss.
    for config, critic_decay in ((PpoConfig(), 0.95), (VcPpoConfig(), 1.0)):
        assert (config.gamma, config.lambda_policy, config.lambda_alpha) == (1.0, 0.95, 0.0)
        assert config.lambda_critic == critic_decay
        assert (config.clip_low, config.clip_high) == (0.2, 0.2)
        assert config.aggregation == "seq-mean-token-mean"
        assert config.positive_coefficient == 0.0


def two_rows(**more):
    """A right response of three tokens and a wrong one of two."""
    return make_batch(
        ragged_mask([3, 2], 3), values=[[0.2, 0.4, 0.6], [0.5, 0.1, NAN]], reward=[1.0, 0.0], **more
    )


def test_advantages_and_returns_by_hand():
    # Errors: 0.2, 0.2, 0.4 and -0.4, -0.1; decay 0.5.
    filled = vapo(lambda_alpha=0.0, lambda_policy=0.5).advantages(two_rows())
    assert filled.advantages[0].tolist() == pytest.approx([0.2 + 0.5 * 0.4, 0.4, 0.4])
    assert filled.advantages[1].tolist() == pytest.approx([-0.45, -0.1, 0.0])
    # The critic's decay is 1: every token's target is the reward, exactly, whatever the values.
    assert filled.returns.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_the_policys_decay_follows_the_length_of_each_row():
    # alpha 1: decay 1 - 1/3 and 1 - 1/2.
    filled = vapo(lambda_alpha=1.0, lambda_min=0.0).advantages(two_rows())
    assert filled.advantages[0].tolist() == pytest.approx(
        [0.2 + 2 / 3 * (0.2 + 2 / 3 * 0.4), 0.2 + 2 / 3 * 0.4, 0.4]
    )
    assert filled.advantages[1].tolist() == pytest.approx([-0.4 + 0.5 * -0.1, -0.1, 0.0])


def test_the_critics_own_decay_makes_advantage_plus_value_its_target():
    filled = vapo(lambda_critic=0.5).advantages(two_rows())
    assert filled.returns[0].tolist() == pytest.approx([0.2 + 0.4, 0.4 + 0.4, 1.0])
    coupled = vapo(decoupled_gae=False, lambda_alpha=0.0, lambda_policy=0.5)
    assert torch.equal(coupled.advantages(two_rows()).returns, filled.returns)


def test_a_discount_below_one_discounts_the_monte_carlo_return():
    filled = vapo(gamma=0.5).advantages(two_rows())
    assert filled.returns[0].tolist() == pytest.approx([0.25, 0.5, 1.0])


def test_whitening_uses_the_trained_tokens_of_the_whole_batch_and_the_clamp_comes_after():
    raw = vapo().advantages(two_rows())
    trained = raw.policy_mask
    mean, deviation = raw.advantages[trained].mean(), raw.advantages[trained].std()
    white = vapo(whiten_advantages=True).advantages(two_rows()).advantages
    torch.testing.assert_close(white[trained], (raw.advantages[trained] - mean) / deviation)
    assert (white[~trained] == 0).all()
    clamped = vapo(whiten_advantages=True, advantage_clip=0.5).advantages(two_rows()).advantages
    assert torch.equal(clamped, white.clamp(-0.5, 0.5))
    assert clamped.abs().max().item() == 0.5


def test_positive_loss_pulls_every_token_of_right_responses_equally():
    new = torch.full((2, 3), -1.0, requires_grad=True)
    batch = two_rows(old=[[-1.0] * 3, [-1.0] * 3]).updated(values=torch.zeros(2, 3))
    without = run_loss(vapo(positive_coefficient=0.0), batch, new)
    with_positive = run_loss(vapo(), batch, new)
    assert (with_positive.loss - without.loss).item() == pytest.approx(0.1 * 1.0, abs=1e-6)
    gradient = torch.autograd.grad(with_positive.loss - without.loss, new)[0]
    assert gradient[0].tolist() == pytest.approx([-0.1 / 3] * 3, abs=1e-7)
    assert gradient[1].tolist() == [0.0] * 3
    total, count = with_positive.means["nll_loss"]
    assert (total / count).item() == 1.0
    assert "nll_loss" not in without.means


def test_without_a_right_response_the_positive_loss_is_zero():
    batch = make_batch(ragged_mask([2, 1], 2), reward=[0.0, -1.0])
    new = torch.full((2, 2), -1.0)
    algorithm = vapo()
    output = run_loss(algorithm, batch, new)
    assert algorithm.counts(algorithm.advantages(batch))["positive_tokens"] == 0.0
    assert torch.equal(output.loss, run_loss(vapo(positive_coefficient=0.0), batch, new).loss)
    assert output.means["nll_loss"][1].item() == 0


def test_value_losses_and_their_clip_by_hand():
    # Old 0, return 2; values 1 (cut to 0.6: 1.4^2 above 1^2) and 0.5 (free); half the square.
    batch = make_batch(ragged_mask([2, 1], 2), returns=[[2.0, 2.0], [1.0, NAN]])
    values = torch.tensor([[1.0, 0.5], [0.0, NAN]])
    clipped = run_value_loss(vapo(value_clip_low=0.5, value_clip_high=0.6), batch, values)
    assert clipped.loss.item() == pytest.approx(0.5 * (1.96 + 2.25 + 1.0) / 3)
    total, count = clipped.means["value_clipfrac"]
    assert (total.item(), count.item()) == (1, 3)
    by_row = run_value_loss(vapo(value_aggregation="seq-mean-token-mean"), batch, values)
    assert by_row.loss.item() == pytest.approx(0.5 * ((1.0 + 2.25) / 2 + 1.0) / 2)
    assert by_row.means["value_clipfrac"][0].item() == 0


def test_nan_outside_the_masks_has_no_effect_on_either_loss_or_gradient():
    batch = two_rows(old=[[-1.0] * 3, [-1.0, -1.0, math.inf]])
    new = torch.tensor([[-1.0, -1.1, -1.2], [-1.0, -1.3, NAN]], requires_grad=True)
    run_loss(vapo(), batch, new).loss.backward()
    assert new.grad.isfinite().all()
    values = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, NAN]], requires_grad=True)
    loss = run_value_loss(vapo(), vapo().advantages(batch), values).loss
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 3 / 5)
    assert values.grad[1, 2].item() == 0.0


def test_a_response_of_one_end_token_has_its_reward_on_it_and_the_smallest_decay():
    batch = make_batch(ragged_mask([1], 3), values=[[0.25, 0, 0]], reward=[0.0])
    filled = vapo().advantages(batch)
    assert filled.advantages.tolist() == [[-0.25, 0, 0]]
    assert filled.returns.tolist() == [[0, 0, 0]]
    # alpha * length is below 1: without the bound the decay would be -19.
    assert vapo().describe(batch)["lambda_mean"] == pytest.approx(0.95)
    assert vapo(lambda_min=0.0).describe(batch)["lambda_mean"] == 0.0


def test_holes_in_the_mask_carry_the_estimate_over_and_are_not_trained():
    mask = torch.tensor([[1, 0, 1, 1, 0]]).bool()
    whole = vapo().advantages(
        make_batch(ragged_mask([3], 3), values=[[0.2, 0.4, 0.6]], reward=[1.0])
    )
    holes = vapo().advantages(make_batch(mask, values=[[0.2, NAN, 0.4, 0.6, NAN]], reward=[1.0]))
    assert holes.advantages[mask].tolist() == whole.advantages[0].tolist()
    assert holes.returns.tolist() == [[1, 0, 1, 1, 0]]


def test_a_row_that_a_window_cut_short_takes_no_part():
    batch = two_rows(finished=[True, False], accuracy=[1.0, 1.0])
    filled = vapo(whiten_advantages=True).advantages(batch)
    for mask in (filled.policy_mask, filled.value_mask, filled.positive_mask):
        assert mask.any(1).tolist() == [True, False]
    assert not filled.advantages[1].any()
    assert not filled.returns[1].any()
    alone = vapo(whiten_advantages=True).advantages(batch.take(torch.tensor([0])))
    assert torch.equal(filled.advantages[:1], alone.advantages)


def test_describe_measures_advantages_before_they_are_whitened():
    seen = Vapo(VapoConfig()).describe(two_rows())
    raw = vapo().advantages(two_rows())
    trained = raw.advantages[raw.policy_mask]
    assert seen["advantage_mean"] == pytest.approx(trained.mean().item())
    assert seen["advantage_std"] == pytest.approx(trained.std(correction=0).item())
    assert seen["lambda_mean"] == pytest.approx(0.95)


def test_corrections_of_the_engine_work_for_recipes_with_a_critic_too():
    mask = ragged_mask([1, 1], 1)
    batch = make_batch(
        mask, old=[[math.log(0.4)], [math.log(0.5)]], rollout=[[math.log(0.1)], [math.log(0.5)]],
        reward=[1.0, -1.0],
    )  # fmt: skip
    plain = vapo(positive_coefficient=0.0, correction="token_truncate", correction_max=2.0)
    output = run_loss(plain, batch, batch.old_logprobs)
    assert output.loss.item() == pytest.approx((-2 * 1.0 + 1.0) / 2)
    total, count = output.means["correction_weight"]
    assert (total / count).item() == pytest.approx(1.5)
    bypass = vapo(correction="bypass").advantages(batch)
    assert torch.equal(bypass.old_logprobs, batch.rollout_logprobs)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"value_aggregation": "seq-sum-norm"}, "value_aggregation 'seq-sum-norm'"),
        ({"lambda_min": 1.0}, "less than 1"),
        ({"lambda_critic": 1.5}, "less than or equal to 1"),
        ({"gamma": 0.0}, "greater than 0"),
        ({"value_clip_low": 0.0}, "greater than 0"),
        ({"std": "sample"}, "not a known key"),
    ],
)
def test_impossible_constants_are_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        parse_section(VapoConfig, table, section="algorithm")


@pytest.mark.parametrize("name", ["vapo", "tppo", "ppo", "vc_ppo"])
def test_estimates_of_a_batch_that_is_described_are_made_once(name, monkeypatch):
    module = importlib.import_module(f"planish.algorithms.{'tppo' if name == 'tppo' else 'vapo'}")
    walks, walk = [], module.gae
    monkeypatch.setattr(module, "gae", lambda *x, **y: walks.append(1) or walk(*x, **y))
    algorithm, batch, other = build_algorithm({"name": name}), two_rows(), two_rows()
    alone = algorithm.advantages(batch).advantages
    algorithm.describe(batch)
    assert torch.equal(algorithm.advantages(batch).advantages, alone)
    assert len(walks) == 2
    # Another batch has estimates of its own, and nothing is held.
    algorithm.describe(batch)
    algorithm.advantages(other)
    algorithm.advantages(batch)
    assert len(walks) == 5


@pytest.mark.parametrize("shape", [(0, 3), (1, 7), (5, 1), (4, 9), (33, 40)])
@pytest.mark.parametrize("holes", [0.0, 0.3, 1.0])
def test_gae_by_lines_has_the_bits_of_a_walk_over_columns(shape, holes):
    draw = torch.Generator().manual_seed(shape[0])
    values, rewards = torch.randn(2, *shape, generator=draw)
    mask = torch.rand(shape, generator=draw) >= holes
    bootstrap, lam = torch.randn(2, shape[0], generator=draw)
    seen = gae(rewards, values, mask, gamma=0.9, lam=lam, bootstrap=bootstrap)
    running, following, wanted = torch.zeros(shape[0]), bootstrap, torch.zeros(shape)
    for t in reversed(range(shape[1])):
        delta = rewards[:, t] + 0.9 * following - values[:, t]
        running = (delta + 0.9 * lam * running).where(mask[:, t], running)
        following = values[:, t].where(mask[:, t], following)
        wanted[:, t] = running.where(mask[:, t], 0.0)
    assert torch.equal(seen, wanted)


@pytest.mark.parametrize("columns", [0, 1, 17])
def test_whitened_advantages_have_equal_bits_whatever_the_padding(columns):
    draw = torch.Generator().manual_seed(columns)
    x, mask = torch.randn(6, 11, generator=draw), torch.rand(6, 11, generator=draw) > 0.4
    padded = torch.nn.functional.pad(x, (0, columns), value=math.nan)
    kept = torch.nn.functional.pad(mask, (0, columns))
    assert torch.equal(masked_whiten(padded, kept)[:, :11], masked_whiten(x, mask))
