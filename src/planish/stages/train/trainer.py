"""Policy and critic in training: their origin, their scores and their parts of the train state.

Both are a `ShardedModel`, and a `Sharding` places them on the ranks. A trainer knows no algorithm:
it gets a mini-batch with masks and advantages, and a loss to call, and returns metrics.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.algorithms.base import LossFn, TrainBatch, ValueLossFn
from planish.base.errors import ConfigError
from planish.base.parallel import Grid, Share, package_fault
from planish.checkpoint import train_state as checkpoint
from planish.checkpoint.train_state import HeldState
from planish.models.adapters import KEY, Adapters, check_same, is_adapter
from planish.models.critic import (
    Critic,
    blank_critic,
    critic_from_policy,
    describe_critic,
    open_critic_model,
    random_critic,
)
from planish.models.lora import add_adapters
from planish.models.policy import FolderBoxes, Policy, frame_policy
from planish.stages.train.batching import Still
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.sharded_model import Micro, ShardedModel, Sharding, Tally

logger = logging.getLogger(__name__)

TRAINERS: dict[str, str] = {
    "fsdp2": "planish.stages.train.fsdp2:Fsdp2Sharding",
    "megatron": "planish.stages.train.megatron.sharding:MegatronSharding",
}
"""Name to the `module:Class` of its sharding, imported on use: not every image has all packages."""

STILL_ROWS = 8
"""Most rows without a gradient that a step scores for its metrics. None of their tokens is clipped,
so shares of clipped tokens are exact. With more such rows, divergence and entropy of a step are
estimates with a standard error. If half of a mini-batch of 64 are such rows, a step of the smallest
model takes 1.11x as long with eight of them scored, and 1.37x with all.
"""


class Trainer:
    """Trains a causal language model of transformers; all ranks call every method alike.

    Each rank passes the rows of its data-parallel group, which may be none of a batch.
    `values` and `value_step` need a critic.
    """

    def __init__(
        self,
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
    ) -> None:
        """Open the policy in float32, build its critic, shard both and build their optimizers.

        Every rank reads its own part of the weights.

        Args:
            config: settings of the train stage.
            policy_pin: pinned URI of the policy to start from.
            temperature: sampling temperature of the rollouts.
            seed: seed of the random streams of a fresh start.
            grid: grid of the training processes, with the place of this one.
            device: device of this rank.
            critic: settings of the critic; None for algorithms without one.
            critic_shape: shape of the critic in the train state that the caller loads next; the
                trainer then builds its frame without the model that `critic` names. Empty or None
                builds by `critic`.
            adapters: adapters to train in place of the weights of both models; None trains these.
            sets_weights: False skips the weights of the policy; the caller loads a state next.

        Raises:
            ConfigError: the trainer is unknown or not installed, the critic can not be built, or
                the adapters match no layer.
        """
        shard = _sharding(config.trainer)
        self.config = config
        self.adapters = adapters
        self.grid = grid
        self.device = device
        self.temperature = temperature
        self.critic_config = critic
        set_up_torch(config, device)
        stream = np.random.SeedSequence([seed, grid.ranks.rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(stream[0]))
        self.framework = shard.framework
        self._shared: dict[str, Any] = {"shard": shard, "config": config, "grid": grid}
        self._shared["device"] = device
        # A new critic may begin as a copy of the policy.
        copies = critic is not None and not critic_shape and critic.init == "policy"
        policy = frame_policy(policy_pin, with_weights=sets_weights or copies)
        model, self.tokenizer = policy.model, policy.tokenizer
        self.critic: ShardedModel | None = None
        self._critic_shape: dict[str, Any] = {}
        if critic is not None:
            boxes: FolderBoxes | None = None
            if critic_shape:
                made = blank_critic(critic_shape)
            else:
                made, boxes = build_critic(critic, policy, seed)
            # sharding gives the classes of modules other names
            self._critic_shape = describe_critic(made)
            if adapters is not None:
                add_adapters(made, adapters, seed=(seed, 1))
                made.head.requires_grad_(True)
            self.critic = ShardedModel(made, **self._shared, boxes=boxes)
            if critic.init == "state" and not critic_shape:
                self._take_critic(critic.path)
        if adapters is not None:
            add_adapters(model, adapters, seed=(seed, 0))
        boxes = _boxes_of(policy) if sets_weights else None
        self.policy = ShardedModel(model, **self._shared, boxes=boxes)

    def _take_critic(self, pin: str) -> None:
        """Load the critic of another run's train state; adapters that it lacks start anew."""
        assert self.critic is not None
        weights, info = self.critic.weights(), checkpoint.read_state_info(pin)
        if KEY in info:
            check_same(info, self.adapters, pin=pin)
        else:
            weights = {name: t for name, t in weights.items() if not is_adapter(name)}
        parts, ranks = {"critic": weights}, self.grid.ranks
        checkpoint.load(pin, parts, framework=self.framework, ranks=ranks, strict=False)

    def load(self, pin: str) -> None:
        """Replace weights and optimizer moments by those of a train state.

        Random states are restored only if the state has the grid and the device type of this
        trainer.

        Raises:
            LayoutMismatch: the state is of another model, or lacks the critic; nothing changes.
            ConfigError: the state is of other adapters.
        """
        info = checkpoint.read_state_info(pin)
        check_same(info, self.adapters, pin=pin)
        state, framework = self.state()
        if (info.get("grid"), info["device"]) != (self.grid.to_json(), self.device.type):
            # Random streams of another grid do not fit these ranks; those of this start stay.
            del state["random"]
        critic = self.critic_config
        if critic is not None and "critic" not in checkpoint.parts(pin):
            critic.check_new(pin)
            logger.info("new critic init=%s path=%s", critic.init, critic.path)
            del state["critic"], state["critic_optimizer"]
        checkpoint.load(pin, state, framework=framework, ranks=self.grid.ranks)
        self.set_random(state.get("random", {}))

    def set_random(self, streams: Mapping[str, Tensor]) -> None:
        """Set the random streams to those that `state` has returned."""
        for name, stream in streams.items():
            if name.startswith("torch."):
                torch.set_rng_state(stream)
            else:
                torch.cuda.set_rng_state(stream, self.device)

    def logprobs(self, batch: TrainBatch) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return log-probabilities and entropies of the tokens in `policy_mask`, and metrics.

        Returns:
            Two tensors [B, S] float32 on CPU, 0 outside the mask. If choices of experts are
            recorded, the metric `routing_disagreement` is the share that the routers do not make.
        """
        routing = self.policy.sharding.routing
        routing.counts.zero_()
        results = self.policy.compute(batch, batch.policy_mask, self._score, num_results=2)
        # Ranks that share matrices may count a token several times; the ratio stays the same.
        others, known = self.grid.ranks.sum(routing.counts.to(self.device)).tolist()
        metrics = {"routing_disagreement": others / known} if known else {}
        return results[0], results[1], metrics

    def reference_logprobs(self, batch: TrainBatch, pin: str) -> Tensor:
        """Return log-probabilities of the tokens in `policy_mask` under another policy.

        That policy is in memory during the call only.

        Args:
            batch: as for `logprobs`.
            pin: pinned URI of the policy.

        Returns:
            [B, S] float32 on CPU, 0 outside the mask.

        Raises:
            ConfigError: its vocabulary differs from that of the policy in training.
        """
        policy = frame_policy(pin, with_weights=True)
        theirs, ours = (x.backend.get_vocab() for x in (policy.tokenizer, self.tokenizer))
        if theirs != ours:
            raise ConfigError(
                "the reference policy must have the tokens of the policy in training "
                f"({len(ours)}), got {len(theirs)}, {len(theirs.items() - ours.items())} of them "
                f"others, in {pin!r}; pin a policy of the same tokenizer by "
                "`train.reference_policy`"
            )
        boxes = _boxes_of(policy)
        reference = ShardedModel(policy.model, **self._shared, is_frozen=True, boxes=boxes)

        def score(micro: Micro) -> tuple[Tensor]:
            ids, select = micro.batch.input_ids, micro.select
            return (reference.scorer(ids, micro.packing, select, self.temperature, False)[0],)

        # The reference has its own router: forced choices would make another policy of it.
        scored = reference.compute(batch.without_routing(), batch.policy_mask, score)[0]
        reference.close()
        # Sharded modules refer to each other in circles; the first step needs their memory.
        gc.collect()
        return scored

    def values(self, batch: TrainBatch) -> Tensor:
        """Return the critic's values of the tokens in `value_mask`, [B, S] float32 on CPU."""
        assert self.critic is not None
        # The critic's router chooses by itself: no engine has recorded any choice of it.
        return self.critic.compute(batch.without_routing(), batch.value_mask, self._value)[0]

    def step(
        self,
        minibatch: TrainBatch,
        loss_fn: LossFn,
        *,
        learning_rate: float,
        still: Still | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step of the policy on `policy_mask` and `positive_mask`.

        Args:
            minibatch: rows to train on.
            loss_fn: returns the loss of a micro-batch and its metrics.
            learning_rate: learning rate of this step.
            still: rows in which the loss has no gradient. They count in the metrics only, under
                the policy before the step; if a few stand for all, their metrics are scaled up.
                None is no row.

        Returns:
            The metrics of the loss, `loss`, `grad_norm` before clipping, and `skipped`: 1 if the
            gradient was not finite and the optimizer made no step. If a few rows stand for all,
            `approx_kl_error` and `entropy_error` are the standard errors of these two metrics.
        """
        tally = Tally()
        errors = self._measure(still, loss_fn, tally) if still is not None else {}
        # Prompts and earlier windows are context: their tokens never meet the LM head.
        mask = minibatch.policy_mask | minibatch.positive_mask
        metrics = self.policy.step(
            minibatch, mask, self._score, loss_fn, learning_rate=learning_rate, tally=tally
        )
        return metrics | errors

    def _measure(self, still: Still, loss_fn: LossFn, tally: Tally) -> dict[str, float]:
        """Add the metrics of rows without a gradient to a tally; a few rows may stand for all.

        Returns:
            Standard errors of `approx_kl` and `entropy` over the tokens of the step; empty if all
            rows were scored.

        Source: W. G. Cochran, Sampling Techniques, 1977, equation 6.8 (error of a ratio estimate).
        """
        some = still.batch
        scores = self.policy.compute(some, some.policy_mask, self._score, num_results=2)
        totals: dict[str, list[float]] = {"approx_kl": [], "entropy": []}
        for row in range(len(some)):
            logprobs, entropy = scores[:, row : row + 1]
            told = loss_fn(logprobs, entropy, some.take(torch.tensor([row])))
            tally.add(told.scaled(still.num_tokens / still.num_few_tokens, self.device))
            for name, values in totals.items():
                values.append(float(told.means[name][0]))
        if still.num_few == still.num_rows:
            return {}
        left = still.num_rows - still.num_few
        factor = still.num_rows * left / (still.num_few * (still.num_few - 1))
        share, errors = Share(grid=self.grid, device=self.device), {}
        for name, values in totals.items():
            total = torch.tensor(values, dtype=torch.float64)
            usual = share.sum(total.sum()) / still.num_few_tokens * some.policy_mask.sum(1)
            spread = share.sum((total - usual).square().sum())
            errors[f"{name}_error"] = float((factor * spread).sqrt()) / still.num_step_tokens
        return errors

    def value_step(
        self, minibatch: TrainBatch, loss_fn: ValueLossFn, *, learning_rate: float
    ) -> dict[str, float]:
        """Make one optimizer step of the critic on `value_mask`; returns as `step`."""
        assert self.critic is not None
        mask, batch = minibatch.value_mask, minibatch.without_routing()
        return self.critic.step(batch, mask, self._value, loss_fn, learning_rate=learning_rate)

    def _score(self, micro: Micro) -> tuple[Tensor, Tensor]:
        scored: tuple[Tensor, Tensor] = self.policy.scorer(
            micro.batch.input_ids, micro.packing, micro.select, self.temperature
        )
        return scored

    def _value(self, micro: Micro) -> tuple[Tensor]:
        assert self.critic is not None
        return (self.critic.scorer(micro.batch.input_ids, micro.packing, micro.select),)

    def state(self) -> HeldState:
        """Return this rank's weights, moments by parameter name, and random streams."""
        rank = f"{self.grid.ranks.rank:05d}"
        streams = {f"torch.{rank}": torch.get_rng_state()}
        if self.device.type == "cuda":
            streams[f"cuda.{rank}"] = torch.cuda.get_rng_state(self.device)
        state: dict[str, Mapping[str, Any]] = {
            "model": self.policy.weights(),
            "optimizer": self.policy.moments(),
            "random": streams,
        }
        if self.critic is not None:
            state["critic"] = self.critic.weights()
            state["critic_optimizer"] = self.critic.moments()
        return HeldState(state, self.framework)

    def sizes(self) -> dict[str, float]:
        """Return the numbers of all and of trained parameters; empty without adapters."""
        sizes = {}
        for name, model in (("", self.policy), ("critic_", self.critic)):
            if model is not None and self.adapters is not None:
                for kind, held in (("", model.parameters), ("trained_", model.trained)):
                    sizes[f"num_{kind}{name}parameters"] = float(
                        sum(parameter.numel() for parameter in held.values())
                    )
        return sizes

    def critic_shape(self) -> dict[str, Any]:
        """Return the JSON from which `blank_critic` builds the critic; empty without a critic."""
        return self._critic_shape

    def close(self) -> None:
        """Free models and moments."""
        self.policy.close()
        if self.critic is not None:
            self.critic.close()


def _sharding(name: str) -> type[Sharding]:
    if fault := package_fault("train.trainer", name):
        raise ConfigError(fault)
    module, _, attribute = TRAINERS[name].partition(":")
    # megatron-core warns of each missing package that would make it faster.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        shard: type[Sharding] = getattr(importlib.import_module(module), attribute)
    return shard


def _boxes_of(policy: Policy) -> FolderBoxes:
    assert policy.folder is not None
    return FolderBoxes(policy.folder)


def build_critic(
    config: CriticConfig, policy: Policy, seed: int
) -> tuple[Critic, FolderBoxes | None]:
    """Build the critic that a run starts with; every rank builds the same.

    Args:
        config: settings of the critic; for init `state` the caller loads the weights later.
        policy: result of `frame_policy`.
        seed: seed of the run.

    Returns:
        The critic, and the source of the weights of its backbone; None if they are loaded already,
        random, or loaded later by the caller.

    Raises:
        ConfigError: `critic.path` names no model that can become a critic.
    """
    how: dict[str, Any] = {"seed": seed, "head_std": config.head_std}
    model = policy.model
    if config.init == "model":
        return open_critic_model(config.path, **how, vocab_size=int(model.config.vocab_size))
    if config.init == "random":
        return random_critic(model, **how), None
    boxes = _boxes_of(policy) if config.init == "policy" else None
    if boxes is not None:
        boxes.body = ("body.", f"{model.base_model_prefix}.")
    return critic_from_policy(model, **how), boxes


def set_up_torch(config: TrainConfig, device: torch.device) -> None:
    """Set the process-wide switches: threads, compiler and deterministic kernels."""
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads)
    if config.compile:
        from torch._functorch import config as graphs
        from torch._inductor import config as kernels

        # Steps between matrix products are computed again in place of keeping their results.
        graphs.ban_recompute_materialized_backward = False
        # An import of vLLM leaves one thread to all compilers of a process.
        kernels.compile_threads = len(os.sched_getaffinity(0))
    if config.deterministic:
        # With `warn_only` attention stays nondeterministic on CUDA; cuBLAS needs this variable.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory would cost time, and every kernel here writes all of its output.
        switches: Any = torch.utils.deterministic
        switches.fill_uninitialized_memory = False
