"""Prompts and worked traces: what curation hands to the rest of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from planish.records.schema import Column, Messages, Record, hex_id_faults, take_rows


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


@dataclass(frozen=True, eq=False)
class PromptSet(Record):
    """Problems with verifiable answers; one row per prompt, no tokens yet.

    Example:
        >>> ask = [{"role": "user", "content": "1+1="}]
        >>> prompts = PromptSet(
        ...     prompt_id=[prompt_id(ask, "2")], messages=[ask], answer=["2"],
        ...     verifier=["math"], source=["sums"], pass_rate=np.array([0.5], np.float32))
        >>> prompts.validate(), prompts.num_rows
        (None, 1)
    """

    SCHEMA: ClassVar[str] = "prompts/1"
    REMEDY: ClassVar[str] = "curation writes this set"
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("prompt_id", "text", "16 hex digits from messages and answer"),
        Column("messages", "messages", "role and content, before any chat template"),
        Column("answer", "text", "ground truth as the verifier expects it"),
        Column("verifier", "text", "key of the verifier table"),
        Column("source", "text", "data set and licence tag"),
        Column("pass_rate", "float32", "measured on a reference policy; NaN when not measured"),
    )

    prompt_id: list[str]
    """[P] 16 hex digits each, no two equal."""
    messages: list[Messages]
    """[P] lists of {role, content}, before any chat template."""
    answer: list[str]
    """[P] ground truth as the verifier expects it."""
    verifier: list[str]
    """[P] keys of the verifier table."""
    source: list[str]
    """[P] data set and licence tag."""
    pass_rate: npt.NDArray[np.float32]
    """[P] float32 in 0..1, measured on a reference policy; NaN when not measured."""

    @property
    def num_rows(self) -> int:
        """Number of prompts P."""
        return len(self.prompt_id)

    def take(self, indices: Sequence[int]) -> PromptSet:
        """Return the prompts `indices` in that order."""
        rows = np.asarray(indices, dtype=np.int64)
        return PromptSet(**{name: take_rows(data, rows) for name, data in self.columns().items()})

    def value_faults(self) -> list[str]:
        """Return what is wrong with values of the right form."""
        faults = [*hex_id_faults("prompt_id", self.prompt_id), *_repeated(self.prompt_id)]
        rates = self.pass_rate
        outside = np.flatnonzero(~np.isnan(rates) & ~((rates >= 0) & (rates <= 1)))
        faults += [
            f"`pass_rate` must be in 0..1 or NaN, got {rates[row]} in row {row}" for row in outside
        ]
        return faults


@dataclass(frozen=True, eq=False)
class TraceSet(Record):
    """Worked solutions for the supervised cold start; one row per trace.

    Example:
        >>> ask = [{"role": "user", "content": "1+1="}]
        >>> TraceSet([prompt_id(ask, "2")], [ask], ["1+1=2"], ["sums"]).num_rows
        1
    """

    SCHEMA: ClassVar[str] = "traces/1"
    REMEDY: ClassVar[str] = "curation writes this set"
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("prompt_id", "text", "16 hex digits from messages and answer"),
        Column("messages", "messages", "role and content, before any chat template"),
        Column("response", "text", "worked solution, without the end token"),
        Column("source", "text", "data set and licence tag"),
    )

    prompt_id: list[str]
    """[P] 16 hex digits each; a prompt may have several traces."""
    messages: list[Messages]
    """[P] lists of {role, content}, before any chat template."""
    response: list[str]
    """[P] worked solutions, without the end token."""
    source: list[str]
    """[P] data set and licence tag."""

    @property
    def num_rows(self) -> int:
        """Number of traces P."""
        return len(self.prompt_id)

    def value_faults(self) -> list[str]:
        """Return what is wrong with values of the right form."""
        return hex_id_faults("prompt_id", self.prompt_id)


def _repeated(ids: Sequence[str]) -> list[str]:
    first: dict[str, int] = {}
    faults = []
    for row, value in enumerate(ids):
        if first.setdefault(value, row) != row:
            faults.append(
                f"`prompt_id` must not repeat, got {value!r} in rows {first[value]} and {row}"
            )
    return faults
