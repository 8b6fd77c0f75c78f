"""What a trainer is: policy and critic, their optimizers and the ranks behind a few verbs.

A trainer knows no algorithm: it is handed a mini-batch with masks and advantages and a loss to
call, and gives metrics back.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from planish.algorithms.base import LossFn, TrainBatch, ValueLossFn
from planish.base.errors import ConfigError
from planish.base.parallel import Grid, trainer_fault
from planish.checkpoint.train_state import HeldState
from planish.models.adapters import Adapters
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.model_trainer import ModelTrainer
from planish.stages.train.sharded_model import Sharding

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TRAINERS: dict[str, str] = {
    "fsdp2": "planish.stages.train.fsdp2:Fsdp2Sharding",
    "megatron": "planish.stages.train.megatron.sharding:MegatronSharding",
}
"""Name to the `module:Class` of its sharding, imported on use: not every image has all of them."""


class Trainer(Protocol):
    """A policy in training; every rank calls every method with the same arguments.

    `values` and `value_step` are for trainers that were opened with a critic.
    """

    def load(self, pin: str) -> None:
        """Replace weights, optimizer and random states by those of a saved train state.

        Raises:
            LayoutMismatch: saved with another model, or without the critic that is needed; nothing
                has been changed.
            ConfigError: saved with other adapters.
        """

    def logprobs(self, batch: TrainBatch) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return log-probabilities and entropies of the tokens in `policy_mask`, and metrics.

        Returns:
            Two of [B, S] float32 on CPU, 0 outside the mask. The metric `routing_disagreement` is
            the share of recorded choices that the routers would not make, where some are recorded.
        """

    def reference_logprobs(self, batch: TrainBatch, pin: str) -> Tensor:
        """Return log-probabilities of the tokens in `policy_mask` under another policy.

        That policy is in memory during the call only.

        Args:
            batch: as for `logprobs`.
            pin: pinned URI of the policy.

        Returns:
            [B, S] float32 on CPU, 0 outside the mask.

        Raises:
            ConfigError: its tokens are not those of the policy in training.
        """

    def values(self, batch: TrainBatch) -> Tensor:
        """Return the critic's values of the tokens in `value_mask`, [B, S] float32 on CPU."""

    def step(
        self,
        minibatch: TrainBatch,
        loss_fn: LossFn,
        *,
        learning_rate: float,
        still: TrainBatch | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step of the policy on `policy_mask` and `positive_mask`.

        Args:
            minibatch: rows to train on.
            loss_fn: gives the loss of a micro-batch and its metrics.
            learning_rate: of this step.
            still: rows that the loss has no gradient on, in random order; they count in the metrics
                alone, as the policy before the step has them. A few may stand for many, each
                token for as many. None is no row.

        Returns:
            The metrics of the loss, `loss`, `grad_norm` before clipping, and `skipped`: 1 where
            the gradient was not finite and no step was made. Where a few rows stood for many,
            `approx_kl_error` and `entropy_error` are the standard errors of those two.
        """

    def value_step(
        self, minibatch: TrainBatch, loss_fn: ValueLossFn, *, learning_rate: float
    ) -> dict[str, float]:
        """Make one optimizer step of the critic on `value_mask`; returns as `step`."""

    def state(self) -> HeldState:
        """Return the parts of the train state that are tensors: what of them is on this rank."""

    def critic_shape(self) -> dict[str, Any]:
        """Return as JSON what the critic's frame is built from; empty without one."""

    def sizes(self) -> dict[str, float]:
        """Return counts of all and of trained parameters; empty where all are trained."""

    def close(self) -> None:
        """Free what the trainer holds."""


def open_trainer(
    config: TrainConfig,
    policy_pin: str,
    *,
    temperature: float,
    seed: int,
    grid: Grid,
    device: torch.device,
    critic: CriticConfig | None = None,
    critic_shape: Mapping[str, Any] | None = None,
    adapters: Adapters | None = None,
    sets_weights: bool = True,
) -> Trainer:
    """Build the trainer that `config.trainer` names, with the weights of a policy.

    Args:
        config: of the train stage.
        policy_pin: pinned URI of the policy to start from.
        temperature: at which the rollouts were sampled.
        seed: of the random streams of a fresh start.
        grid: where this process stands among those of the training.
        device: of this rank.
        critic: how to build a critic; None for algorithms without one.
        critic_shape: of the critic in a train state that is loaded next: only its frame is built,
            and what `critic` names is not read again. Empty or None builds by `critic`.
        adapters: what is trained in place of the weights of both models; None trains them.
        sets_weights: False where a train state is loaded next: no weights of the policy are read.

    Raises:
        ConfigError: no such trainer, or not on this machine; no such critic, or no layer for the
            adapters.
    """
    if config.trainer not in TRAINERS:
        raise ConfigError(
            f"`train.trainer` must be one of {sorted(TRAINERS)}, got {config.trainer!r}"
        )
    if fault := trainer_fault(config.trainer):
        raise ConfigError(fault)
    module, _, name = TRAINERS[config.trainer].partition(":")
    # megatron-core speaks of every package that would make it faster.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        shard: type[Sharding] = getattr(importlib.import_module(module), name)
    return ModelTrainer(
        config,
        policy_pin,
        shard=shard,
        temperature=temperature,
        seed=seed,
        grid=grid,
        device=device,
        critic=critic,
        critic_shape=critic_shape,
        adapters=adapters,
        sets_weights=sets_weights,
    )
