"""Responses row by row, with all that a rollout set says of them; finished ones and others.

Deliberately left out: which of them generate when (`carry`), and how (`windows`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from planish.records.ragged import Ragged
from planish.records.rollouts import FinishReason, RolloutSet


def _none(dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    return np.empty(0, dtype)


@dataclass(frozen=True, eq=False)
class Slot:
    """One response: its tokens so far.

    Example:
        >>> slot = Slot(2).extended([5, 1], [-0.5, -0.1], [3, 3], FinishReason.STOP, "5")
        >>> slot.num_tokens, slot.start, slot.is_open
        (2, 0, False)
    """

    sample: int
    """Position in the group."""
    tokens: npt.NDArray[np.generic] = field(default_factory=lambda: _none(np.int32))
    """[t] int32, response tokens of all windows."""
    logprobs: npt.NDArray[np.generic] = field(default_factory=lambda: _none(np.float32))
    """[t] float32, as sampled."""
    versions: npt.NDArray[np.generic] = field(default_factory=lambda: _none(np.int32))
    """[t] int32, policy version that sampled each token."""
    start: int = 0
    """First token of the current window; t where this iteration has generated none."""
    finish: FinishReason = FinishReason.WINDOW
    """Why it ended; WINDOW while it goes on."""
    text: str = ""
    """Decoded tokens."""

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return len(self.tokens)

    @property
    def is_open(self) -> bool:
        """It goes on, or waits for a slot."""
        return self.finish is FinishReason.WINDOW

    def extended(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        finish: FinishReason,
        text: str,
    ) -> Slot:
        """Return the response with the tokens of another window."""
        return replace(
            self,
            tokens=np.concatenate([self.tokens, np.asarray(tokens, np.int32)]),
            logprobs=np.concatenate([self.logprobs, np.asarray(logprobs, np.float32)]),
            versions=np.concatenate([self.versions, np.asarray(versions, np.int32)]),
            start=self.num_tokens,
            finish=finish,
            text=text,
        )


@dataclass(frozen=True, eq=False)
class SlotGroup:
    """The responses to one prompt that are still of interest, by rising sample."""

    ordinal: int
    """Place of the prompt in the endless stream."""
    drawn: int
    """Iteration in which the group entered: it keys the seeds of its responses."""
    prompt_id: str
    """16 hex digits."""
    prompt_tokens: tuple[int, ...]
    """Prompt after the chat template."""
    answer: str
    """Ground truth."""
    verifier: str
    """Key of the verifier table."""
    slots: tuple[Slot, ...]
    """At least one."""


def as_set(groups: Sequence[SlotGroup]) -> RolloutSet:
    """Return groups as one record, in their order."""
    rows = [(g, group, slot) for g, group in enumerate(groups) for slot in group.slots]
    if not rows:
        return RolloutSet.empty()
    slots = [slot for _, _, slot in rows]
    return RolloutSet(
        group_index=np.array([g for g, _, _ in rows], np.int32),
        sample_index=np.array([slot.sample for slot in slots], np.int32),
        prompt_tokens=Ragged.from_lists([group.prompt_tokens for group in groups], np.int32),
        response_tokens=Ragged.from_lists([slot.tokens for slot in slots], np.int32),
        rollout_logprobs=Ragged.from_lists([slot.logprobs for slot in slots], np.float32),
        policy_version=Ragged.from_lists([slot.versions for slot in slots], np.int32),
        window_start=np.array([slot.start for slot in slots], np.int32),
        finish=np.array([slot.finish for slot in slots], np.int8),
        rollout_id=[f"{group.prompt_id}-{slot.sample:03d}" for _, group, slot in rows],
        prompt_id=[group.prompt_id for _, group, _ in rows],
        response=[slot.text for slot in slots],
        answer=[group.answer for _, group, _ in rows],
        verifier=[group.verifier for _, group, _ in rows],
    )


def from_set(
    rollouts: RolloutSet, ordinals: Sequence[int], drawn: Sequence[int]
) -> list[SlotGroup]:
    """Return the groups of a record; nothing in them is of the iteration to come.

    Args:
        rollouts: G groups.
        ordinals: [G] place of each prompt in the stream.
        drawn: [G] iteration in which each group entered.
    """
    bounds = [*np.flatnonzero(rollouts.group_starts()).tolist(), rollouts.num_rows]
    return [
        SlotGroup(
            ordinal=ordinals[g],
            drawn=drawn[g],
            prompt_id=rollouts.prompt_id[first],
            prompt_tokens=tuple(rollouts.prompt_tokens.row(g).tolist()),
            answer=rollouts.answer[first],
            verifier=rollouts.verifier[first],
            slots=tuple(_slot(rollouts, row) for row in range(first, last)),
        )
        for g, (first, last) in enumerate(itertools.pairwise(bounds))
    ]


def _slot(rollouts: RolloutSet, row: int) -> Slot:
    tokens = rollouts.response_tokens.row(row)
    return Slot(
        sample=int(rollouts.sample_index[row]),
        tokens=tokens,
        logprobs=rollouts.rollout_logprobs.row(row),
        versions=rollouts.policy_version.row(row),
        start=len(tokens),
        finish=FinishReason(int(rollouts.finish[row])),
        text=rollouts.response[row],
    )
