"""What a trainer is: the model, its optimizer and the ranks behind four verbs.

A trainer knows no algorithm: it is handed a mini-batch with masks and advantages and a loss to
call, and gives metrics back.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from planish.algorithms.base import LossFn, TrainBatch
from planish.errors import ConfigError
from planish.parallel import Ranks
from planish.train.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TRAINERS: dict[str, str] = {"fsdp2": "planish.train.fsdp2:Fsdp2Trainer"}
"""Name to `module:Class`, imported on use: trainers can not all live in one environment."""


class Trainer(Protocol):
    """A policy in training; every rank calls every method with the same arguments."""

    def load(self, pin: str) -> None:
        """Replace weights, optimizer and random states by those of a saved train state.

        Raises:
            LayoutMismatch: saved with another model; nothing has been changed.
        """

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """Return the log-probabilities of the tokens in `policy_mask`, [B, S] float32 on CPU."""

    def values(self, batch: TrainBatch) -> Tensor:
        """Return the critic's values, [B, S] float32 on CPU.

        Raises:
            NotImplementedError: this trainer has no critic.
        """

    def step(
        self, minibatch: TrainBatch, loss_fn: LossFn, *, learning_rate: float
    ) -> dict[str, float]:
        """Make one optimizer step.

        Returns:
            The metrics of the loss, `loss`, `grad_norm` before clipping, and `skipped`: 1 where
            the gradient was not finite and no step was made.
        """

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the parts of the train state that are tensors: this rank's shards."""

    def close(self) -> None:
        """Free what the trainer holds."""


def open_trainer(
    config: TrainConfig,
    policy_pin: str,
    *,
    temperature: float,
    seed: int,
    ranks: Ranks,
    device: torch.device,
) -> Trainer:
    """Build the trainer that `config.trainer` names, with the weights of a policy.

    Args:
        config: of the train stage.
        policy_pin: pinned URI of the policy to start from.
        temperature: at which the rollouts were sampled.
        seed: of the random streams of a fresh start.
        ranks: this process among the training processes.
        device: of this rank.

    Raises:
        ConfigError: no such trainer.
    """
    if config.trainer not in TRAINERS:
        raise ConfigError(
            f"`train.trainer` must be one of {sorted(TRAINERS)}, got {config.trainer!r}"
        )
    module, _, name = TRAINERS[config.trainer].partition(":")
    build: Any = getattr(importlib.import_module(module), name)
    trainer: Trainer = build(
        config, policy_pin, temperature=temperature, seed=seed, ranks=ranks, device=device
    )
    return trainer
