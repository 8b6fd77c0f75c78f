"""A problem during curation, and the ledger that accounts for every one."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")

Messages = list[dict[str, str]]

MAX_EXAMPLES = 3
MUCH = 0.2
"""A filter that drops a larger share of all rows, or of a source's rows, gives a warning."""
MUCH_ROWS = 10
"""Least number of rows of a source for that warning."""

_TYPOGRAPHIC = (
    r""".,;:!?'"`$\\{}\[\]"""
    r"\u2013\u2014\u2018\u2019\u201c\u201d\u2026\xab\xbb\xad\u200b-\u200f\u2060\ufeff"
)
_WORD = re.compile(rf"[0-9]+(?:\.[0-9]+)?|[^\W\d_]+|_|[^\w\s{_TYPOGRAPHIC}]")
"""Signs with a meaning, such as those of a drawn grid, are words; punctuation marks are not."""


@dataclass(frozen=True)
class Problem:
    """One candidate prompt.

    Example:
        >>> Problem("1+1=", [{"role": "user", "content": "1+1="}], "2", "trace", "sums").key
        '1 + 1 ='
    """

    question: str
    """Problem without instructions; equal ones are duplicates."""
    messages: Messages
    answer: str
    verifier: str
    source: str
    trace: str | None = None
    family: str = ""
    """The split keeps a family on one side; empty: the family is the normalised question."""
    origin: str = ""
    """Place of the row for the report: `line 12`."""
    pass_rate: float = float("nan")
    """Mean accuracy of a reference policy; NaN if not measured."""
    extra: str = ""
    """Columns of the row for reward functions, as a JSON object; empty for none."""
    unread: str = ""
    """Column of choices that could not be read: the policy does not see them; empty for none."""

    @property
    def key(self) -> str:
        """Normalised question."""
        return " ".join(words(self.question))

    @property
    def split_key(self) -> str:
        """Text whose hash decides the side of the split."""
        return self.family or self.key


@dataclass(frozen=True)
class Drop:
    """A row that a filter took out."""

    reason: str
    example: str
    """The row in short, with its origin."""
    source: str = ""
    """Source of the problem; empty if rows name none."""


def add_drop(drops: list[Drop], new: Drop, shown: dict[str, list[Drop]]) -> None:
    """Append a drop to those of one filter; after `MAX_EXAMPLES`, repeat the last to save memory.

    `shown` has the examples by reason; the caller passes the same dict for all drops of a filter.

    Example:
        >>> drops, shown = [], {}
        >>> for line in range(9):
        ...     add_drop(drops, Drop("empty_line", f"line {line}"), shown)
        >>> len(drops), [drop.example for drop in dict.fromkeys(drops)]
        (9, ['line 0', 'line 1', 'line 2'])
    """
    examples = shown.setdefault(new.reason, [])
    if len(examples) < MAX_EXAMPLES:
        examples.append(new)
    drops.append(examples[-1])


@dataclass(frozen=True)
class Filter:
    """Counts of one filter."""

    name: str
    unit: str
    """Lines, problems, steps or prompts."""
    num_in: int
    num_out: int
    reasons: dict[str, int]
    """Reason code to dropped rows; their sum plus `num_out` is `num_in`."""
    examples: dict[str, list[str]]
    is_choice: bool = False
    """True if dropped rows have no fault: they are held out, for example."""
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Source to (dropped rows, rows in)."""

    @property
    def num_dropped(self) -> int:
        """Number of dropped rows."""
        return self.num_in - self.num_out

    def much(self) -> dict[str, tuple[int, int]]:
        """Return large losses as (dropped, in) by source; the key "" means all rows."""
        if self.is_choice:
            return {}
        if self.num_dropped > MUCH * self.num_in:
            return {"": (self.num_dropped, self.num_in)}
        return {
            source: (dropped, num_in)
            for source, (dropped, num_in) in self.sources.items()
            if num_in >= MUCH_ROWS and dropped > MUCH * num_in
        }


@dataclass
class CurationLedger:
    """The filters of one curation in order.

    Example:
        >>> ledger = CurationLedger()
        >>> ledger.record("length", "prompts", ["a", "b"], [Drop("too_long", "line 2")])
        ['a', 'b']
        >>> ledger.filters[0].reasons
        {'too_long': 1}
    """

    filters: list[Filter] = field(default_factory=list)

    def record(
        self,
        name: str,
        unit: str,
        kept: list[_T],
        drops: Sequence[Drop],
        *,
        is_choice: bool = False,
    ) -> list[_T]:
        """Add the counts of one filter, and return what it kept."""
        reasons = Counter(drop.reason for drop in drops)
        examples: dict[str, list[str]] = {reason: [] for reason in reasons}
        for drop in drops:
            if len(seen := examples[drop.reason]) < MAX_EXAMPLES:
                seen.append(drop.example)
        ordered = dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))
        num_in = len(kept) + len(drops)
        lost = Counter(drop.source for drop in drops)
        every = lost + Counter(getattr(row, "source", "") for row in kept)
        sources = {source: (lost[source], count) for source, count in every.items() if source}
        self.filters.append(
            Filter(name, unit, num_in, len(kept), ordered, examples, is_choice, sources)
        )
        return kept

    def counts(self) -> str:
        """Return one line: the counts of every filter."""
        return ", ".join(
            f"{f.name} {f.num_in} -> {f.num_out}"
            + (f" ({', '.join(f'{k} {v}' for k, v in f.reasons.items())})" if f.reasons else "")
            for f in self.filters
        )


@lru_cache(maxsize=1 << 15)
def words(text: str) -> tuple[str, ...]:
    """Return the words, numbers and operators of `text`, case-folded, in Unicode form NFKC."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def fraction_of(text: str) -> float:
    """Map text to a number in [0, 1) that is equal on every machine."""
    digest = hashlib.sha256(f"planish/split/{text}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


def sift(
    problems: Sequence[Problem], judge: Callable[[Problem], Drop | None]
) -> tuple[list[Problem], list[Drop]]:
    """Return the problems that `judge` keeps, in order, and the drops of all others."""
    judged = [(problem, judge(problem)) for problem in problems]
    return [p for p, taken_out in judged if taken_out is None], [d for _, d in judged if d]


def keep_first(
    problems: Sequence[Problem], key: Callable[[Problem], str]
) -> tuple[list[Problem], list[Drop]]:
    """Return the first problem of each key, and the others as duplicates."""
    first: dict[str, Problem] = {}
    return sift(
        problems, lambda p: None if first.setdefault(key(p), p) is p else drop(p, "duplicate")
    )


def drop(problem: Problem, reason: str) -> Drop:
    """Return the ledger entry for a dropped problem."""
    told = f"{problem.origin}: {problem.question} -> {problem.answer}"
    return Drop(reason, told, problem.source)
