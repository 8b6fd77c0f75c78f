"""From record sets to tensors: train batch, mini-batches, micro-batches.

This module knows no losses. Every rank reads the same records, and builds only the rows of its
data-parallel group. The groups exchange gradients, a few sums and one number per row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planish.algorithms.base import TrainBatch
from planish.base.parallel import ALONE, Grid, Share
from planish.records.ragged import Ragged
from planish.records.rewards import RewardSet
from planish.records.rollouts import FinishReason, RolloutSet

Rows = npt.NDArray[np.int64]


def share_rows(
    rollouts: RolloutSet, rewards: RewardSet, parts: Sequence[Rows], grid: Grid, device: Any
) -> Share:
    """Spread the rows of a train batch over data-parallel groups.

    Each group gets about the same work of every mini-batch. Scoring a row costs 1 per token;
    training on it costs 3 more, if the rewards of its prompt's group differ and give a gradient.

    Args:
        rollouts: as for `train_batch`.
        rewards: as for `train_batch`.
        parts: row numbers of the mini-batches of one pass over the train batch.
        grid: grid of the ranks.
        device: device of the tensors that travel between ranks.
    """
    if grid.dp == 1:
        return Share(grid=grid, device=device)
    rows = np.flatnonzero(rewards.keep)
    groups = rollouts.group_index[rows]
    found = np.unique(np.stack([groups, rewards.reward[rows]]), axis=1)[0]
    differs = np.bincount(found.astype(np.int64))[groups] > 1
    work = rollouts.num_tokens()[rows] * np.where(differs, 4, 1)
    own = [p[plan_packed(work[p], int(work.sum()), grid.dp)[grid.dp_rank]] for p in parts]
    held = torch.from_numpy(np.sort(np.concatenate([rows[:0], *own])))
    return Share(len(rows), held, grid, device)


def train_batch(
    rollouts: RolloutSet,
    rewards: RewardSet,
    version: int | None = None,
    share: Share = ALONE,
) -> TrainBatch:
    """Join rollouts and their rewards, row by row, into padded sequences.

    Rows with `keep` False are left out. A row trains on the tokens of this iteration, from
    `window_start` on. The experts of inputs before a new window become unknown (-1).

    Args:
        rollouts: all shards of the iteration, one after the other.
        rewards: row `r` scores row `r` of `rollouts`.
        version: version of the policy before the iteration; None if no other one has sampled.
        share: rows that this rank builds.

    Returns:
        B sequences of S columns, the longest length. Old and reference log-probabilities, values,
        advantages and returns are 0, for later steps to fill in.
    """
    rows = share.own(torch.from_numpy(np.flatnonzero(rewards.keep))).numpy()
    groups = rollouts.group_index[rows]
    prompts = rollouts.prompt_tokens.take(groups)
    responses = rollouts.response_tokens.take(rows)
    lengths = prompts.lengths + responses.lengths
    shape = (len(rows), int(lengths.max()) if len(rows) else 1)
    input_ids, real, in_response = join_tokens(prompts, responses, shape[1])
    starts = prompts.lengths + rollouts.window_start[rows]
    trained = real & (np.arange(shape[1]) >= starts[:, None])
    logprobs = np.zeros(shape, np.float32)
    logprobs[in_response] = rollouts.rollout_logprobs.take(rows).values
    routing = None
    if rollouts.num_rows and (known := rollouts.routing_of(0)) is not None:
        assert rollouts.routing is not None
        choices = rollouts.routing.take(rows).values.reshape(-1, *known.shape[1:])
        # For a new window the engine recomputes the tokens before it under newer weights, so their
        # recorded choices are stale. The last of these tokens is an input for the first time.
        later = (rollouts.window_start[rows] > 0)[:, None]
        choices[(later & (np.arange(shape[1]) < starts[:, None] - 1))[real]] = -1
        routing = torch.from_numpy(choices)
    is_fresh = None
    if version is not None:
        is_old = np.zeros(shape, np.bool_)
        is_old[in_response] = rollouts.policy_version.take(rows).values != version
        is_fresh = torch.from_numpy(~(is_old & trained).any(1))
    truncated = rollouts.finish[rows] == FinishReason.LENGTH
    # An expanded scalar takes no memory until real values replace it.
    zeros = torch.zeros(()).expand(shape)
    return TrainBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=row_positions(*shape),
        attention_mask=torch.from_numpy(real),
        policy_mask=torch.from_numpy(trained),
        value_mask=torch.from_numpy(in_response),
        positive_mask=torch.tensor(False).expand(shape),
        rollout_logprobs=torch.from_numpy(logprobs),
        old_logprobs=zeros,
        reference_logprobs=zeros,
        values=zeros,
        advantages=zeros,
        returns=zeros,
        reward=torch.from_numpy(rewards.reward[rows]),
        accuracy=torch.from_numpy(rewards.accuracy[rows]),
        group_index=torch.from_numpy(groups),
        is_truncated=torch.from_numpy(truncated),
        is_finished=torch.from_numpy(truncated | (rollouts.finish[rows] == FinishReason.STOP)),
        routing=routing,
        is_fresh=is_fresh,
        share=share,
    )


def join_tokens(
    prompts: Ragged, responses: Ragged, num_columns: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Put each of B prompts and its response side by side, from column 0, padded on the right.

    Args:
        prompts: B rows of tokens.
        responses: B rows of tokens.
        num_columns: S, at least the tokens of the longest row.

    Returns:
        Token ids [B, S] with 0 in padding, then [B, S] bool of real tokens and of responses.
    """
    starts = prompts.lengths[:, None]
    column = np.arange(num_columns)
    real = column < starts + responses.lengths[:, None]
    in_response = real & (column >= starts)
    ids = np.zeros(real.shape, np.int64)
    ids[real & ~in_response] = prompts.values
    ids[in_response] = responses.values
    return ids, real, in_response


def row_positions(num_rows: int, num_columns: int) -> Tensor:
    """Return [B, S] int64, 0 to S - 1 in each row; all rows share memory.

    Positions run on over padding, because a second 0 in a row would begin a packed sequence.
    """
    return torch.arange(num_columns).expand(num_rows, num_columns)


def split_minibatches(
    num_rows: int, rollouts_per_minibatch: int, num_passes: int, *, seed: Sequence[int]
) -> list[Rows]:
    """Shuffle all rows once per pass and cut them into mini-batches of nearly equal size.

    Args:
        num_rows: rows of the train batch.
        rollouts_per_minibatch: largest size; sizes differ by at most one.
        num_passes: passes over all rows.
        seed: seed of the shuffle.

    Returns:
        Row numbers per optimizer step; an empty list for an empty batch.

    Example:
        >>> [len(part) for part in split_minibatches(10, 4, 1, seed=[0])]
        [4, 3, 3]
    """
    if num_rows == 0:
        return []
    generator = np.random.default_rng(list(seed))
    count = -(-num_rows // rollouts_per_minibatch)
    parts: list[Rows] = []
    for _ in range(num_passes):
        order = generator.permutation(num_rows).astype(np.int64)
        parts.extend(np.array_split(order, count))
    return parts


def here(batch: TrainBatch, numbers: Tensor) -> TrainBatch:
    """Return this rank's rows among `numbers` (rows of the batch of all ranks), in that order."""
    return batch.take(batch.share.here(numbers))


class Still(NamedTuple):
    """Rows of a mini-batch in which its loss has no gradient; a few of them may stand for all."""

    batch: TrainBatch
    """This rank's part of the few rows."""
    num_rows: int
    """Number of all such rows, of all ranks."""
    num_tokens: int
    """Tokens of all such rows in the policy loss."""
    num_few: int
    """Number of the few rows, of all ranks."""
    num_few_tokens: int
    num_step_tokens: int
    """Tokens of the whole mini-batch in the policy loss."""


class Movement:
    """Rows of a batch in which the policy loss has a gradient.

    The clipped policy loss of a token is a multiple of its advantage. A row with advantages of 0
    only, as in a group with equal rewards, would cost a backward pass and change nothing. Its
    tokens still count in the metrics, and in the denominators, which the caller computes before.
    """

    def __init__(self, batch: TrainBatch, *, has_penalty: bool = False) -> None:
        """Find the rows with a gradient in a batch with masks and advantages.

        With `has_penalty` every token in the policy loss has a gradient, that of the KL penalty.
        """
        self._batch = batch
        moved = batch.policy_mask
        if not has_penalty:
            moved = moved & (batch.advantages != 0)
        moved = (moved | batch.positive_mask).any(1)
        self._moved, self.num_tokens = batch.share.every(moved, batch.policy_mask.sum(1))

    def split(self, rows: Rows, most_still: int) -> tuple[TrainBatch, Still | None]:
        """Split a mini-batch into this rank's rows with a gradient, and the rows without.

        The second part has only rows with a token in `policy_mask`, and the first `most_still` of
        them stand for all; None if there is none. If no row has a gradient, the first part has all.
        """
        numbers = torch.from_numpy(rows)
        moved = self._moved[numbers] != 0
        # A step without any gradient is still a step: the optimizer's momentum moves the weights.
        moved = moved if bool(moved.any()) else ~moved
        tokens = self.num_tokens[numbers]
        still = ~moved & (tokens > 0)
        moving = here(self._batch, numbers[moved])
        if not bool(still.any()):
            return moving, None
        few = numbers[still][:most_still]
        counts = (tokens[still], self.num_tokens[few], tokens)
        all_tokens, few_tokens, step_tokens = (int(x.sum()) for x in counts)
        held = here(self._batch, few)
        num_rows = int(still.sum())
        return moving, Still(held, num_rows, all_tokens, len(few), few_tokens, step_tokens)


def plan_packed(
    lengths: npt.NDArray[np.int64], tokens_per_microbatch: int, least: int = 0
) -> list[Rows]:
    """Cut the sequences of a pass into micro-batches with about equally many tokens.

    Each sequence, from the longest down, goes to the micro-batch with the fewest tokens so far. The
    number of micro-batches is the smallest that keeps to the budget. Empty sequences are left out.

    Args:
        lengths: [B] int64, tokens to compute of each sequence.
        tokens_per_microbatch: limit on the sum of lengths; a longer row goes alone.
        least: smallest number of micro-batches, of which some may be empty.

    Returns:
        Row numbers; each row of a length above 0 exactly once.

    Example:
        >>> [rows.tolist() for rows in plan_packed(np.array([3, 9, 4, 8]), 12)]
        [[1, 0], [3, 2]]
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    count = max(least, -(-int(lengths.sum()) // tokens_per_microbatch))
    while True:
        parts: list[list[int]] = [[] for _ in range(count)]
        filled = [(0, number) for number in range(count)]
        for row in order:
            tokens, number = filled[0]
            parts[number].append(int(row))
            heapq.heapreplace(filled, (tokens + int(lengths[row]), number))
        full = [part for part in parts if len(part) > 1]
        if all(int(lengths[part].sum()) <= tokens_per_microbatch for part in full):
            break
        count += 1
    return [np.array(part, np.int64) for part in parts]


def plan_microbatches(
    lengths: npt.NDArray[np.int64], tokens_per_microbatch: int, least: int = 0
) -> list[Rows]:
    """Cut the sequences of a pass into micro-batches of similar length.

    Sequences are sorted by length, so padding is small. Each micro-batch takes sequences while
    rows * longest row keeps to the budget. Arguments and result are those of `plan_packed`.

    Example:
        >>> [rows.tolist() for rows in plan_microbatches(np.array([3, 9, 4, 8]), 18)]
        [[3, 1], [0, 2]]
    """
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    parts: list[Rows] = []
    # From the longest down: the first micro-batch is the largest, so memory peaks early.
    stop = len(order)
    while stop > 0:
        room = max(1, tokens_per_microbatch // max(1, int(lengths[order[stop - 1]])))
        start = max(0, stop - room)
        parts.append(order[start:stop].astype(np.int64))
        stop = start
    return parts + [np.zeros(0, np.int64)] * (least - len(parts))


def selected_lengths(mask: Tensor) -> npt.NDArray[np.int64]:
    """Return the number of columns up to each row's last selected token, [B] int64; 0 without any.

    Attention is causal, so the columns behind that token change no result.
    """
    columns = torch.arange(1, mask.shape[1] + 1)
    lengths: npt.NDArray[np.int64] = (mask * columns).amax(1).numpy()
    return lengths


def gather_rows(batch: TrainBatch, rows: Rows, *, num_columns: int) -> TrainBatch:
    """Return the first columns of the given rows.

    For no rows it returns one row of padding whose masks are all False, because a rank without
    sequences still takes part in the collectives of the others.
    """
    if len(rows) == 0:
        blank: dict[str, Any] = {}
        for name, value in batch.tensors().items():
            shape = (1, num_columns) if value.dim() == 2 else (1,)
            blank[name] = value[:0] if name == "routing" else value.new_zeros(shape)
        idle = TrainBatch(**blank)
        return idle.updated(position_ids=row_positions(1, num_columns))
    return batch.take(torch.from_numpy(np.ascontiguousarray(rows)), num_columns=num_columns)


def scatter_tokens(mask: Tensor, per_token: Tensor) -> Tensor:
    """Put the values of the selected tokens, [K], back into [B, S] with 0 elsewhere."""
    return per_token.new_zeros(mask.shape).masked_scatter(mask, per_token)
