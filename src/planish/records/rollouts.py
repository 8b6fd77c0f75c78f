"""Rollouts: sampled responses with their log-probabilities, grouped by prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from planish.records.ragged import Array, Ragged
from planish.records.schema import (
    Column,
    ColumnData,
    Record,
    column,
    join,
    record,
)

VERDICT = ("accuracy", "score", "extracted", "invalid", "error", "timeout")
"""Columns of the verdict of the row's verifier."""
_BLANK: dict[str, Any] = {"text": "", "float32": np.nan, "float64": np.nan, "bool": False}
"""Kind of a column that a set may lack to its value in rows of such a set."""


class FinishReason(IntEnum):
    """Why the sampling of a response ended."""

    STOP = 0
    """An end or stop token, or one that completes a stop string, is the last token."""
    LENGTH = 1
    """The limit on tokens, or the model's maximum, is reached."""
    WINDOW = 2
    """The window is full: the response goes on in the next iteration."""
    ABORT = 3
    """Cancelled by the driver, or the engine failed on this response alone."""


ENDED = (FinishReason.STOP, FinishReason.LENGTH)
"""Finish reasons of responses that did not fail: they are judged."""


@record
class RolloutSet(Record):
    """One row per rollout, sorted by (group_index, sample_index), at least one in each group.

    In memory the prompt's tokens exist once per group. On disk every row has them, so that each
    row can be read alone (compression makes the repetition almost free).

    Example:
        >>> rollouts = RolloutSet(
        ...     group_index=np.zeros(2, np.int32), sample_index=np.arange(2, dtype=np.int32),
        ...     prompt_tokens=Ragged.from_lists([[7, 8]], np.int32),
        ...     response_tokens=Ragged.from_lists([[5, 1], [6]], np.int32),
        ...     rollout_logprobs=Ragged.from_lists([[-0.5, -0.1], [-2.0]], np.float32),
        ...     policy_version=Ragged.from_lists([[3, 3], [3]], np.int32),
        ...     window_start=np.zeros(2, np.int32),
        ...     finish=np.array([FinishReason.STOP, FinishReason.LENGTH], np.int8),
        ...     rollout_id=["00112233aabbccdd-000", "00112233aabbccdd-001"],
        ...     prompt_id=["00112233aabbccdd"] * 2, response=["5", "6"], answer=["5"] * 2,
        ...     verifier=["math"] * 2)
        >>> rollouts.num_rows, rollouts.num_groups
        (2, 1)
    """

    SCHEMA: ClassVar[str] = "rollouts/2"
    OLDER: ClassVar[tuple[str, ...]] = ("rollouts/1",)

    group_index: npt.NDArray[np.int32] = column("int32", "0..G-1, not decreasing")
    sample_index: npt.NDArray[np.int32] = column("int32", "position in the group")
    prompt_tokens: Ragged = column("list<int32>", "after the chat template; equal within a group")
    """In memory one row per group."""
    response_tokens: Ragged = column("list<int32>", "with the end token when it was sampled")
    rollout_logprobs: Ragged = column(
        "list<float32>", "natural log, of the distribution sampled from"
    )
    """The distribution is that after temperature, top-k and top-p."""
    policy_version: Ragged = column("list<int32>", "version that sampled the token")
    window_start: npt.NDArray[np.int32] = column(
        "int32", "first response token sampled in this iteration"
    )
    """Reused surplus groups keep the 0 of the iteration that sampled them."""
    finish: npt.NDArray[np.int8] = column("int8", "0 STOP, 1 LENGTH, 2 WINDOW, 3 ABORT")
    rollout_id: list[str] = column("text", "<prompt_id>-<sample_index in 3 digits>")
    prompt_id: list[str] = column("text", "16 hex digits; equal within a group")
    response: list[str] = column(
        "text", "decoded, behind a mark of the prompt that opens a thought"
    )
    """Untrusted text."""
    answer: list[str] = column("text", "ground truth")
    verifier: list[str] = column("text", "key of the verifier table")
    routing: Ragged | None = column(
        "list<int8|int16>", "experts by token, layer and rank; -1 unknown", default=None
    )
    """Flat [prompt + response tokens, layers with experts, experts per token], logical ids. Entry t
    is the choice of the forward pass that has token t as its input, like the trainer's forward over
    prompt and response. The last token is no input, so its entry is -1. Prompt and tokens of
    earlier windows keep their first choice. int8 if every id fits, else int16; None if the run does
    not record it."""
    experts_per_token: npt.NDArray[np.int32] | None = column(
        "int32", "last extent of `routing`; there with it", default=None
    )
    extra: list[str] | None = column(
        "text", "JSON: columns of the data row for reward functions; empty for none", default=None
    )
    """None where no function takes any."""
    accuracy: npt.NDArray[np.float32] | None = column(
        "float32",
        "the verifier's verdict, 0 or 1; NaN where nobody has judged",
        default=None,
        may_be_nan=True,
    )
    """It and the next five columns are the verdict of the row's verifier, and are there together;
    None in sets of earlier versions. Responses that have not ended have none."""
    score: npt.NDArray[np.float64] | None = column(
        "float64",
        "the verifier's score, 0 to 1; NaN where nobody has judged",
        default=None,
        may_be_nan=True,
    )
    extracted: list[str] | None = column("text", "the answer that the verifier saw", default=None)
    invalid: npt.NDArray[np.bool_] | None = column(
        "bool", "the verifier found no answer", default=None
    )
    error: npt.NDArray[np.bool_] | None = column("bool", "the verifier itself failed", default=None)
    timeout: npt.NDArray[np.bool_] | None = column(
        "bool", "the verifier did not end in time", default=None
    )
    functions: list[str] | None = column(
        "text", "JSON: verdict of each reward function by its name", default=None
    )
    """None without `reward.functions`."""

    def to_verify(self) -> list[tuple[str, str, str, str]]:
        """Return (verifier, response, answer, extra) of each row."""
        extra = self.extra or [""] * self.num_rows
        return list(zip(self.verifier, self.response, self.answer, extra, strict=True))

    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Return [R] int64: prompt and response tokens of each row."""
        return self.response_tokens.lengths + self.prompt_tokens.lengths[self.group_index]

    def routing_of(self, row: int) -> Array | None:
        """Return [prompt + response tokens, layers, experts per token] of one row, as a view."""
        if self.routing is None or self.experts_per_token is None:
            return None
        shape = int(self.num_tokens()[row]), -1, int(self.experts_per_token[row])
        return self.routing.row(row).reshape(shape)

    @property
    def num_groups(self) -> int:
        """Number of groups G."""
        return len(self.prompt_tokens)

    def columns(self) -> dict[str, ColumnData]:
        """Return the data of every column, prompt tokens repeated for each row of a group."""
        return {**super().columns(), "prompt_tokens": self.prompt_tokens.take(self.group_index)}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Self:
        """Build the set from its columns."""
        prompts = columns["prompt_tokens"].take(_starts(columns["group_index"]))
        return cls(**{**columns, "prompt_tokens": prompts})

    def group_starts(self) -> Array:
        """Return [R] bool, True at the first row of each group."""
        return _starts(self.group_index)

    @staticmethod
    def concat(sets: Sequence[RolloutSet]) -> RolloutSet:
        """Put the groups of all sets one after another, renumbering group_index.

        If some sets have the routing, the others get -1; if some are judged, the others have no
        verdicts.
        """
        sets = [part for part in sets if part.num_rows]
        if not sets:
            return RolloutSet.empty()
        known = next((k for part in sets if (k := part.routing_of(0)) is not None), None)
        if known is not None:
            choices = known.shape[1:]
            for place, part in enumerate(sets):
                if part.routing is not None:
                    continue
                unknown = [np.full(n * math.prod(choices), -1) for n in part.num_tokens().tolist()]
                sets[place] = replace(
                    part,
                    routing=Ragged.from_lists(unknown, known.dtype),
                    experts_per_token=np.full(part.num_rows, choices[-1], np.int32),
                )
        for spec in RolloutSet.COLUMNS:
            if spec.kind in _BLANK and any(getattr(part, spec.name) is not None for part in sets):
                sets = [_with_column(part, spec) for part in sets]
        joined = join([vars(s) for s in sets], RolloutSet.COLUMNS)
        shift = np.cumsum([0, *[s.num_groups for s in sets[:-1]]])
        joined["group_index"] = np.concatenate(
            [s.group_index + np.int32(by) for s, by in zip(sets, shift, strict=True)]
        )
        return RolloutSet(**joined)


def _with_column(part: RolloutSet, spec: Column) -> RolloutSet:
    """Return a set with a column that it may lack."""
    if getattr(part, spec.name) is not None:
        return part
    blank = _BLANK[spec.kind]
    is_text = isinstance(blank, str)
    data: Any = [blank] * part.num_rows if is_text else np.full(part.num_rows, blank, spec.kind)
    return replace(part, **{spec.name: data})


def _starts(group_index: Array) -> npt.NDArray[np.bool_]:
    starts = np.ones(len(group_index), dtype=np.bool_)
    starts[1:] = group_index[1:] != group_index[:-1]
    return starts
