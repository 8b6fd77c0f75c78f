"""Finished responses that the critic trains on beside each mini-batch, or that wait for more.

By default the critic steps on the finished responses of each mini-batch, however few. With
`critic.min_finished` above 1, finished responses of an iteration join those that earlier iterations
left. `plan_steps` cuts this pool into steps of at least so many responses, or leaves all of it to
the next iteration. A response waits with its values and returns, and exactly one iteration uses it.

Source: ours; T-PPO, arXiv 2506.15050, does not say how small a step of the critic may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.algorithms.base import TrainBatch
from planish.records.ragged import Ragged
from planish.records.schema import take_rows
from planish.records.waiting import WaitingSet
from planish.stages.train.batching import Rows, join_tokens, row_positions


@dataclass(frozen=True)
class StepPlan:
    """The rows of policy and critic in each mini-batch of an iteration."""

    parts: Sequence[Rows]
    """Rows of the rollout batch, of all ranks, per mini-batch."""
    values: TrainBatch
    """Batch of the critic; without a pool it is the rollout batch."""
    value_parts: Sequence[Rows]
    """Rows of `values`, of all ranks, per mini-batch; without rows the critic makes no step."""
    has_targets: bool
    """True if the critic trains in this iteration."""
    num_policy_steps: int
    """Mini-batches of one pass over the rollout batch."""
    num_value_steps: int
    """Critic steps of one pass over `values`."""
    waiting: WaitingSet | None = None
    """Responses that are left for later iterations; None without a pool."""


def plan_steps(
    batch: TrainBatch,
    parts: Sequence[Rows],
    waiting: WaitingSet | None,
    *,
    min_finished: int,
    num_passes: int,
    seed: Sequence[int],
) -> StepPlan:
    """Assign rows for the critic to each mini-batch.

    Args:
        batch: the rollout batch as the algorithm's `advantages` returned it.
        parts: rows of each mini-batch, pass after pass.
        waiting: responses that earlier iterations left; None or no rows for none.
        min_finished: fewest responses of a critic step.
        num_passes: number of times that each row is in `parts`.
        seed: seed of the order of pooled responses.
    """
    minibatches, share = len(parts) // num_passes, batch.share
    [has_target] = share.every(batch.value_mask.any(1))
    num_earlier = 0 if waiting is None else waiting.num_rows
    num_pooled = num_earlier + int(has_target.sum())
    if min_finished == 1 and not num_earlier:
        return StepPlan(parts, batch, parts, num_pooled > 0, minibatches, minibatches)
    places = share.own(num_earlier + has_target.cumsum(0).long() - 1)
    own = share.own(has_target).nonzero().flatten()
    pool, rows = batch.take(own), places[own]
    if waiting is not None:
        earlier = np.arange(share.grid.dp_rank, num_earlier, share.grid.dp)
        columns = {name: take_rows(data, earlier) for name, data in vars(waiting).items()}
        pool = with_waiting(pool, WaitingSet(**columns))
        rows = torch.cat([torch.from_numpy(earlier), rows])
    pool = pool.updated(share=replace(share, rows=rows, num_rows=num_pooled))
    steps = pooled_parts(num_pooled, minibatches, num_passes, min_finished=min_finished, seed=seed)
    count = sum(len(part) > 0 for part in steps[:minibatches])
    left = WaitingSet.empty() if count else as_waiting(pool)
    return StepPlan(parts, pool, steps, count > 0, minibatches, count, left)


def pooled_parts(
    num_rows: int, num_minibatches: int, num_passes: int, *, min_finished: int, seed: Sequence[int]
) -> list[Rows]:
    """Cut pooled rows into critic steps of nearly equal size, spread over the mini-batches.

    Args:
        num_rows: rows of the pool.
        num_minibatches: mini-batches of one pass.
        num_passes: passes over the pool.
        min_finished: fewest rows of a step; a smaller pool makes no step.
        seed: seed of the shuffle.

    Returns:
        Row numbers for each mini-batch of all passes; empty for a mini-batch without a step.

    Example:
        >>> [len(rows) for rows in pooled_parts(7, 4, 1, min_finished=3, seed=[0])]
        [4, 0, 3, 0]
    """
    generator = np.random.default_rng([*seed, 1])
    count = min(num_minibatches, num_rows // min_finished)
    parts = [np.zeros(0, np.int64) for _ in range(num_minibatches * num_passes)]
    for first in range(0, len(parts) if count else 0, num_minibatches):
        order = generator.permutation(num_rows).astype(np.int64)
        for step, rows in enumerate(np.array_split(order, count)):
            parts[first + step * num_minibatches // count] = rows
    return parts


def with_waiting(batch: TrainBatch, waiting: WaitingSet) -> TrainBatch:
    """Put waiting responses before the rows of a batch; they train no policy."""
    lengths = waiting.prompt_tokens.lengths + waiting.response_tokens.lengths
    width = max(batch.input_ids.shape[1], int(lengths.max(initial=0)))
    ids, real, response = join_tokens(waiting.prompt_tokens, waiting.response_tokens, width)
    numbers = {name: np.zeros(real.shape, np.float32) for name in ("values", "returns")}
    for name, found in numbers.items():
        found[response] = getattr(waiting, name).values
    known = {"input_ids": ids, "attention_mask": real, "value_mask": response, **numbers}
    known["is_finished"] = np.ones(len(ids), np.bool_)
    joined: dict[str, Any] = {}
    # The critic chooses its own experts.
    for name, own in batch.without_routing().tensors().items():
        if own.dim() == 2:
            own = torch.cat([own, own.new_zeros((len(own), width - own.shape[1]))], 1)
        blank = own.new_zeros((len(ids), *own.shape[1:]))
        earlier = torch.from_numpy(known[name]) if name in known else blank
        joined[name] = torch.cat([earlier, own])
    joined["position_ids"] = row_positions(*joined["input_ids"].shape)
    return TrainBatch(**joined)


def as_waiting(batch: TrainBatch) -> WaitingSet:
    """Return the rows of all ranks as a record; `value_mask` is the whole response of each."""
    response = batch.value_mask
    prompt = batch.attention_mask & ~response

    def column(values: Tensor, mask: Tensor) -> Ragged:
        found, lengths = batch.share.join(values, mask)
        return Ragged(found.numpy(), np.concatenate([[0], lengths.cumsum(0).numpy()]))

    ids = batch.input_ids.int()
    return WaitingSet(
        prompt_tokens=column(ids, prompt),
        response_tokens=column(ids, response),
        values=column(batch.values, response),
        returns=column(batch.returns, response),
    )
