"""Critics for the studies: untrained, from a reward model, pretrained, and trained jointly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planish.algorithms import build_algorithm
from planish.algorithms.base import Denominators, LossOutput, TrainBatch, ValueLossFn
from planish.algorithms.masked import last_column
from planish.base.parallel import Grid
from planish.stages.train.batching import split_minibatches
from planish.stages.train.config import CriticConfig
from planish.stages.train.progress import Progress
from planish.stages.train.trainer import open_trainer
from planish.stages.train.update import run_update
from tests.benchmarks.studies.value_lab import Lab, values_folder

Weights = dict[str, Tensor]

CRITIC_RATE = 6e-4
"""Twice the policy's, as published (VAPO, section 5.1)."""


COUNTS = (0, 1, 2, 4, 8, 16)
"""Rollout batches of value pretraining after which a critic is kept."""


class Critics:
    """A trainer of one lab's policy and critic; weights of critics go in and out by copy."""

    def __init__(self, lab: Lab, *, pretrain_iterations: int = 0) -> None:
        self.lab = lab
        self.config = lab.train
        self.critic = CriticConfig(
            learning_rate=CRITIC_RATE, warmup_iterations=0, pretrain_iterations=pretrain_iterations
        )
        self.algorithm: Any = build_algorithm(lab.tables["algorithm"])
        self.trainer: Any = open_trainer(
            self.config,
            lab.pin,
            temperature=1.0,
            seed=lab.seed,
            grid=Grid(),
            device=torch.device("cpu"),
            critic=self.critic,
        )
        self.progress = Progress()

    def weights(self) -> Weights:
        """Return a copy of the critic's weights."""
        return {name: x.detach().clone() for name, x in self.trainer.critic.weights().items()}

    def use(self, weights: Weights) -> None:
        """Put weights into the critic."""
        with torch.no_grad():
            for name, tensor in self.trainer.critic.weights().items():
                tensor.copy_(weights[name])

    def values(self, batch: TrainBatch) -> Tensor:
        """Return the value before each response token, [B, S]."""
        values: Tensor = self.trainer.values(batch)
        return values

    def train(self, batch: TrainBatch, number: int) -> dict[str, float]:
        """Train on one rollout batch as a run does: the critic, and the policy once it is due."""
        found = run_update(
            self.trainer,
            self.algorithm,
            batch,
            config=self.config,
            progress=self.progress,
            seed=[self.lab.seed, number],
            critic=self.critic,
        )
        self.progress = found.progress
        return found.scalars

    def train_as_reward_model(self, batch: TrainBatch, number: int) -> None:
        """Train on the reward at the last token alone: a scorer of whole responses."""
        last = torch.zeros_like(batch.value_mask)
        last.scatter_(1, last_column(batch.value_mask).unsqueeze(1), True)
        batch = self.algorithm.advantages(batch).updated(value_mask=last)
        size = self.config.rollouts_per_minibatch
        parts = split_minibatches(len(batch), size, 1, seed=[self.lab.seed, number])
        whole = self.algorithm.value_counts(batch)
        for rows in parts:
            part = batch.take(torch.from_numpy(rows))
            counts = Denominators(self.algorithm.value_counts(part), whole, len(parts))
            self.trainer.value_step(part, self._loss(counts), learning_rate=CRITIC_RATE)

    def _loss(self, counts: Denominators) -> ValueLossFn:
        def loss(values: Tensor, batch: TrainBatch) -> LossOutput:
            output: LossOutput = self.algorithm.value_loss(values, batch, counts)
            return output

        return loss

    def close(self) -> None:
        """Let go of the trainer."""
        self.trainer.close()


def pretrained(lab: Lab) -> dict[int, Weights]:
    """Pretrain a critic on rollouts of the frozen policy; returns its weights after `COUNTS`.

    The weights are kept beside the runs: two studies examine the same critics.
    """
    path = values_folder() / f"critics-seed{lab.seed}.pt"
    asked = {"pin": lab.pin, "tables": lab.tables, "rate": CRITIC_RATE, "counts": COUNTS}
    if path.exists():
        kept = torch.load(path, weights_only=True)
        if kept["asked"] == asked:
            found: dict[int, Weights] = kept["weights"]
            return found
    critics = Critics(lab, pretrain_iterations=max(COUNTS))
    found = {0: critics.weights()}
    for number in range(1, max(COUNTS) + 1):
        critics.train(lab.rollout_batch(number), number)
        if number in COUNTS:
            found[number] = critics.weights()
    critics.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"asked": asked, "weights": found}, path)
    return found
