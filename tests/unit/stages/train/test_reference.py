"""The pass over a reference policy: when it is made, what it gives, what it leaves behind."""

import gc
import math

import pytest
import torch

from planish.algorithms.dapo import Dapo, DapoConfig
from planish.algorithms.grpo import GrpoConfig
from planish.algorithms.vapo import Vapo, VapoConfig
from planish.base.config import parse_section, resolve_config
from planish.base.errors import ConfigError
from planish.base.parallel import Grid
from planish.models.config import ModelConfig
from planish.models.logprobs import TokenScorer
from planish.models.policy import build_policy, load_policy, save_policy
from planish.stages.train.batching import train_batch
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.progress import Progress
from planish.stages.train.sharded_model import ShardedModel
from planish.stages.train.trainer import Trainer
from planish.stages.train.update import run_update
from tests.rounding import GRADIENTS
from tests.unit.stages.train.runs import TINY, random_rollouts, rewards_for
from tests.unit.stages.train.tables import TableTrainer, batch_of, table_config

CPU = torch.device("cpu")
PENALISED = GrpoConfig(kl_coefficient=0.5)


def update(trainer, batch, algorithm, **more):
    return run_update(
        trainer, algorithm, batch, config=table_config(), progress=Progress(), seed=(0, 1),
        reference_pin="pin", **more,
    )  # fmt: skip


def test_the_reference_is_scored_once_an_iteration_before_the_first_step():
    trainer = TableTrainer(3)
    result = update(trainer, batch_of(8), Dapo(PENALISED))
    assert trainer.referred == [(8, "pin")]
    assert trainer.order == ["reference"] + ["policy"] * 4
    first, *later = (step["reference_kl"] for step in result.minibatches)
    assert first == 0.0
    assert all(kl > 0 for kl in later)
    assert result.scalars["reference_kl"] == pytest.approx(sum(later) / 4)


def test_without_a_penalty_no_reference_is_loaded():
    trainer = TableTrainer(3)
    result = update(trainer, batch_of(8), Dapo(GrpoConfig()))
    assert trainer.referred == []
    assert "reference_kl" not in result.scalars


def test_bypass_and_an_empty_batch():
    trainer = TableTrainer(3)
    update(trainer, batch_of(), Dapo(GrpoConfig(kl_coefficient=0.5, correction="bypass")))
    assert trainer.referred == [(4, "pin")]
    empty = batch_of().take(torch.zeros(0, dtype=torch.int64))
    update(trainer, empty, Dapo(PENALISED))
    assert len(trainer.referred) == 1


def test_value_pretraining_needs_no_reference_and_the_iteration_after_it_does():
    critic = CriticConfig(warmup_iterations=0, pretrain_iterations=1)
    algorithm = Vapo(VapoConfig(kl_coefficient=0.5))
    trainer = TableTrainer(3)
    first = update(trainer, batch_of(), algorithm, critic=critic)
    assert first.scalars["pretraining"] == 1.0
    assert trainer.referred == []
    second = run_update(
        trainer, algorithm, batch_of(), config=table_config(), progress=first.progress,
        seed=(0, 2), critic=critic, reference_pin="pin",
    )  # fmt: skip
    assert trainer.referred == [(4, "pin")]
    assert "reference_kl" in second.scalars


def test_the_reference_is_scored_on_the_tokens_that_train():
    seen = []

    class Spy(TableTrainer):
        def reference_logprobs(self, batch, pin):
            seen.append(batch.policy_mask.any(1).tolist())
            return super().reference_logprobs(batch, pin)

    batch = batch_of(truncated=[True, False, False, False])
    config = DapoConfig(kl_coefficient=0.5, overlong_filtering=True)
    update(Spy(3), batch, Dapo(config))
    assert seen == [[False, True, True, True]]


def test_groups_without_a_signal_are_pulled_to_the_reference():
    batch = batch_of().updated(reward=torch.ones(4))
    moved = {}
    for coefficient in (0.0, 0.5):
        trainer = TableTrainer(3, reference=-1.5)
        update(trainer, batch, Dapo(GrpoConfig(kl_coefficient=coefficient)))
        moved[coefficient] = trainer.table.tolist()
    assert moved[0.0] == [-1.0] * 3
    # d = 0.5: each of two steps of rate 0.1 goes down the slope 0.5 * (1 - exp(-d)) * share.
    assert all(-1.5 < x < -1.0 for x in moved[0.5])
    trainer = TableTrainer(3, reference=-1.5)
    result = update(trainer, batch, Dapo(PENALISED))
    k3 = math.exp(-0.5) - 0.5
    assert result.minibatches[0]["loss"] == pytest.approx(0.5 * k3, abs=1e-6)


@pytest.fixture(scope="module")
def batch(tiny):
    rollouts = random_rollouts(tiny.policy, 5, num_groups=3)
    return train_batch(rollouts, rewards_for(rollouts, 6))


def trainer_of(tiny, temperature=1.0, **changes):
    return Trainer(
        TrainConfig(**{**TINY, **changes}), tiny.policy_pin,
        temperature=temperature, seed=3, grid=Grid(), device=CPU,
    )  # fmt: skip


def saved(tiny, name, policy):
    return save_policy(f"{tiny.root}/{name}", policy, version=0, parents={}, attributes={}).pin()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_policy_as_its_own_reference_has_its_log_probabilities(tiny, batch, temperature):
    trainer = trainer_of(tiny, temperature)
    wanted = trainer.logprobs(batch)[0]
    assert torch.equal(trainer.reference_logprobs(batch, tiny.policy_pin), wanted)
    other = trainer_of(tiny, 1.0).logprobs(batch)[0]
    assert torch.equal(wanted, other) is (temperature == 1.0)


@pytest.mark.slow
def test_a_reference_of_other_sizes_is_scored_by_its_own_forward(tiny, batch):
    large = build_policy(ModelConfig(num_layers=3, hidden_size=48, head_dim=16), seed=8)
    trainer = trainer_of(tiny, activation_checkpointing=True)
    seen = trainer.reference_logprobs(batch, saved(tiny, "large", large))
    with torch.no_grad():
        chosen = TokenScorer(large.model)(batch.input_ids, None, batch.policy_mask, 1.0)[0]
    assert (seen[batch.policy_mask] - chosen).abs().max() < GRADIENTS
    assert (seen[~batch.policy_mask] == 0).all()


@pytest.mark.slow
def test_the_reference_is_gone_after_the_pass_and_changed_nothing(tiny, batch):
    trainer = trainer_of(tiny)
    kind = type(trainer.policy.scorer.model)
    gc.collect()
    before = sum(type(x) is kind for x in gc.get_objects())
    state = {k: v.clone() for part in trainer.state().parts.values() for k, v in part.items()}
    gc.disable()
    try:
        trainer.reference_logprobs(batch, tiny.policy_pin)
        after = sum(type(x) is kind for x in gc.get_objects())
    finally:
        gc.enable()
    assert after == before > 0
    now = {k: v for part in trainer.state().parts.values() for k, v in part.items()}
    assert all(torch.equal(state[name], now[name]) for name in state)


def test_a_reference_has_no_optimizer(tiny):
    model = load_policy(tiny.policy_pin, dtype=torch.float32).model
    frozen = ShardedModel(model, **trainer_of(tiny)._shared, is_frozen=True)
    assert frozen.optimizer is None


def test_a_reference_of_another_tokenizer_is_refused(tiny, batch):
    other = build_policy(ModelConfig(num_layers=1, hidden_size=16, head_dim=8, alphabet="01"), 0)
    pin = saved(tiny, "other", other)
    with pytest.raises(ConfigError, match=r"the tokens of the policy in training \(54\), got 6"):
        trainer_of(tiny).reference_logprobs(batch, pin)


def test_a_pinned_reference_must_be_a_pin():
    with pytest.raises(ConfigError, match=r"`<uri>#sha256=<64 hex digits>`, got 'file:///p'"):
        parse_section(TrainConfig, {"reference_policy": "file:///p"}, section="train")
    pin = f"file:///p#sha256={'0' * 64}"
    both = {"train": {"reference_policy": pin}, "algorithm": {"kl_coefficient": 0.04}}
    assert resolve_config(both)["train"]["reference_policy"] == pin
