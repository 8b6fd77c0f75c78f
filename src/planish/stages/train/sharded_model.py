"""One model in training: parameters, gradients and moments sharded over data-parallel ranks.

Policy and critic are one instance each. Parameters that need no gradient, those beside adapters,
are saved and computed with, but never trained. With one rank the model stays as it is, since
sharding over one rank is the identity. Gradients are summed over ranks and micro-batches; losses
divide by counts of the whole optimizer step.

Source: ZeRO-3, arXiv 1910.02054, section 5 (sharded parameters, gradients and optimizer).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from planish.algorithms.base import LossOutput, TrainBatch
from planish.base.parallel import Grid, data_mesh
from planish.models.lora import plain_name
from planish.stages.train.batching import (
    Rows,
    gather_rows,
    plan_microbatches,
    scatter_tokens,
    selected_lengths,
)
from planish.stages.train.config import TrainConfig

Score = Callable[[TrainBatch, Tensor], tuple[Tensor, ...]]
"""Micro-batch and [B, S] selection to per-token results, [K] each of the K selected tokens."""


class ShardedModel:
    """A scorer, the optimizer of its parameters and the loop over micro-batches.

    A frozen one only computes: it has neither optimizer nor moments.

    Rows without a selected token are not computed, nor are the columns behind the last one.
    """

    def __init__(
        self,
        scorer: nn.Module,
        model: Any,
        body: Any,
        *,
        config: TrainConfig,
        grid: Grid,
        device: torch.device,
        is_frozen: bool = False,
        exact: nn.Module | None = None,
    ) -> None:
        """Shard a model and build its optimizer.

        Args:
            scorer: its forward is the whole computation; the root of the sharded tree.
            model: what it scores with; gives the parameters their names (untyped, hence Any).
            body: the decoder of transformers inside the model.
            config: of the train stage.
            grid: where this process stands among those of the training.
            device: of this rank.
            is_frozen: the model is never trained.
            exact: a part that stays in float32 whatever `compute_dtype` says; None is none.
        """
        self.config = config
        self.grid = grid
        self.device = device
        if config.activation_checkpointing and not is_frozen:
            _checkpoint_layers(body)
        self.scorer = scorer.to(device)
        if grid.dp > 1:
            self._shard(body, exact)
        self.parameters: dict[str, Tensor] = {
            plain_name(name): parameter for name, parameter in model.named_parameters()
        }
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        saved = set(model.state_dict())
        self.buffers = {name: x for name, x in model.named_buffers() if name in saved}
        self.optimizer = None if is_frozen else self._build_optimizer()

    def _build_optimizer(self) -> torch.optim.AdamW:
        config = self.config
        optimizer = torch.optim.AdamW(
            list(self.trained.values()),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        # Moments exist from the start, so that a load always finds tensors to fill.
        for parameter in self.trained.values():
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=self.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return optimizer

    def _shard(self, body: Any, exact: nn.Module | None) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": data_mesh(self.grid, self.device)}
        if exact is not None:
            fully_shard(exact, **options)
        if self.config.compute_dtype == "bfloat16":
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        # The scorer returns a view of what it gathered; nothing below writes into it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        for layer in decoder_layers(body):
            fully_shard(layer, **options)
        fully_shard(self.scorer, **options)

    def compute(
        self, batch: TrainBatch, mask: Tensor, score: Score, *, num_results: int = 1
    ) -> Tensor:
        """Return the first results of `score` for every token in `mask`, without gradients.

        Args:
            batch: on CPU, equal on all ranks.
            mask: [B, S] bool.
            score: how the scorer is called.
            num_results: how many of its results to keep.

        Returns:
            [num_results, B, S] float32 on CPU, 0 outside the mask, equal on all ranks.
        """
        result = torch.zeros((num_results, *mask.shape), dtype=torch.float32)
        with torch.no_grad():
            for rows, micro, select in self._microbatches(batch, mask):
                scored = torch.stack(list(self._scattered(micro, select, score))[:num_results])
                columns = scored.shape[2]
                result[:, torch.from_numpy(rows), :columns] = scored.cpu()[:, : len(rows)]
        if self.grid.ranks.size == 1:
            return result
        return self.grid.sum(result.to(self.device)).cpu()

    def measure(
        self,
        batch: TrainBatch,
        mask: Tensor,
        score: Score,
        loss_fn: Callable[..., LossOutput],
        tally: Tally,
        weight: float,
    ) -> None:
        """Take the metrics of the loss into a tally, without gradients.

        Args:
            batch: as for `step`.
            mask: as for `step`.
            score: as for `step`.
            loss_fn: as for `step`.
            tally: where they go.
            weight: how many tokens each token stands for.
        """
        with torch.no_grad():
            for _, micro, select in self._microbatches(batch, mask):
                output = loss_fn(*self._scattered(micro, select, score), micro)
                pairs = output.means.items()
                means = {name: (total * weight, count * weight) for name, (total, count) in pairs}
                tally.add(replace(output, means=means))

    def step(
        self,
        minibatch: TrainBatch,
        mask: Tensor,
        score: Score,
        loss_fn: Callable[..., LossOutput],
        *,
        learning_rate: float,
        tally: Tally | None = None,
    ) -> dict[str, float]:
        """Accumulate the gradient over micro-batches, clip it and step, unless it is not finite.

        Args:
            minibatch: on CPU, equal on all ranks.
            mask: [B, S] bool, tokens whose results the loss needs.
            score: how the scorer is called.
            loss_fn: takes the results, [B, S] each and 0 outside the mask, and the micro-batch.
            learning_rate: of this step.
            tally: what was measured for the same step; None is nothing.
        """
        assert self.optimizer is not None, "a frozen model makes no step"
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        tally = tally or Tally()
        for _, micro, select in self._microbatches(minibatch, mask):
            output = loss_fn(*self._scattered(micro, select, score), micro)
            # Sharded gradients are averaged over ranks; the parts of the loss are to be summed.
            torch.autograd.backward(output.loss * self.grid.dp)
            tally.add(output)
        metrics = tally.result(self.grid)
        clipped: Any = torch.nn.utils.clip_grad_norm_(
            list(self.trained.values()), self.config.grad_clip or math.inf
        )
        norm = float(clipped.full_tensor() if hasattr(clipped, "full_tensor") else clipped)
        metrics |= {"grad_norm": norm, "skipped": 0.0 if math.isfinite(norm) else 1.0}
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def _microbatches(
        self, batch: TrainBatch, mask: Tensor
    ) -> Iterator[tuple[Rows, TrainBatch, Tensor]]:
        """Yield this rank's row numbers, micro-batches and selections."""
        lengths = selected_lengths(mask)
        plan = plan_microbatches(lengths, self.config.tokens_per_microbatch, self.grid.dp)
        for rows in plan[self.grid.dp_rank]:
            width = int(lengths[rows].max(initial=2))
            micro = gather_rows(batch, rows, num_columns=width).to(self.device)
            if len(rows):
                select = mask[torch.from_numpy(rows), :width].to(self.device)
            else:
                # Sharded models need a forward and backward on every rank, even without tokens.
                select = torch.zeros_like(micro.policy_mask)
                select[0, 1] = True
            yield rows, micro, select

    def _scattered(self, micro: TrainBatch, select: Tensor, score: Score) -> list[Tensor]:
        half = self.config.compute_dtype == "bfloat16"
        precision: Any = (
            torch.autocast(self.device.type, torch.bfloat16)
            if half and self.grid.dp == 1
            else contextlib.nullcontext()
        )
        with precision:
            results = score(micro, select)
        return [scatter_tokens(select, result) for result in results]

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and saved buffers by name: this rank's shards."""
        return {**self.parameters, **self.buffers}

    def moments(self) -> dict[str, Tensor]:
        """Return the optimizer's moments by parameter name: this rank's shards."""
        assert self.optimizer is not None, "a frozen model has no moments"
        return {
            f"{name}.{key}": value
            for name, parameter in self.trained.items()
            for key, value in self.optimizer.state[parameter].items()
        }

    def close(self) -> None:
        """Let go of model and moments."""
        if self.optimizer is not None:
            self.optimizer.state.clear()
        self.parameters.clear()
        self.trained.clear()
        del self.scorer


class Tally:
    """Sums the metrics of micro-batches; ranks are summed once at the end."""

    def __init__(self) -> None:
        self.loss: list[Tensor] = []
        self.means: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.maxima: dict[str, list[Tensor]] = {}

    def add(self, output: LossOutput) -> None:
        """Take in one micro-batch; nothing is copied from the device yet."""
        self.loss.append(output.loss.detach())
        for name, pair in output.means.items():
            self.means.setdefault(name, []).append(pair)
        for name, value in output.maxima.items():
            self.maxima.setdefault(name, []).append(value)

    def result(self, grid: Grid) -> dict[str, float]:
        """Return `loss`, the means of every metric that has a count, and the maxima."""
        names, peaks = sorted(self.means), sorted(self.maxima)
        sums = [_total(self.loss)]
        for name in names:
            sums += [_total(part) for part in zip(*self.means[name], strict=True)]
        packed = grid.sum(torch.stack(sums)).tolist()
        metrics = {"loss": packed[0]}
        for position, name in enumerate(names):
            total, count = packed[1 + 2 * position : 3 + 2 * position]
            if count > 0:
                metrics[name] = total / count
        if peaks:
            tops = torch.stack([torch.stack(self.maxima[name]).max() for name in peaks])
            metrics |= dict(zip(peaks, grid.ranks.max(tops).tolist(), strict=True))
        return metrics


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum()


def decoder_layers(body: Any) -> list[Any]:
    """Return the layers of a decoder of transformers; none where it names no `layers`."""
    return list(getattr(body, "layers", []))


def _checkpoint_layers(body: Any) -> None:
    """Recompute each decoder layer in the backward pass.

    transformers only does so in training mode, so the layers themselves, and nothing below them,
    are put into it: dropout stays off.
    """
    body.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in decoder_layers(body):
        layer.training = True
