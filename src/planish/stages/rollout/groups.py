"""Groups of responses to one prompt, and what becomes of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planish.engines.requests import FinishReason, Output
from planish.records.prompts import PromptSet
from planish.records.rollouts import FinishReason as Finish
from planish.records.rollouts import RolloutSet
from planish.stages.rollout.slots import Slot, SlotGroup, as_set

FINISH = {FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}
"""What an engine says of a response that it ended, in the words of the record."""


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


def as_rollouts(groups: Sequence[Group], prompts: PromptSet) -> RolloutSet:
    """Return complete groups as one record, in their order."""
    return as_set([_slots(group, prompts) for group in groups])


def _slots(group: Group, prompts: PromptSet) -> SlotGroup:
    return SlotGroup(
        ordinal=group.ordinal,
        drawn=0,
        prompt_id=prompts.prompt_id[group.prompt],
        prompt_tokens=group.prompt_tokens,
        answer=prompts.answer[group.prompt],
        verifier=prompts.verifier[group.prompt],
        slots=tuple(
            Slot(
                sample=sample,
                tokens=np.asarray(output.token_ids, np.int32),
                logprobs=np.asarray(output.logprobs, np.float32),
                versions=np.asarray(output.versions, np.int32),
                finish=FINISH[output.finish_reason],
                text=text,
            )
            for sample, (output, text) in enumerate(
                zip(group.outputs, group.responses, strict=True)
            )
        ),
    )
