"""Adapters in the trainer: the training of a subspace, kept in the state, merged in the export."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from planish.base.parallel import Grid
from planish.models.adapters import Adapters
from planish.models.logprobs import TokenScorer
from planish.models.policy import load_policy
from planish.stages.train.batching import scatter_tokens, train_batch
from planish.stages.train.config import TrainConfig
from planish.stages.train.trainer import open_trainer
from tests.unit.stages.train.runs import TINY, random_rollouts, rewards_for, start_run
from tests.unit.stages.train.test_fsdp2 import ALGORITHM, CPU, loss_over

ADAPTERS = Adapters(4, 16.0, ())
STEPS, RATE = 6, 5e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return start_run(f"file://{tmp_path_factory.mktemp('run')}/root")


@pytest.fixture(scope="module")
def batch(tiny):
    rollouts = random_rollouts(tiny.policy, 5)
    batch = train_batch(rollouts, rewards_for(rollouts, 6))
    return ALGORITHM.advantages(batch.updated(old_logprobs=batch.rollout_logprobs))


def trainer_of(tiny, adapters=ADAPTERS, *, critic=None, **changes):
    return open_trainer(
        TrainConfig(**{**TINY, **changes}), tiny.policy_pin,
        temperature=1.0, seed=3, grid=Grid(), device=CPU, critic=critic, adapters=adapters,
    )  # fmt: skip


def train(trainer, batch, steps=STEPS):
    return [trainer.step(batch, loss_over(batch), learning_rate=RATE) for _ in range(steps)]


def losses_in_the_subspace(tiny, batch, trainer, steps):
    """Train W0 + s B A by plain torch: dense weights are composed, B and A are what AdamW has."""
    model = load_policy(tiny.policy_pin, dtype=torch.float32).model
    scorer = TokenScorer(model)
    start = {n: t.detach().clone() for n, t in trainer.policy.weights().items()}
    free = {n: t.requires_grad_(True) for n, t in start.items() if ".lora_" in n}
    optimizer = torch.optim.AdamW(free.values(), lr=RATE, weight_decay=0.0)
    metrics = []
    for _ in range(steps):
        weights = {f"model.{n}": t for n, t in start.items() if "lora_" not in n}
        for name in (n.removesuffix(".lora_A.weight") for n in free if ".lora_A." in n):
            change = free[f"{name}.lora_B.weight"] @ free[f"{name}.lora_A.weight"]
            weights[f"model.{name}.weight"] = start[f"{name}.weight"] + 4.0 * change
        mask = batch.policy_mask
        scored = functional_call(scorer, weights, (batch.input_ids, None, mask, 1.0))
        output = loss_over(batch)(*(scatter_tokens(mask, part) for part in scored), batch)
        optimizer.zero_grad()
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(free.values(), 1.0)
        optimizer.step()
        metrics.append((output.loss.item(), norm.item()))
    return metrics


def test_losses_equal_those_of_a_dense_run_in_the_same_subspace(tiny, batch):
    trainer = trainer_of(tiny)
    wanted = losses_in_the_subspace(tiny, batch, trainer, STEPS)
    seen = [(step["loss"], step["grad_norm"]) for step in train(trainer, batch)]
    print(f"losses {[round(loss, 6) for loss, _ in seen]}")
    for ours, theirs in zip(seen, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    # AdamW has really moved: all steps at the first weights would have this loss again.
    assert abs(wanted[-1][0] - wanted[0][0]) > 1e-2
