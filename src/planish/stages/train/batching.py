"""From record sets to tensors: train batch, mini-batches, micro-batches.

Knows nothing of losses. Every rank builds the same batch and the same plan from the same records,
so only gradients and a few sums have to travel between ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planish.algorithms.base import TrainBatch
from planish.records.ragged import Ragged
from planish.records.rewards import RewardSet
from planish.records.rollouts import FinishReason, RolloutSet

Rows = npt.NDArray[np.int64]


def train_batch(rollouts: RolloutSet, rewards: RewardSet, version: int | None = None) -> TrainBatch:
    """Join rollouts and their rewards, row by row, into padded sequences.

    Rows with `keep` False take no part. A row trains on the tokens that were sampled in this
    iteration, from `window_start` on. The experts of tokens before a new window are unknown.

    Args:
        rollouts: all shards of the iteration, one after the other.
        rewards: row `r` scores row `r` of `rollouts`.
        version: of the policy before the iteration; None where no other one has sampled.

    Returns:
        B sequences of S columns, S the longest; old and reference log-probabilities, values,
        advantages and returns are 0 until they are computed.
    """
    rows = np.flatnonzero(rewards.keep)
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
        # For a new window the engine has computed the tokens before it again, under other weights
        # than those whose choices are recorded; the last of them was no input before.
        later = (rollouts.window_start[rows] > 0)[:, None]
        choices[(later & (np.arange(shape[1]) < starts[:, None] - 1))[real]] = -1
        routing = torch.from_numpy(choices)
    is_fresh = None
    if version is not None:
        is_old = np.zeros(shape, np.bool_)
        is_old[in_response] = rollouts.policy_version.take(rows).values != version
        is_fresh = torch.from_numpy(~(is_old & trained).any(1))
    truncated = rollouts.finish[rows] == FinishReason.LENGTH
    # One number in memory, until it is computed.
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
    """Return [B, S] int64, 0 to S - 1 in each row; all rows are one in memory.

    They run on over padding: one that starts again at 0 would begin a packed sequence.
    """
    return torch.arange(num_columns).expand(num_rows, num_columns)


def split_minibatches(
    num_rows: int, rollouts_per_minibatch: int, num_passes: int, *, seed: Sequence[int]
) -> list[Rows]:
    """Shuffle all rows once per pass and cut them into mini-batches of nearly equal size.

    Args:
        num_rows: rows of the train batch.
        rollouts_per_minibatch: largest size; sizes differ by at most one.
        num_passes: how often each row is used.
        seed: of the shuffle.

    Returns:
        Row numbers per optimizer step; none for an empty batch.

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


def split_by_gradient(
    minibatch: TrainBatch, *, has_penalty: bool = False
) -> tuple[TrainBatch, TrainBatch]:
    """Return the rows that the policy loss has a gradient on, then those that it has none on.

    The clipped policy loss of a token is a multiple of its advantage. A row whose advantages are
    all 0, as those of a group with equal rewards, would cost a backward pass and change nothing;
    its tokens still count in the denominators, which are made before, and in the metrics.

    Args:
        minibatch: masks and advantages filled in.
        has_penalty: every token in the policy loss has a gradient: a KL penalty pulls at it.

    Returns:
        Two batches, of which the second may be empty and holds only rows with a token in
        `policy_mask`. Where no row has a gradient, all are in the first.
    """
    moved = minibatch.policy_mask
    if not has_penalty:
        moved = moved & (minibatch.advantages != 0)
    rows = (moved | minibatch.positive_mask).any(1)
    # A step without any gradient is a step all the same: the optimizer's momentum moves on.
    rows = rows if bool(rows.any()) else ~rows
    counted = ~rows & minibatch.policy_mask.any(1)
    moving, still = (minibatch.take(part.nonzero().flatten()) for part in (rows, counted))
    return moving, still


def plan_packed(
    lengths: npt.NDArray[np.int64], tokens_per_microbatch: int, num_ranks: int
) -> list[list[Rows]]:
    """Cut the sequences of an optimizer step into micro-batches of as many tokens, for each rank.

    Sequences go, from the longest down, to the micro-batch with the fewest tokens so far; there are
    as few micro-batches as keep to the budget. Those of length 0 are left out; every rank gets the
    same number.

    Args:
        lengths: [B] int64, tokens of each sequence that are to be computed.
        tokens_per_microbatch: the sum of lengths must not exceed it; a longer row goes alone.
        num_ranks: data-parallel processes.

    Returns:
        Per rank a list of row numbers; together each row of a length above 0 exactly once.

    Example:
        >>> plan = plan_packed(np.array([3, 9, 4, 8]), 12, 1)
        >>> [rows.tolist() for rows in plan[0]]
        [[1, 0], [3, 2]]
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    count = -(-int(lengths.sum()) // tokens_per_microbatch)
    while True:
        count += -count % num_ranks
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
    rows = [np.array(part, np.int64) for part in parts]
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def plan_microbatches(
    lengths: npt.NDArray[np.int64], tokens_per_microbatch: int, num_ranks: int
) -> list[list[Rows]]:
    """Cut the sequences of an optimizer step into micro-batches of similar length, for each rank.

    Sequences are sorted by length, so that little is padding, and filled into micro-batches up to
    the budget: rows * longest row must not exceed it. Every rank gets the same number, since
    sharded models compute in step; a rank short of sequences gets empty ones. Arguments and result
    are those of `plan_packed`.

    Example:
        >>> plan = plan_microbatches(np.array([3, 9, 4, 8]), 18, 1)
        >>> [rows.tolist() for rows in plan[0]]
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
    while len(parts) % num_ranks:
        largest = max(range(len(parts)), key=lambda i: (len(parts[i]), -i))
        if len(parts[largest]) < 2:
            parts.append(np.zeros(0, np.int64))
            continue
        half = len(parts[largest]) // 2
        parts[largest : largest + 1] = [parts[largest][half:], parts[largest][:half]]
    return [parts[rank::num_ranks] for rank in range(num_ranks)]


def selected_lengths(mask: Tensor) -> npt.NDArray[np.int64]:
    """Return the columns up to the last selected token of each row, [B] int64; 0 without any.

    Attention is causal: columns behind it change nothing.
    """
    columns = torch.arange(1, mask.shape[1] + 1)
    lengths: npt.NDArray[np.int64] = (mask * columns).amax(1).numpy()
    return lengths


def gather_rows(batch: TrainBatch, rows: Rows, *, num_columns: int) -> TrainBatch:
    """Return the first columns of the given rows.

    No rows give one row of padding whose masks are all False: a rank without sequences still has
    to take part in the collective work of the others.
    """
    if len(rows) == 0:
        idle = batch.take(torch.zeros(1, dtype=torch.int64), num_columns=num_columns)
        off = torch.zeros_like(idle.policy_mask)
        if idle.routing is not None:
            idle = idle.updated(routing=idle.routing[:0])
        return idle.updated(attention_mask=off, policy_mask=off, value_mask=off, positive_mask=off)
    return batch.take(torch.from_numpy(np.ascontiguousarray(rows)), num_columns=num_columns)


def scatter_tokens(mask: Tensor, per_token: Tensor) -> Tensor:
    """Put the values of the selected tokens, [K], back into [B, S] with 0 elsewhere."""
    return per_token.new_zeros(mask.shape).masked_scatter(mask, per_token)
