"""The Megatron-core trainer's part: a model cut over tensor-parallel ranks, one copy a data rank.

What is trained, and how a step is made, is the same for all trainers; here are the parameters and
what ranks do together. Optimizer moments lie where their parameters do.

Source: Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from planish.base.parallel import Grid
from planish.models.critic import Critic
from planish.models.logprobs import TokenScorer, ValueScorer
from planish.stages.train.config import TrainConfig
from planish.stages.train.megatron.boxes import Boxes, fill_pieces
from planish.stages.train.megatron.model import (
    Decoder,
    LanguageModel,
    Vocabulary,
    build_gpt,
    head_size,
    join_grid,
    without_accelerator,
)


class MegatronSharding:
    """A GPTModel of megatron-core; meets `Sharding`."""

    framework = "flat"

    def __init__(
        self, model: Any, *, config: TrainConfig, grid: Grid, device: torch.device, is_frozen: bool
    ) -> None:
        """Take over the weights of a causal LM of transformers, or of a critic.

        Raises:
            ConfigError: the library does not compute such a model, or has no place for a weight.
        """
        join_grid(grid, config.timeout_seconds)
        self.config, self.grid, self.device = config, grid, device
        is_critic = isinstance(model, Critic)
        decoder = model.body if is_critic else getattr(model, model.base_model_prefix)
        is_tied = is_critic or bool(decoder.config.tie_word_embeddings)
        gpt = build_gpt(decoder.config, is_tied=is_tied, config=config, grid=grid, device=device)
        self.parameters: dict[str, Tensor] = dict(gpt.named_parameters())
        self.buffers: dict[str, Tensor] = {}
        self.wholes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        sizes = {**decoder.config.to_dict(), "head_dim": head_size(decoder.config)}
        boxes = Boxes(self.wholes, sizes, grid, "body." if is_critic else "model.", is_tied)
        body = Decoder(gpt, decoder.rotary_emb.inv_freq)
        if is_critic:
            self.parameters |= {f"head.{name}": p for name, p in model.head.named_parameters()}
        self.pieces = {
            name: boxes.pieces(name, tuple(tensor.shape))
            for name, tensor in self.parameters.items()
        }
        # Every tensor-parallel rank has these whole.
        self.copies = {
            name
            for name, part in self.pieces.items()
            if all(piece.extent == self.wholes[piece.name] for piece in part)
        }
        # Of these the gradient is that of a part: norms of queries and keys see the heads of one
        # rank, and with sequence parallelism all norms see the tokens of one rank.
        self.partial = {
            name
            for name, tensor in self.parameters.items()
            if name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
            or getattr(tensor, "sequence_parallel", False)
        }
        fill_pieces(self.parameters, self.pieces, dict(model.named_parameters()))
        scorer: nn.Module
        if is_critic:
            scorer = ValueScorer(Critic(body, model.head))
        else:
            part = Vocabulary(decoder.config.vocab_size, grid) if grid.tp > 1 else None
            scorer = TokenScorer(LanguageModel(body, model.config), vocabulary=part)
        if is_frozen:
            scorer.requires_grad_(False)
        elif config.activation_checkpointing:
            # The library's own way wants an accelerator.
            layers = gpt.decoder.layers
            for number, layer in enumerate(layers):
                layers[number] = checkpoint_wrapper(layer)
        self.scorer = scorer.to(device)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Let forward and backward passes run in the type and on the device of the model."""
        half = self.config.compute_dtype == "bfloat16"
        with (
            without_accelerator(self.device),
            torch.autocast(self.device.type, torch.bfloat16, enabled=half),
        ):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch to that of this rank."""
        with self.computing():
            torch.autograd.backward(loss)

    def clip(self, limit: float) -> float:
        """Sum the gradients of all ranks, limit their norm and return what it was."""
        trained = {name: p for name, p in self.parameters.items() if p.grad is not None}
        _sum(
            (p.grad for name, p in trained.items() if name in self.partial),
            parallel_state.get_tensor_model_parallel_group(),
        )
        _sum((p.grad for p in trained.values()), parallel_state.get_data_parallel_group())
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, parameter in trained.items():
            if not self.grid.dp_rank and not (self.grid.tp_rank and name in self.copies):
                assert parameter.grad is not None
                square += parameter.grad.double().square().sum()
        norm = self.grid.ranks.sum(square).sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(trained.values(), limit, norm)
        return float(norm)

    def stored(self, values: Mapping[str, Tensor], suffix: str = "") -> dict[str, Any]:
        """Return values by the names of transformers, as the flat shards of this rank.

        Args:
            values: local parameter to a tensor of its shape, or to one number.
            suffix: of the names.
        """
        found: dict[str, Any] = {}
        for name, value in values.items():
            for piece in self.pieces[name]:
                if value.dim() == 0:
                    found[piece.name + suffix] = value
                    continue
                shard = piece.shard(suffix, self.wholes[piece.name], value)
                found.setdefault(piece.name + suffix, []).append(shard)
        return found


def _sum(gradients: Iterable[Tensor | None], group: Any) -> None:
    """Add up tensors over the ranks of a group, in place."""
    if group.size() == 1:
        return
    pending = [dist.all_reduce(g, group=group, async_op=True) for g in gradients if g is not None]
    for work in pending:
        work.wait()
