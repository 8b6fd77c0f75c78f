"""Sharding of the trainer `fsdp2`: parameters, gradients and moments cut over data-parallel ranks.

With `train.replicas` the ranks form several groups with a whole model each. A group sums gradients
after every micro-batch, so no rank keeps a whole gradient or waits for a slower network. The groups
sum theirs once a step. One rank without `train.offload` keeps the model as it is, since sharding
over one rank is the identity.

Source: ZeRO-3, arXiv 1910.02054, section 5 (sharded parameters, gradients and optimizer); PyTorch
FSDP, arXiv 2304.11277, section 3.2.2 (hybrid sharding).
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from planish.base.errors import ConfigError
from planish.base.parallel import Grid, data_mesh, neighbours
from planish.models.critic import Critic
from planish.models.experts import num_experts
from planish.models.logprobs import TokenScorer, ValueScorer
from planish.models.lora import plain_name
from planish.models.packing import Context, pack_attention
from planish.models.policy import head_dtype
from planish.models.routing import replay_in
from planish.stages.train.config import TrainConfig
from planish.stages.train.sharded_model import Micro

logger = logging.getLogger(__name__)


class Fsdp2Sharding:
    """A model of transformers under torch's `fully_shard`; meets `Sharding`."""

    framework = "fsdp2"

    def __init__(
        self, model: Any, *, config: TrainConfig, grid: Grid, device: torch.device, is_frozen: bool
    ) -> None:
        """Shard a causal LM of transformers, or a critic.

        Raises:
            ConfigError: `train.context_parallel` is above 1, and the model can not pack rows.
        """
        self.config, self.grid, self.device = config, grid, device
        is_critic = isinstance(model, Critic)
        body = model.body if is_critic else getattr(model, model.base_model_prefix)
        self.routing = replay_in(body, forces=config.replay_routing)
        self.packs = config.packing and pack_attention(body)
        self.context: Context | None = None
        if grid.cp > 1:
            if not self.packs:
                raise ConfigError(
                    "`train.context_parallel` must be 1 for a model whose rows can not be packed, "
                    f"as with sliding windows, got {grid.cp} for {body.config.model_type!r}"
                )
            group = neighbours(grid.cp, config.timeout_seconds)
            self.context = Context(group, grid.cp_rank, grid.cp)
        if config.packing and not self.packs:
            logger.info("packing=off model_type=%s", body.config.model_type)
        if config.activation_checkpointing and not is_frozen:
            # transformers recomputes only in training mode. Only the layers enter it, not the
            # modules below them, so dropout stays off.
            body.gradient_checkpointing_enable(
                {"use_reentrant": False, "context_fn": self.routing.again}
            )
            for layer in decoder_layers(body):
                layer.training = True
        if config.compile and self.context is None and not num_experts(body.config.to_dict()):
            for layer in decoder_layers(body):
                # Not the module: hooks that measure and gather are no part of a graph.
                layer.forward = torch.compile(layer.forward, dynamic=True)
        scorer: nn.Module
        scorer = ValueScorer(model) if is_critic else TokenScorer(model, compiles=config.compile)
        self.scorer = scorer
        self.is_sharded = grid.ranks.size > 1 or config.offload
        if self.is_sharded:
            self._shard(body, model.head if is_critic else None)
        home = torch.device("cpu") if config.offload else device

        def move(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return torch.empty_like(tensor, device=home)
            return tensor if self.is_sharded else tensor.to(device)

        # `to_empty` would drop the values of buffers.
        scorer._apply(move)  # type: ignore[no-untyped-call]
        if not is_critic:
            model.tie_weights()
        self.parameters: dict[str, Tensor] = {
            plain_name(name): parameter for name, parameter in model.named_parameters()
        }
        saved = set(model.state_dict())
        self.buffers = {name: x for name, x in model.named_buffers() if name in saved}

    def _shard(self, body: Any, exact: nn.Module | None) -> None:
        """Shard each layer; `exact` stays in float32 under any `compute_dtype`."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        config = self.config
        mesh = data_mesh(self.grid, self.device, config.replicas, config.timeout_seconds)
        options: dict[str, Any] = {"mesh": mesh}
        if self.config.offload:
            is_apart = self.device.type != "cpu"
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=is_apart)
        if exact is not None:
            fully_shard(exact, **options)
        if self.config.compute_dtype == "bfloat16":
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        # The scorer returns a view of its gathered weights; no module below writes into it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        for layer in decoder_layers(body):
            fully_shard(layer, **options)
        scorer = self.scorer
        if isinstance(scorer, TokenScorer) and self.device.type == "cpu":
            dtype = head_dtype(vars(scorer.model.config))
            if dtype == torch.float32:
                # Head and embedding (one matrix if tied) stay in float32; layers cast their inputs.
                options.pop("mp_policy", None)
        fully_shard(scorer, **options)

    def run(
        self,
        micros: Iterable[Micro],
        forward: Callable[[Micro], list[Tensor]],
        take: Callable[[Micro, list[Tensor]], Tensor],
        *,
        learns: bool,
    ) -> None:
        """Compute micro-batches one by one."""
        # Sharded models compute in half precision by themselves.
        half = self.config.compute_dtype == "bfloat16" and not self.is_sharded
        sharded: Any = self.scorer
        for micro, following in itertools.pairwise(itertools.chain(micros, [None])):
            assert micro is not None
            if learns and self.config.replicas > 1:
                sharded.set_requires_all_reduce(following is None)
            recorded = micro.batch.routing_by_column()
            if recorded is not None:
                packing = micro.packing
                recorded = recorded.flatten(0, 1) if packing is None else packing.take(recorded, -1)
            with (
                torch.autocast(self.device.type, torch.bfloat16, enabled=half),
                self.routing.using(recorded),
            ):
                results = forward(micro)
            loss = take(micro, results)
            if learns:
                # FSDP2 averages gradients over ranks, but the parts of the loss must add up.
                torch.autograd.backward(loss * self.grid.ranks.size)
        if not learns and self.is_sharded:
            # Without a backward pass the outermost module keeps the weights that it gathered, and
            # would use them even after a load has filled the shards.
            sharded.reshard()

    def clip(self, limit: float) -> float:
        """Clip the norm of the gradient to `limit` and return the norm before."""
        trained = [p for p in self.parameters.values() if p.requires_grad]
        clipped: Any = torch.nn.utils.clip_grad_norm_(trained, limit)
        return float(clipped.full_tensor() if hasattr(clipped, "full_tensor") else clipped)

    def stored(self, values: Mapping[str, Tensor], suffix: str = "") -> dict[str, Any]:
        """Return values by name + `suffix`; each shard knows its own place in the whole."""
        return {f"{name}{suffix}": value for name, value in values.items()}


def decoder_layers(body: Any) -> list[Any]:
    """Return the layers of a decoder of transformers; empty if it has no `layers`."""
    return list(getattr(body, "layers", []))
