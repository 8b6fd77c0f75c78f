"""Each of VAPO's seven changes to PPO can be switched off alone, by one key, and does one thing."""

import pytest
import torch

from planish.algorithms.advantages import gae, scaled_advantages, terminal_rewards
from planish.algorithms.losses import aggregate, clipped_surrogate, policy_ratio
from planish.algorithms.vapo import Vapo, VapoConfig
from planish.base.config import merge, resolve_config
from tests.unit.algorithms.batches import make_batch, ragged_mask, whole_step

SEVEN = {
    "value pretraining": "critic.pretrain_iterations=0",
    "decoupled gae": "algorithm.decoupled_gae=false",
    "length-adaptive gae": "algorithm.lambda_alpha=0.0",
    "clip-higher": "algorithm.clip_high=0.2",
    "token-level loss": "algorithm.aggregation=seq-mean-token-mean",
    "positive-example loss": "algorithm.positive_coefficient=0.0",
    "group sampling": "rollout.group_size=1",
}
RAW = {"algorithm": {"name": "vapo"}, "rollout": {"dynamic_sampling": False}}


@pytest.mark.parametrize("override", SEVEN.values(), ids=SEVEN)
def test_one_key_of_the_configuration_switches_a_change_off(override):
    whole, without = resolve_config(RAW), resolve_config(merge(RAW, overrides=[override]))
    changed = {
        f"{section}.{key}"
        for section, table in whole.items()
        for key, value in table.items()
        if without[section][key] != value
    }
    assert changed == {override.partition("=")[0]}


def batch_and_new():
    g = torch.Generator().manual_seed(4)
    mask = ragged_mask([30, 7, 18, 1], 30)
    old = -torch.rand(4, 30, generator=g) * 2
    batch = make_batch(
        mask, old=old, values=torch.rand(4, 30, generator=g), reward=[1.0, 0.0, 1.0, 0.0]
    )
    return batch, old + torch.randn(4, 30, generator=g) * 0.5


def outcome(**changes):
    """Filled batch and policy loss of VAPO with a decay that differs from row to row."""
    batch, new = batch_and_new()
    algorithm = Vapo(VapoConfig(**({"lambda_alpha": 0.5, "lambda_min": 0.3} | changes)))
    filled = algorithm.advantages(batch)
    output = algorithm.loss(new, torch.zeros_like(new), filled, whole_step(algorithm, filled))
    return filled, output.loss.item()


def surrogate(filled, *, clip_high=0.28, aggregation="token-mean"):
    """The clipped part of the loss, straight from the functions."""
    _, new = batch_and_new()
    losses = clipped_surrogate(
        policy_ratio(new, filled.old_logprobs), filled.advantages, clip_low=0.2, clip_high=clip_high
    )
    step = whole_step(Vapo(VapoConfig()), filled)
    return aggregate(losses, filled.policy_mask, aggregation, step).item()


def test_coupled_estimates_change_the_critics_targets_only():
    filled, loss = outcome()
    coupled, coupled_loss = outcome(decoupled_gae=False)
    assert coupled_loss == loss
    assert torch.equal(coupled.advantages, filled.advantages)
    mask, finished = filled.value_mask, filled.is_finished
    decay = torch.tensor([1 - 1 / 15, 1 - 1 / 3.5, 1 - 1 / 9, 0.3])
    rewards = terminal_rewards(filled.reward, mask, finished)
    wanted = gae(rewards, filled.values, mask, lam=decay) + filled.values * mask
    torch.testing.assert_close(coupled.returns, wanted)
    assert filled.returns[mask].unique().tolist() == [0.0, 1.0]


def test_a_fixed_decay_changes_the_advantages_only():
    filled, _ = outcome()
    fixed, _ = outcome(lambda_alpha=0.0)
    assert torch.equal(fixed.returns, filled.returns)
    rewards = terminal_rewards(filled.reward, filled.value_mask, filled.is_finished)
    raw = gae(rewards, filled.values, filled.value_mask, lam=0.95)
    wanted = scaled_advantages(raw, filled.value_mask, whiten=True, clip=None)
    torch.testing.assert_close(fixed.advantages, wanted)
    assert (fixed.advantages - filled.advantages).abs().max() > 0.05


def test_symmetric_clip_and_sample_level_loss_change_the_clipped_part_of_the_loss_only():
    filled, loss = outcome()
    for changes in ({"clip_high": 0.2}, {"aggregation": "seq-mean-token-mean"}):
        other, other_loss = outcome(**changes)
        assert torch.equal(other.advantages, filled.advantages)
        assert other_loss - loss == pytest.approx(
            surrogate(filled, **changes) - surrogate(filled), abs=1e-6
        )
        assert abs(other_loss - loss) > 1e-3


def test_without_the_positive_loss_the_clipped_part_is_left():
    filled, _ = outcome()
    other, other_loss = outcome(positive_coefficient=0.0)
    assert not other.positive_mask.any()
    assert other_loss == pytest.approx(surrogate(filled), abs=1e-6)
