"""One model in training: micro-batches, optimizer steps and metrics, under any sharding.

Policy and critic are one `ShardedModel` each. Weights under adapters have no gradient: forward
passes use them and train states contain them, but no step changes them. Gradients add up over
ranks and micro-batches; losses divide by counts of the whole optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from planish.algorithms.base import LossOutput, TrainBatch
from planish.base.parallel import Grid
from planish.checkpoint.train_state import placed
from planish.models.lora import plain_name
from planish.models.packing import Context, Packing, pack_rows
from planish.models.policy import FolderBoxes
from planish.models.routing import RoutingReplay
from planish.run.layer_clock import time_layers
from planish.stages.train.batching import (
    Rows,
    gather_rows,
    plan_microbatches,
    plan_packed,
    scatter_tokens,
    selected_lengths,
)
from planish.stages.train.config import TrainConfig


class Micro(NamedTuple):
    """One forward pass."""

    rows: Rows
    """[b] row numbers; empty if this rank only keeps pace with the others."""
    batch: TrainBatch
    """The b rows on the device, or one row of padding if there are none."""
    select: Tensor
    """[b, S] bool, the tokens whose results are needed."""
    packing: Packing | None = None
    """Layout of the rows end to end; None for padded rows."""


Score = Callable[[Micro], tuple[Tensor, ...]]
"""Function from a micro-batch to per-token results, each [K] for the K selected tokens."""


class Sharding(Protocol):
    """Placement of one model on the ranks of a grid, and their collective operations."""

    framework: ClassVar[str]
    """Form of the tensors that `stored` returns, as `HeldState.framework`."""
    scorer: nn.Module
    """A `TokenScorer` or a `ValueScorer`, whose forward is the whole computation."""
    parameters: dict[str, Tensor]
    """This rank's part of each parameter, by any name."""
    buffers: dict[str, Tensor]
    """Tensors that are saved with the parameters as they are."""
    routing: RoutingReplay
    """Replay of recorded experts that the routers of the model call."""
    packs: bool
    """True if the scorer takes a `Packing`."""
    context: Context | None
    """Ranks that share the tokens of this rank's rows; None if this rank has all tokens."""

    def __init__(
        self, model: Any, *, config: TrainConfig, grid: Grid, device: torch.device, is_frozen: bool
    ) -> None:
        """Take over a causal LM of transformers (untyped, hence Any), or a critic, on the CPU.

        Weights that are on the device `meta` get memory for this rank's part, and no values.

        Raises:
            ConfigError: the sharding does not support the model.
        """

    def run(
        self,
        micros: Iterable[Micro],
        forward: Callable[[Micro], list[Tensor]],
        take: Callable[[Micro, list[Tensor]], Tensor],
        *,
        learns: bool,
    ) -> None:
        """Compute micro-batches, in order.

        Args:
            micros: micro-batches of this rank; every rank has equally many.
            forward: calls the scorer; in a pipeline only the last stage uses it.
            take: gets the results of each micro-batch, [b, S] each, on every rank of the model;
                returns the tensor to differentiate.
            learns: True adds the gradient of what `take` returns.
        """

    def clip(self, limit: float) -> float:
        """Sum the gradients of all ranks, clip their norm to `limit` and return the norm before."""

    def stored(self, values: Mapping[str, Tensor], suffix: str = "") -> dict[str, Any]:
        """Return values in the form of a train state: name in transformers to this rank's part.

        Args:
            values: name in `parameters` to a tensor of that parameter's shape, or to one number.
            suffix: appended to each name.
        """


class ShardedModel:
    """A scorer, the optimizer of its parameters and the loop over micro-batches.

    A frozen model has neither optimizer nor moments. The loop skips rows without a selected token,
    and the columns behind the last selected token.
    """

    def __init__(
        self,
        model: Any,
        *,
        shard: type[Sharding],
        config: TrainConfig,
        grid: Grid,
        device: torch.device,
        is_frozen: bool = False,
        boxes: FolderBoxes | None = None,
    ) -> None:
        """Shard a model by `shard`, and build its optimizer.

        Weights on the device `meta` get this rank's part from `boxes`; without it the caller loads
        them later.

        Raises:
            ConfigError: the sharding does not support the model, or `boxes` lacks weights.
        """
        self.config, self.grid, self.device = config, grid, device
        named = model.named_parameters()
        blank = {plain_name(name): tuple(p.shape) for name, p in named if p.is_meta}
        if boxes is not None:
            boxes.check(blank)
        self.sharding = shard(model, config=config, grid=grid, device=device, is_frozen=is_frozen)
        self.scorer = self.sharding.scorer
        time_layers(self.scorer)
        self.parameters = self.sharding.parameters
        if boxes is not None:
            self._read(boxes, blank)
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.optimizer = None if is_frozen else self._build_optimizer()

    def _read(self, boxes: FolderBoxes, blank: Mapping[str, tuple[int, ...]]) -> None:
        """Fill this rank's parts of the weights, and the saved buffers that `boxes` has."""
        stored = self.sharding.stored(self.parameters)
        buffers = self.sharding.buffers
        saved = {name: tuple(x.shape) for name, x in buffers.items()}
        saved = {name: shape for name, shape in saved.items() if boxes.has(name, shape)}
        with torch.no_grad():
            for name, shape in {**blank, **saved}.items():
                # A stage lacks the layers of other stages, and may have several parts of a tensor.
                found = stored.get(name, buffers.get(name, []))
                for part in found if isinstance(found, list) else [found]:
                    _, whereabouts, data = placed(name, part)
                    for start, extent in whereabouts:
                        data.copy_(boxes.read(name, shape, start, extent))

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
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return optimizer

    def compute(
        self, batch: TrainBatch, mask: Tensor, score: Score, *, num_results: int = 1
    ) -> Tensor:
        """Return the first `num_results` results of `score` for each token in `mask`.

        It computes no gradients. `batch` and `mask`, [B, S] bool, are on the CPU and have the rows
        of this data-parallel group.

        Returns:
            [num_results, B, S] float32 on CPU, 0 outside the mask, equal on all ranks of the group.
        """
        result = torch.zeros((num_results, *mask.shape), dtype=torch.float32)

        def take(micro: Micro, results: list[Tensor]) -> Tensor:
            scored = torch.stack(results[:num_results])
            rows, columns = torch.from_numpy(micro.rows), scored.shape[2]
            result[:, rows, :columns] = scored.cpu()[:, : len(rows)]
            return scored

        with torch.no_grad():
            self._run(batch, mask, score, take, learns=False)
        return result

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
        """Accumulate the gradient over micro-batches, clip it, and step if its norm is finite.

        Args:
            minibatch: rows of this data-parallel group, on the CPU.
            mask: [B, S] bool, tokens whose results the loss needs.
            score: calls the scorer on a micro-batch.
            loss_fn: takes the results, [B, S] each and 0 outside the mask, and the micro-batch.
            learning_rate: learning rate of this step.
            tally: metrics of other rows of the same step; None for none.
        """
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        measured = tally or Tally()

        def take(micro: Micro, results: list[Tensor]) -> Tensor:
            output = loss_fn(*results, micro.batch)
            measured.add(output)
            return output.loss

        self._run(minibatch, mask, score, take, learns=True)
        metrics = measured.result(self.grid)
        norm = self.sharding.clip(self.config.grad_clip or math.inf)
        metrics |= {"grad_norm": norm, "skipped": 0.0 if math.isfinite(norm) else 1.0}
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def _run(
        self,
        batch: TrainBatch,
        mask: Tensor,
        score: Score,
        take: Callable[[Micro, list[Tensor]], Tensor],
        *,
        learns: bool,
    ) -> None:

        def forward(micro: Micro) -> list[Tensor]:
            results = score(micro)
            return [scatter_tokens(micro.select, result) for result in results]

        if batch.routing is not None:
            self.sharding.routing.check(batch.routing)

        def micros() -> Iterator[Micro]:
            lengths = selected_lengths(mask)
            make_plan = plan_packed if self.sharding.packs else plan_microbatches
            budget = self.config.tokens_per_microbatch * self.grid.cp
            # Collectives run in lockstep, so every rank needs equally many micro-batches.
            count = torch.tensor(len(make_plan(lengths, budget)), device=self.device)
            for rows in make_plan(lengths, budget, int(self.grid.ranks.max(count))):
                width = int(lengths[rows].max(initial=2))
                micro = gather_rows(batch, rows, num_columns=width).to(self.device)
                if len(rows):
                    select = mask[torch.from_numpy(rows), :width].to(self.device)
                else:
                    # Every rank runs a forward and a backward pass, even without tokens.
                    select = torch.zeros_like(micro.policy_mask)
                    select[0, 1] = True
                packing = None
                if self.sharding.packs:
                    # A score needs the token before it, so the row of padding has two columns.
                    counts = lengths[rows] if len(rows) else np.full(1, 2)
                    packing = pack_rows(counts, width, self.sharding.context).to(self.device)
                yield Micro(rows, micro, select, packing)

        self.sharding.run(micros(), forward, take, learns=learns)

    def weights(self) -> dict[str, Any]:
        """Return parameters and saved buffers in the form of a train state."""
        return {**self.sharding.stored(self.parameters), **self.sharding.buffers}

    def moments(self) -> dict[str, Any]:
        """Return the optimizer's moments in the form of a train state."""
        assert self.optimizer is not None
        held: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.trained.items():
            for key, value in self.optimizer.state[parameter].items():
                held.setdefault(key, {})[name] = value
        return {
            name: value
            for key, values in held.items()
            for name, value in self.sharding.stored(values, f".{key}").items()
        }

    def close(self) -> None:
        """Free model and moments."""
        if self.optimizer is not None:
            self.optimizer.state.clear()
        self.parameters.clear()
        self.trained.clear()
        del self.scorer, self.sharding


class Tally:
    """Sums of metrics over micro-batches; `result` sums over ranks, once."""

    def __init__(self) -> None:
        self.loss: list[Tensor] = []
        self.means: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.maxima: dict[str, list[Tensor]] = {}

    def add(self, output: LossOutput) -> None:
        """Add one micro-batch; its tensors stay on the device."""
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
