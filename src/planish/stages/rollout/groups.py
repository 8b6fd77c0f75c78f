"""Responses with all columns of a rollout set, and the groups that they form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from planish.records.ragged import Ragged
from planish.records.rollouts import ENDED, FinishReason, RolloutSet
from planish.verifiers import Verdict
from planish.verifiers.judging import Judging, Verdicts, from_columns, score_of, to_columns


def _none(dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    return np.empty(0, dtype)


@dataclass(frozen=True, eq=False)
class Slot:
    """One response: its tokens so far.

    Example:
        >>> slot = Slot(2).extended([5, 1], [-0.5, -0.1], [3, 3], FinishReason.STOP)
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
    """First token of the current window; t if this iteration has generated none."""
    finish: FinishReason = FinishReason.WINDOW
    """Reason for the end; WINDOW while the response goes on."""
    text: str = ""
    """Decoded tokens."""
    routing: npt.NDArray[np.generic] | None = None
    """[prompt + t, layers, experts per token], the experts of each token as an input; -1 if the
    engine gave none for a token, None if it recorded none at all."""
    verdicts: Verdicts = field(default_factory=dict)
    """Verdict of each verifier, that of the prompt first; empty before judging."""

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return len(self.tokens)

    @property
    def is_open(self) -> bool:
        """True if the response goes on, or waits for a slot."""
        return self.finish is FinishReason.WINDOW

    def extended(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        finish: FinishReason,
        routing: npt.NDArray[np.generic] | None = None,
    ) -> Slot:
        """Return the response with further tokens of this iteration; its text stays as it was.

        Args:
            tokens: [n] new tokens.
            logprobs: [n] log-probabilities of the new tokens.
            versions: [n] policy versions of the new tokens.
            finish: reason for the end.
            routing: [prompt + t + n - 1, layers, experts per token], experts of the inputs of this
                call. It recomputes earlier windows, but their recorded experts stay.
        """
        joined, known = self.routing, self.routing if routing is None else routing
        if known is not None and len(tokens):
            num_inputs = len(known) + len(tokens) - 1 if routing is None else len(routing)
            joined = np.full((num_inputs + 1, *known.shape[1:]), -1, known.dtype)
            # The last token of the earlier windows is an input for the first time.
            first = num_inputs - len(tokens) if self.num_tokens else 0
            if self.routing is not None:
                joined[:first] = self.routing[:first]
            if routing is not None:
                joined[first:num_inputs] = routing[first:]
        return replace(
            self,
            routing=joined,
            tokens=np.concatenate([self.tokens, np.asarray(tokens, np.int32)]),
            logprobs=np.concatenate([self.logprobs, np.asarray(logprobs, np.float32)]),
            versions=np.concatenate([self.versions, np.asarray(versions, np.int32)]),
            finish=finish,
        )


class Fate(StrEnum):
    """A group as the filter of dynamic sampling sees it."""

    MIXED = "mixed"
    """Scores differ: the group carries a signal."""
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"
    INCOMPLETE = "incomplete"
    """A response is missing: the group is never judged."""


@dataclass(frozen=True, eq=False)
class Group:
    """The responses to one prompt that are still in use, by rising `sample`."""

    ordinal: int
    """Place of the prompt in the endless stream."""
    drawn: int
    """Iteration in which the group entered: it keys the seeds of its responses."""
    prompt_id: str
    prompt_tokens: tuple[int, ...]
    """Prompt after the chat template."""
    answer: str
    verifier: str
    slots: tuple[Slot, ...]
    """Responses; empty if the prompt is too long to sample from."""
    extra: str = ""
    """Columns of the data row for reward functions."""

    @property
    def fate(self) -> Fate:
        """Fate of the group by the verifier's scores, never by shaped rewards."""
        verdicts = self.verdicts
        if not self.slots or len(verdicts) < len(self.slots):
            return Fate.INCOMPLETE
        if len({score_of(verdict) for verdict in verdicts}) > 1:
            return Fate.MIXED
        return Fate.ALL_CORRECT if self.num_right else Fate.ALL_WRONG

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts of the prompt's verifier on the responses that are judged."""
        return [slot.verdicts[self.verifier] for slot in self.slots if slot.verdicts]

    @property
    def num_right(self) -> int:
        """Responses that are judged right."""
        return sum(verdict.accuracy > 0 for verdict in self.verdicts)

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return sum(slot.num_tokens for slot in self.slots)

    @property
    def num_open(self) -> int:
        """Responses that go on or wait for a slot."""
        return sum(slot.is_open for slot in self.slots)

    @property
    def oldest_version(self) -> int:
        """Oldest policy version that sampled a token; the group must have tokens."""
        return int(min(slot.versions.min() for slot in self.slots if slot.num_tokens))


def judged(groups: Sequence[Group], judging: Judging) -> list[Group]:
    """Return groups with verdicts on all responses that have ended; earlier verdicts stay.

    Raises:
        ConfigError: a verifier is not available.
        VerifierFailure: a verifier of the user hangs repeatedly.
    """
    places = [
        (g, s)
        for g, group in enumerate(groups)
        for s, slot in enumerate(group.slots)
        if slot.finish in ENDED and not slot.verdicts
    ]
    rows = [
        (groups[g].verifier, groups[g].slots[s].text, groups[g].answer, groups[g].extra)
        for g, s in places
    ]
    result = list(groups)
    for (g, s), verdicts in zip(places, judging.judge(rows), strict=True):
        slots = list(result[g].slots)
        slots[s] = replace(slots[s], verdicts=verdicts)
        result[g] = replace(result[g], slots=tuple(slots))
    return result


def as_set(groups: Sequence[Group]) -> RolloutSet:
    """Return groups as one record, in their order."""
    rows = [(g, group, slot) for g, group in enumerate(groups) for slot in group.slots]
    if not rows:
        return RolloutSet.empty()
    slots = [slot for _, _, slot in rows]
    routed = next((slot.routing for slot in slots if slot.routing is not None), None)
    routing, experts_per_token = None, None
    if routed is not None:
        experts_per_token = np.full(len(rows), routed.shape[-1], np.int32)
        flat = []
        for _, group, slot in rows:
            shape = (len(group.prompt_tokens) + slot.num_tokens, *routed.shape[1:])
            known = np.full(shape, -1) if slot.routing is None else slot.routing
            flat.append(known.reshape(-1))
        routing = Ragged.from_lists(flat, routed.dtype)
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
        routing=routing,
        experts_per_token=experts_per_token,
        extra=[group.extra for _, group, _ in rows] if any(g.extra for g in groups) else None,
        **to_columns([slot.verdicts for slot in slots]),
    )


def group_facts(groups: Sequence[Group]) -> dict[str, list[int]]:
    """Return the numbers of each group that go to the manifest, as no column of a set has them."""
    return {
        "ordinals": [group.ordinal for group in groups],
        "drawn": [group.drawn for group in groups],
    }


def from_set(rollouts: RolloutSet, ordinals: Sequence[int], drawn: Sequence[int]) -> list[Group]:
    """Return the groups of a record.

    Args:
        rollouts: G groups.
        ordinals: [G] place of each prompt in the stream.
        drawn: [G] iteration in which each group entered.
    """
    verdicts = from_columns(rollouts)
    bounds = [*np.flatnonzero(rollouts.group_starts()).tolist(), rollouts.num_rows]
    slots = [
        Slot(
            sample=int(rollouts.sample_index[row]),
            tokens=rollouts.response_tokens.row(row),
            logprobs=rollouts.rollout_logprobs.row(row),
            versions=rollouts.policy_version.row(row),
            start=int(rollouts.window_start[row]),
            finish=FinishReason(int(rollouts.finish[row])),
            text=rollouts.response[row],
            routing=rollouts.routing_of(row),
            verdicts=verdicts[row],
        )
        for row in range(rollouts.num_rows)
    ]
    return [
        Group(
            ordinal=ordinals[g],
            drawn=drawn[g],
            prompt_id=rollouts.prompt_id[first],
            prompt_tokens=tuple(rollouts.prompt_tokens.row(g).tolist()),
            answer=rollouts.answer[first],
            verifier=rollouts.verifier[first],
            slots=tuple(slots[first:last]),
            extra=rollouts.extra[first] if rollouts.extra else "",
        )
        for g, (first, last) in enumerate(itertools.pairwise(bounds))
    ]
