"""Prompts and worked traces: the records that curation passes to the rest of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from planish.records.schema import Messages, Record, column, record, take_rows


def prompt_id(messages: Sequence[Mapping[str, str]], answer: str) -> str:
    """Return the first 16 hex digits of the sha256 of canonical JSON of `[messages, answer]`.

    Example:
        >>> prompt_id([{"role": "user", "content": "1+1="}], "2")
        '9166b306e2904741'
    """
    canonical = json.dumps(
        [[dict(m) for m in messages], answer], sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:16]


@record
class PromptSet(Record):
    """Problems with verifiable answers; one row per prompt, no tokens yet.

    Example:
        >>> ask = [{"role": "user", "content": "1+1="}]
        >>> prompts = PromptSet(
        ...     prompt_id=[prompt_id(ask, "2")], messages=[ask], answer=["2"],
        ...     verifier=["math"], source=["sums"], pass_rate=np.array([0.5], np.float32))
        >>> prompts.num_rows
        1
    """

    SCHEMA: ClassVar[str] = "prompts/1"

    prompt_id: list[str] = column("text", "16 hex digits from messages and answer")
    messages: list[Messages] = column("messages", "role and content, before any chat template")
    answer: list[str] = column("text", "ground truth as the verifier expects it")
    verifier: list[str] = column("text", "key of the verifier table")
    source: list[str] = column("text", "data set and licence tag")
    pass_rate: npt.NDArray[np.float32] = column(
        "float32", "measured on a reference policy; NaN when not measured", may_be_nan=True
    )
    extra: list[str] | None = column(
        "text", "JSON: columns of the data row for reward functions; empty for none", default=None
    )
    """None where no function takes any."""

    def take(self, indices: Sequence[int]) -> PromptSet:
        """Return the prompts `indices` in that order."""
        rows = np.asarray(indices, dtype=np.int64)
        return PromptSet(**{name: take_rows(data, rows) for name, data in self.columns().items()})


@record
class TraceSet(Record):
    """Worked solutions for the supervised cold start; a prompt may have several.

    Example:
        >>> ask = [{"role": "user", "content": "1+1="}]
        >>> TraceSet([prompt_id(ask, "2")], [ask], ["1+1=2"], ["sums"]).num_rows
        1
    """

    SCHEMA: ClassVar[str] = "traces/1"

    prompt_id: list[str] = column("text", "16 hex digits from messages and answer")
    messages: list[Messages] = column("messages", "role and content, before any chat template")
    response: list[str] = column("text", "worked solution, without the end token")
    source: list[str] = column("text", "data set and licence tag")
