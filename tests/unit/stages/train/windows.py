"""Iterations of a tiny run whose responses are cut by windows; a slot stays empty once it is done.

The rollout stage would fill it again: what training does with what goes on is the same.
"""

from dataclasses import replace

import numpy as np

from planish.records import layout
from planish.records.io import write_set
from planish.records.ragged import Ragged
from planish.records.rollouts import FinishReason, RolloutSet
from tests.unit.records.samples import take_rows
from tests.unit.stages.train.runs import random_rollouts, rewards_for

NUM_GROUPS = 4


def whole_responses(tiny, shard):
    """The responses of a shard as no window would have cut them."""
    return random_rollouts(tiny.policy, 900 + shard, num_groups=NUM_GROUPS)


def window_of(whole, iteration, window):
    """Return what an iteration of windows hands over, and which groups of `whole` it holds."""
    lengths = whole.response_tokens.lengths
    start, stop = window * (iteration - 1), window * iteration
    alive = np.flatnonzero(lengths > start)
    made = take_rows(whole, alive)
    ends = np.minimum(lengths[alive], stop)

    def cut(ragged):
        rows = [ragged.row(r)[:end] for r, end in zip(alive, ends, strict=True)]
        return Ragged.from_lists(rows, ragged.values.dtype)

    made = replace(
        made,
        response_tokens=cut(whole.response_tokens),
        rollout_logprobs=cut(whole.rollout_logprobs),
        policy_version=cut(whole.policy_version),
        window_start=np.full(len(alive), start, np.int32),
        finish=np.where(lengths[alive] > stop, FinishReason.WINDOW, made.finish).astype(np.int8),
    )
    return made, np.unique(whole.group_index[alive])


def add_window_iteration(tiny, iteration, window):
    """Write rollouts, carry sets and rewards of one iteration; returns the Ref of the rewards."""
    sets, parents = [], {}
    facts = {"config_sha256": tiny.digest, "iteration": iteration}
    for shard in range(tiny.num_shards):
        made, groups = window_of(whole_responses(tiny, shard), iteration, window)
        ordinals = [int(shard + tiny.num_shards * g) for g in groups]
        goes_on = take_rows(made, made.finish == FinishReason.WINDOW)
        carry = write_set(
            layout.carry(tiny.root, iteration, shard), goes_on, parents={}, attributes=facts
        )
        ref = write_set(
            layout.rollouts(tiny.root, iteration, shard), made, parents={},
            attributes={
                **facts, "consumed": ordinals if iteration == 1 else [], "ordinals": ordinals,
                "carry_sha256": carry.manifest_sha256,
            },
        )  # fmt: skip
        sets.append(made)
        parents[f"rollouts-{shard:02d}"] = ref.manifest_sha256
    joined = RolloutSet.concat(sets)
    rewards = rewards_for(joined, iteration)
    waits = joined.finish == FinishReason.WINDOW
    zero = np.where(waits, 0, 1).astype(np.float32)
    rewards = replace(
        rewards, accuracy=rewards.accuracy * zero, outcome=rewards.outcome * zero,
        length_penalty=rewards.length_penalty * zero, reward=rewards.reward * zero,
        has_reward=~waits,
    )  # fmt: skip
    return write_set(
        layout.rewards(tiny.root, iteration), rewards, parents=parents, attributes=facts
    )
