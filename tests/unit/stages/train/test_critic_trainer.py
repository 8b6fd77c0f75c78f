"""Policy and critic on a real tiny model in one process."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from planish.algorithms.base import Denominators, LossOutput
from planish.algorithms.vapo import Vapo, VapoConfig
from planish.base.errors import LayoutMismatch
from planish.base.parallel import Grid
from planish.checkpoint import train_state as checkpoint
from planish.models.critic import critic_from_policy
from planish.models.logprobs import ValueScorer
from planish.records import layout
from planish.stages.train.batching import selected_lengths, train_batch
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.progress import Progress
from planish.stages.train.trainer import open_trainer
from planish.stages.train.update import run_update
from tests.unit.models.test_critic import reward_model
from tests.unit.stages.train.runs import TINY, TINY_CRITIC, random_rollouts, rewards_for, start_run

SMALL = {"lambda_alpha": 0.5, "lambda_min": 0.5}
ALGORITHM = Vapo(VapoConfig(**SMALL))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return start_run(f"file://{tmp_path_factory.mktemp('run')}/root")


@pytest.fixture(scope="module")
def raw_batch(tiny):
    rollouts = random_rollouts(tiny.policy, 5)
    return train_batch(rollouts, rewards_for(rollouts, 6))


@pytest.fixture(scope="module")
def batch(raw_batch):
    values = torch.linspace(-1, 1, raw_batch.values.shape[1]) * raw_batch.value_mask
    return ALGORITHM.advantages(
        raw_batch.updated(old_logprobs=raw_batch.rollout_logprobs - 0.05, values=values)
    )


def trainer_of(tiny, critic=None, **changes):
    return open_trainer(
        TrainConfig(**{**TINY, **changes}), tiny.policy_pin, temperature=1.0, seed=3,
        grid=Grid(), device=CPU, critic=CriticConfig(**{**TINY_CRITIC, **(critic or {})}),
    )  # fmt: skip


def value_step(trainer, batch, loss=ALGORITHM.value_loss):
    counts = ALGORITHM.value_counts(batch)
    denominators = Denominators(counts, counts, 1)

    def loss_fn(values, micro):
        return loss(values, micro, denominators)

    return trainer.value_step(batch, loss_fn, learning_rate=1e-3)


def policy_step(trainer, batch):
    counts = ALGORITHM.counts(batch)
    denominators = Denominators(counts, counts, 1)

    def loss_fn(logprobs, entropy, micro):
        return ALGORITHM.loss(logprobs, entropy, micro, denominators)

    return trainer.step(batch, loss_fn, learning_rate=5e-4)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters.values()])


def rows_and_tokens(model):
    """Count what the backbone and the head of a model in training compute."""
    inner = model.scorer.critic if hasattr(model.scorer, "critic") else model.scorer.model
    body = inner.body if hasattr(inner, "body") else inner.model
    seen = {"tokens": 0, "scored": 0}

    def count_body(_, args):
        seen["tokens"] += args[0].numel()

    def count_head(_, args):
        seen["scored"] += args[0].shape[0]

    body.embed_tokens.register_forward_pre_hook(count_body)
    if hasattr(inner, "lm_head"):
        inner.lm_head.register_forward_pre_hook(count_head)
    return seen


def test_values_equal_those_of_a_plain_forward_pass(tiny, raw_batch):
    trainer = trainer_of(tiny, tokens_per_microbatch=64)
    scorer = ValueScorer(critic_from_policy(tiny.policy.model, seed=3, head_std=0.3))
    with torch.no_grad():
        wanted = scorer(raw_batch.input_ids, None, raw_batch.value_mask)
    seen = trainer.values(raw_batch)
    assert seen.dtype == torch.float32
    assert (seen[raw_batch.value_mask] - wanted).abs().max() < 1e-5
    assert (seen[~raw_batch.value_mask] == 0).all()
    assert wanted.std() > 0.1


@pytest.mark.parametrize("budget", [1, 60, 10**6])
def test_i1_the_token_budget_changes_neither_value_loss_nor_gradient(tiny, batch, budget):
    whole, split = (trainer_of(tiny, tokens_per_microbatch=n) for n in (10**7, budget))
    wanted, seen = value_step(whole, batch), value_step(split, batch)
    assert seen.keys() == wanted.keys()
    for name, value in wanted.items():
        assert seen[name] == pytest.approx(value, abs=1e-6, rel=1e-5), name
    ours, theirs = (t.state().parts["critic_optimizer"] for t in (split, whole))
    for name in (n for n in ours if n.endswith(".exp_avg")):
        assert (ours[name] - theirs[name]).abs().max() < 1e-6, name


def test_a_critic_step_changes_the_critic_alone_and_a_policy_step_the_policy_alone(tiny, batch):
    trainer = trainer_of(tiny)
    policy, critic = flat(trainer.policy), flat(trainer.critic)
    value_step(trainer, batch)
    assert torch.equal(flat(trainer.policy), policy)
    after = flat(trainer.critic)
    assert not torch.equal(after, critic)
    policy_step(trainer, batch)
    assert torch.equal(flat(trainer.critic), after)
    assert not torch.equal(flat(trainer.policy), policy)


def test_the_value_loss_falls_step_by_step(tiny, batch):
    trainer = trainer_of(tiny)
    losses = [value_step(trainer, batch)["loss"] for _ in range(6)]
    assert all(b < a for a, b in itertools.pairwise(losses))


def test_rows_without_a_target_are_not_computed(tiny, batch):
    finished = torch.arange(len(batch)) % 3 == 0
    some = batch.updated(value_mask=batch.value_mask & finished[:, None])
    trainer, alone = trainer_of(tiny), trainer_of(tiny)
    seen = rows_and_tokens(trainer.critic)
    mine = value_step(trainer, some)
    assert seen["tokens"] == int(selected_lengths(some.value_mask)[finished].sum() - finished.sum())
    theirs = value_step(alone, batch.take(finished.nonzero().flatten()))
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert (flat(trainer.critic) - flat(alone.critic)).abs().max() < 1e-6


def test_prefix_tokens_never_meet_the_lm_head_and_rows_without_a_token_no_layer(tiny, batch):
    window = batch.policy_mask.clone()
    for row in range(len(batch)):
        window[row, batch.policy_mask[row].nonzero().flatten()[:-2]] = False
    window[:4] = False
    positive = torch.zeros_like(window)
    positive[0] = batch.policy_mask[0]
    trainer = trainer_of(tiny)
    seen = rows_and_tokens(trainer.policy)
    policy_step(trainer, batch.updated(policy_mask=window, positive_mask=positive))
    lengths = selected_lengths(window | positive)
    assert seen["tokens"] == int(lengths.sum() - (lengths > 0).sum())
    assert (lengths > 0).sum() == len(batch) - 3
    assert seen["scored"] == int((window | positive).sum())


def test_columns_behind_the_last_selected_token_are_not_computed(tiny, batch):
    early = batch.policy_mask & (torch.arange(batch.policy_mask.shape[1]) < 10)
    trainer = trainer_of(tiny)
    seen = rows_and_tokens(trainer.policy)
    found = trainer.logprobs(batch.updated(policy_mask=early))[0]
    lengths = selected_lengths(early)
    assert lengths.max() == 10
    assert seen["tokens"] == int(lengths.sum() - len(batch))
    whole = trainer.logprobs(batch)[0]
    assert (found - whole * early).abs().max() < 1e-6


def test_a_critic_gradient_that_is_not_finite_leaves_the_critic_alone(tiny, batch):
    trainer = trainer_of(tiny)
    value_step(trainer, batch)
    before = {k: v.clone() for part in trainer.state().parts.values() for k, v in part.items()}

    def broken(values, micro, denominators):
        return LossOutput((values * float("inf")).sum())

    metrics = value_step(trainer, batch, broken)
    assert metrics["skipped"] == 1.0
    assert not math.isfinite(metrics["grad_norm"])
    after = {k: v for part in trainer.state().parts.values() for k, v in part.items()}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_recomputing_layers_gives_the_critic_the_same_gradients(tiny, batch):
    plain, thrifty = trainer_of(tiny), trainer_of(tiny, activation_checkpointing=True)
    assert value_step(thrifty, batch) == value_step(plain, batch)
    assert torch.equal(flat(plain.critic), flat(thrifty.critic))


def test_half_precision_compute_keeps_the_critic_in_float32_and_stays_close(tiny, batch):
    full, half = trainer_of(tiny), trainer_of(tiny, compute_dtype="bfloat16")
    wanted, seen = value_step(full, batch), value_step(half, batch)
    assert seen["loss"] == pytest.approx(wanted["loss"], rel=2e-2)
    assert seen["loss"] != wanted["loss"]
    assert all(p.dtype == torch.float32 for p in half.critic.parameters.values())


def save(trainer, uri):
    extra = {"grid": Grid().to_json(), "device": "cpu"}
    return checkpoint.save(
        uri, {**trainer.state().parts, "extra": extra}, parents={}, attributes={}
    ).pin()


def test_a_state_with_its_critic_loads_back_and_goes_on_alike(tiny, batch, file_root):
    trainer = trainer_of(tiny)
    value_step(trainer, batch)
    pin = save(trainer, layout.state(file_root, 1))
    assert checkpoint.parts(pin) == {"model", "optimizer", "critic", "critic_optimizer", "random"}
    again = trainer_of(tiny, critic={"init": "random"})
    assert not torch.equal(flat(again.critic), flat(trainer.critic))
    again.load(pin)
    assert torch.equal(flat(again.critic), flat(trainer.critic))
    assert value_step(again, batch) == value_step(trainer, batch)
    assert torch.equal(flat(again.critic), flat(trainer.critic))


def test_a_state_without_a_critic_is_refused_unless_the_configuration_names_one(
    tiny, batch, file_root, tmp_path
):
    bare = open_trainer(
        TrainConfig(**TINY), tiny.policy_pin, temperature=1.0, seed=3, grid=Grid(), device=CPU
    )
    pin = save(bare, layout.state(file_root, 1))
    assert checkpoint.parts(pin) == {"model", "optimizer", "random"}
    for init in ("policy", "random"):
        trainer = trainer_of(tiny, critic={"init": init})
        before = flat(trainer.policy)
        with pytest.raises(LayoutMismatch, match=r"must hold a critic.*`critic\.init`"):
            trainer.load(pin)
        assert torch.equal(flat(trainer.policy), before)
    reward_model(tmp_path, vocab_size=tiny.policy.tokenizer.vocab_size)
    named = trainer_of(tiny, critic={"init": "model", "path": str(tmp_path)})
    before = flat(named.critic)
    named.load(pin)
    assert torch.equal(flat(named.critic), before)


def test_a_run_can_begin_with_the_critic_of_another_state(tiny, batch, file_root):
    other = trainer_of(tiny)
    value_step(other, batch)
    pin = save(other, layout.state(file_root, 1))
    trainer = trainer_of(tiny, critic={"init": "state", "path": pin})
    assert torch.equal(flat(trainer.critic), flat(other.critic))
    assert all(not moment.any() for moment in trainer.state().parts["critic_optimizer"].values())
    bare = open_trainer(
        TrainConfig(**TINY), tiny.policy_pin, temperature=1.0, seed=3, grid=Grid(), device=CPU
    )
    without = save(bare, layout.state(file_root, 2))
    with pytest.raises(LayoutMismatch, match=r"lacks `critic: model\.body\.embed_tokens\.weight`"):
        trainer_of(tiny, critic={"init": "state", "path": without})


def update(trainer, algorithm, batch, progress, iteration=1, **critic):
    return run_update(
        trainer, algorithm, batch, config=trainer.policy.config, progress=progress,
        seed=(7, iteration), critic=CriticConfig(**{**TINY_CRITIC, **critic}),
    )  # fmt: skip


def telling_batch(policy, seed):
    """Rollouts whose first prompt token tells their reward: one kind of prompt is solved."""
    rollouts = random_rollouts(policy, seed, num_groups=8)
    batch = train_batch(rollouts, rewards_for(rollouts, seed))
    solved = batch.group_index % 2 == 0
    ids = batch.input_ids.clone()
    ids[:, 0] = torch.where(solved, 4, 5)
    return batch.updated(input_ids=ids, reward=torch.where(solved, 1.0, -1.0))


@pytest.mark.slow
def test_value_pretraining_raises_the_explained_variance_of_fresh_rollouts(tiny):
    trainer = trainer_of(tiny)
    policy = flat(trainer.policy)
    progress, explained, pretraining = Progress(), [], []
    for iteration in range(1, 31):
        result = update(
            trainer, ALGORITHM, telling_batch(tiny.policy, iteration), progress, iteration,
            pretrain_iterations=40, pretrain_explained_variance=0.5, pretrain_patience=2,
        )  # fmt: skip
        progress = result.progress
        explained.append(result.scalars["explained_variance"])
        pretraining.append(result.scalars["pretraining"])
        if progress.pretrain_done:
            break
        assert torch.equal(flat(trainer.policy), policy)
    # Every batch is new to the critic when it is judged.
    print("explained variance", np.round(explained, 3).tolist())
    assert explained[0] < 0.1
    assert min(explained[-2:]) >= 0.5
    assert pretraining == [1.0] * (len(pretraining) - 1) + [0.0]
    assert progress.pretrain_iterations == len(pretraining) - 1
    assert progress.iterations == 1
    assert not torch.equal(flat(trainer.policy), policy)
