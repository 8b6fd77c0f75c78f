"""Sharding of the trainer `megatron`: a model cut over ranks, with one copy per data-parallel rank.

Each rank of a stage has some whole experts; tokens travel to them and back.

`ShardedModel` makes the steps, for all trainers alike; this module has the parameters and the
collectives. Optimizer moments lie where their parameters do.

Source: Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_without_interleaving,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from planish.base.errors import ConfigError
from planish.base.parallel import Grid
from planish.models.critic import Critic
from planish.models.logprobs import TokenScorer, ValueScorer
from planish.stages.train.config import TrainConfig
from planish.stages.train.megatron.boxes import EXPERTS, Boxes, fill_pieces
from planish.stages.train.megatron.model import (
    Decoder,
    LanguageModel,
    Vocabulary,
    build_gpt,
    head_size,
    join_grid,
    replay_in_gpt,
    without_accelerator,
)
from planish.stages.train.sharded_model import Micro


class MegatronSharding:
    """A GPTModel of megatron-core; meets `Sharding`."""

    framework = "flat"

    def __init__(
        self, model: Any, *, config: TrainConfig, grid: Grid, device: torch.device, is_frozen: bool
    ) -> None:
        """Take over the weights of a causal LM of transformers, or of a critic.

        Raises:
            ConfigError: megatron-core does not support the model, or has no place for a weight.
        """
        self.context = join_grid(grid, config.timeout_seconds)
        self.config, self.grid, self.device = config, grid, device
        self.packs = config.packing
        is_critic = isinstance(model, Critic)
        decoder = model.body if is_critic else getattr(model, model.base_model_prefix)
        is_tied = not is_critic and bool(decoder.config.tie_word_embeddings)
        gpt = build_gpt(
            decoder.config, has_head=not is_tied, config=config, grid=grid, device=device
        )
        self.routing = replay_in_gpt(gpt, decoder.config, forces=config.replay_routing)
        self.is_last = grid.pp_rank == grid.pp - 1
        self.is_tied_apart = is_tied and grid.pp > 1
        if is_critic and self.is_last:
            gpt.output_layer = None
        self.body = Decoder(gpt, decoder.rotary_emb.inv_freq)
        self.parameters: dict[str, Tensor] = dict(gpt.named_parameters())
        if is_critic and self.is_last:
            self.parameters |= {f"head.{name}": p for name, p in model.head.named_parameters()}
        self.buffers: dict[str, Tensor] = {}
        self.wholes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        boxes = Boxes(
            self.wholes,
            {**decoder.config.to_dict(), "head_dim": head_size(decoder.config)},
            grid,
            "body." if is_critic else "model.",
            is_tied,
            first_layer=grid.pp_rank * (decoder.config.num_hidden_layers // grid.pp),
        )
        self.pieces = {
            name: boxes.pieces(name, tuple(tensor.shape))
            for name, tensor in self.parameters.items()
        }
        # Every tensor-parallel rank has these parameters whole.
        self.copies = {
            name
            for name, part in self.pieces.items()
            if all(piece.extent == self.wholes[piece.name] for piece in part)
        }
        # Each rank has a part of these gradients: norms of queries and keys see the heads of one
        # rank, and with sequence parallelism all norms see the tokens of one rank.
        self.partial = {
            name
            for name, tensor in self.parameters.items()
            if name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
            or getattr(tensor, "sequence_parallel", False)
        }
        weights = dict(model.named_parameters())
        fill_pieces(self.parameters, self.pieces, weights)
        # A weight that is on no rank, such as an adapter, would be lost.
        held = {piece.name for part in self.pieces.values() for piece in part}
        seen = grid.ranks.max(torch.tensor([name in held for name in weights]).int())
        left = [name for name, count in zip(weights, seen.tolist(), strict=True) if not count]
        if left:
            raise ConfigError(
                "every weight of a model must have a place in a GPTModel for the trainer "
                f"'megatron', {left[:4]} ({len(left)} tensors) have none; train it with "
                "`train.trainer = 'fsdp2'`"
            )
        scorer: nn.Module
        if is_critic:
            scorer = ValueScorer(Critic(self.body, model.head))
        else:
            part = Vocabulary(decoder.config.vocab_size, grid) if grid.tp > 1 else None
            scorer = TokenScorer(LanguageModel(self.body, model.config), vocabulary=part)
        if is_frozen:
            scorer.requires_grad_(False)
        elif config.activation_checkpointing:
            # The library's own checkpointing needs an accelerator.
            layers = gpt.decoder.layers
            for number, layer in enumerate(layers):
                layers[number] = checkpoint_wrapper(layer, context_fn=self.routing.again)
        self.scorer = scorer.to(device)

    def run(
        self,
        micros: Iterable[Micro],
        forward: Callable[[Micro], list[Tensor]],
        take: Callable[[Micro, list[Tensor]], Tensor],
        *,
        learns: bool,
    ) -> None:
        """Compute micro-batches one by one, or stage by stage in the library's pipeline."""
        half = self.config.compute_dtype == "bfloat16"
        with (
            without_accelerator(self.device),
            torch.autocast(self.device.type, torch.bfloat16, enabled=half),
        ):
            if self.grid.pp > 1:
                self._run_stages(list(micros), forward, take, learns=learns)
                return
            for micro in micros:
                with self._recorded(micro):
                    results = forward(micro)
                loss = take(micro, results)
                if learns:
                    torch.autograd.backward(loss)

    def _recorded(self, micro: Micro) -> AbstractContextManager[None]:
        routing, packing = micro.batch.routing_by_column(), micro.packing
        if routing is None:
            return nullcontext()
        routing = routing.transpose(0, 1) if packing is None else packing.take(routing, -1)[:, None]
        if self.body.gpt.config.sequence_parallel:
            added = routing.new_full((-len(routing) % self.grid.tp, *routing.shape[1:]), -1)
            routing = torch.cat([routing, added]).chunk(self.grid.tp)[self.grid.tp_rank]
        return self.routing.using(routing.flatten(0, 1))

    def _run_stages(
        self,
        micros: list[Micro],
        forward: Callable[[Micro], list[Tensor]],
        take: Callable[[Micro, list[Tensor]], Tensor],
        *,
        learns: bool,
    ) -> None:
        """Let the last stage score, then broadcast its results to the other stages."""
        found: list[Tensor] = []

        def take_scores(micro: Micro, results: list[Tensor]) -> tuple[Tensor, None]:
            found.append(torch.stack(results).detach())
            # The schedule divides by micro-batches and multiplies by context-parallel ranks; the
            # parts of the loss must add up.
            return take(micro, results) * (len(micros) / self.grid.cp), None

        def step(waiting: Iterator[Micro], model: Any) -> tuple[Any, Any]:
            micro = next(waiting)
            with self._recorded(micro):
                if self.is_last:
                    return forward(micro), partial(take_scores, micro)
                return self.body.stage(micro.batch.input_ids, micro.packing), None

        if not micros:
            return
        forward_backward_pipelining_without_interleaving(
            forward_step_func=step,
            data_iterator=iter(micros),
            model=self.body.gpt,
            num_microbatches=len(micros),
            seq_length=1,
            micro_batch_size=1,
            forward_only=not learns,
        )
        group = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        count = torch.tensor(len(found[0]) if found else 0, device=self.device)
        dist.broadcast(count, last, group=group)
        for number, micro in enumerate(micros):
            shape = (int(count), *micro.select.shape)
            results = found[number] if found else torch.empty(shape, device=self.device)
            dist.broadcast(results, last, group=group)
            if not self.is_last:
                with torch.no_grad():
                    take(micro, list(results))

    def clip(self, limit: float) -> float:
        """Sum the gradients of all ranks, clip their norm to `limit` and return the norm before."""
        trained = {name: p for name, p in self.parameters.items() if p.grad is not None}
        _sum(
            (p.grad for name, p in trained.items() if name in self.partial),
            parallel_state.get_tensor_model_parallel_group(),
        )
        for is_expert, group in (
            (False, parallel_state.get_data_parallel_group(with_context_parallel=True)),
            (True, parallel_state.get_expert_data_parallel_group()),
        ):
            _sum((p.grad for n, p in trained.items() if (EXPERTS in n) == is_expert), group)
        twin = "output_layer.weight" if self.is_tied_apart else ""
        if self.is_tied_apart and (self.is_last or self.grid.pp_rank == 0):
            shared = trained[twin if self.is_last else "embedding.word_embeddings.weight"]
            _sum([shared.grad], parallel_state.get_embedding_group())
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, parameter in trained.items():
            is_copy = name == twin or bool(self.grid.tp_rank and name in self.copies)
            is_counted = not (self.grid.dp_rank or self.grid.cp_rank or is_copy)
            if self.grid.has_first_experts if EXPERTS in name else is_counted:
                assert parameter.grad is not None
                square += parameter.grad.double().square().sum()
        norm = self.grid.ranks.sum(square).sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(trained.values(), limit, norm)
        return float(norm)

    def stored(self, values: Mapping[str, Tensor], suffix: str = "") -> dict[str, Any]:
        """Return values of this rank (weights, or moments with a `suffix`) in the form for a
        checkpoint.

        Keys are names in transformers with `suffix`. A value is a scalar, or a list of flat shards,
        each with its box in the whole tensor.
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
    if group.size() == 1:
        return
    pending = [dist.all_reduce(g, group=group, async_op=True) for g in gradients if g is not None]
    for work in pending:
        work.wait()
