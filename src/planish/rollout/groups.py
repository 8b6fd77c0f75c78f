"""Groups of responses to one prompt, and what becomes of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from planish.engines.requests import FinishReason, Output
from planish.records.prompts import PromptSet
from planish.records.ragged import Ragged
from planish.records.rollouts import FinishReason as Finish
from planish.records.rollouts import RolloutSet

_FINISH = {FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}


class Fate(StrEnum):
    """What the filter of dynamic sampling sees in a group."""

    MIXED = "mixed"
    """Some right, some wrong: it carries a signal."""
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"
    INCOMPLETE = "incomplete"
    """A response is missing: the group is never judged."""


@dataclass(frozen=True)
class Group:
    """All responses to one prompt."""

    ordinal: int
    """Place of the prompt in the endless stream."""
    prompt: int
    """Row of the prompt set."""
    prompt_tokens: tuple[int, ...]
    """Prompt after the chat template."""
    outputs: tuple[Output, ...]
    """One per sample; those of an incomplete group may hold errors, or be none at all."""
    responses: tuple[str, ...] = ()
    """Decoded text of each output, for complete groups."""
    accuracy: tuple[float, ...] = ()
    """Verdict on each response, 0 or 1; empty for an incomplete group."""
    num_verifier_errors: int = 0
    """Responses on which the verifier itself failed."""

    @property
    def fate(self) -> Fate:
        """What the filter sees; it looks at accuracy, never at shaped rewards."""
        if not self.accuracy:
            return Fate.INCOMPLETE
        total = sum(self.accuracy)
        if total == 0:
            return Fate.ALL_WRONG
        return Fate.ALL_CORRECT if total == len(self.accuracy) else Fate.MIXED

    @property
    def num_tokens(self) -> int:
        """Response tokens generated."""
        return sum(output.num_tokens for output in self.outputs)


def _ragged(rows: Sequence[Sequence[float]], dtype: npt.DTypeLike) -> Ragged:
    return Ragged.from_lists(rows, dtype) if rows else Ragged.empty(dtype)


def as_rollouts(groups: Sequence[Group], prompts: PromptSet) -> RolloutSet:
    """Return complete groups as one record, in their order."""
    if not groups:
        return RolloutSet.empty()
    pairs = [(g, s) for g, group in enumerate(groups) for s in range(len(group.outputs))]
    outputs = [groups[g].outputs[s] for g, s in pairs]
    ids = [prompts.prompt_id[groups[g].prompt] for g, _ in pairs]
    return RolloutSet(
        group_index=np.array([g for g, _ in pairs], np.int32),
        sample_index=np.array([s for _, s in pairs], np.int32),
        prompt_tokens=_ragged([group.prompt_tokens for group in groups], np.int32),
        response_tokens=_ragged([output.token_ids for output in outputs], np.int32),
        rollout_logprobs=_ragged([output.logprobs for output in outputs], np.float32),
        policy_version=_ragged([output.versions for output in outputs], np.int32),
        window_start=np.zeros(len(pairs), np.int32),
        finish=np.array([_FINISH[output.finish_reason] for output in outputs], np.int8),
        rollout_id=[f"{i}-{s:03d}" for i, (_, s) in zip(ids, pairs, strict=True)],
        prompt_id=ids,
        response=[groups[g].responses[s] for g, s in pairs],
        answer=[prompts.answer[groups[g].prompt] for g, _ in pairs],
        verifier=[prompts.verifier[groups[g].prompt] for g, _ in pairs],
    )
