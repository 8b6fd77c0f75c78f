"""A problem on its way through curation, and the ledger that accounts for every one."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

Messages = list[dict[str, str]]

MAX_EXAMPLES = 3
"""Examples kept for each reason."""

MUCH = 0.2
"""People are told of a filter that drops more than this part of its rows."""

_WORD = re.compile(r"[0-9]+(?:\.[0-9]+)?|[^\W\d_]+|[-+*/=%<>^()]")


@dataclass(frozen=True)
class Problem:
    """One candidate prompt.

    Example:
        >>> Problem("1+1=", [{"role": "user", "content": "1+1="}], "2", "trace", "sums").key
        '1 + 1 ='
    """

    question: str
    """The problem alone, without instructions: what duplicates are judged by."""
    messages: Messages
    """What the policy will see."""
    answer: str
    """Ground truth."""
    verifier: str
    """Key in the verifier table."""
    source: str
    """Data set."""
    trace: str | None = None
    """Worked solution that ends in the answer."""
    family: str = ""
    """Problems of one family go to the same side of the split; empty: the normalised question."""
    origin: str = ""
    """Where it came from, for the report: `line 12`."""
    pass_rate: float = float("nan")
    """Measured on a reference policy."""
    extra: str = ""
    """Columns of the row for reward functions, as a JSON object; empty for none."""

    @property
    def key(self) -> str:
        """Normalised question."""
        return " ".join(words(self.question))

    @property
    def split_key(self) -> str:
        """What the split hashes."""
        return self.family or self.key


@dataclass(frozen=True)
class Drop:
    """A row that a filter took out."""

    reason: str
    """Code, in the form of an identifier."""
    example: str
    """The row in short, with its origin."""


def add_drop(drops: list[Drop], new: Drop, shown: dict[str, list[Drop]]) -> None:
    """Append to the drops of one filter; beyond the examples that people see each takes no memory.

    Args:
        drops: gets one more.
        new: of which only the reason counts where its examples are there already.
        shown: examples by reason; kept by the caller for this function.

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
    """What it does."""
    unit: str
    """What it counts: lines, problems, steps, prompts."""
    num_in: int
    """Rows that came in."""
    num_out: int
    """Rows that went on."""
    reasons: dict[str, int]
    """Rows dropped by reason code; with `num_out` they add up to `num_in`."""
    examples: dict[str, list[str]]
    """A few dropped rows by reason code."""
    is_choice: bool = False
    """What is left out is not wanted here, such as held-out problems: nothing is wrong with it."""

    @property
    def num_dropped(self) -> int:
        """Rows that did not go on."""
        return self.num_in - self.num_out

    @property
    def drops_much(self) -> bool:
        """Tell whether people should look at what a filter takes out."""
        return not self.is_choice and self.num_dropped > MUCH * self.num_in


@dataclass
class CurationLedger:
    """The filters of one curation in order.

    Example:
        >>> ledger = CurationLedger()
        >>> ledger.record("length", "prompts", 3, 2, [Drop("too_long", "line 2")])
        >>> ledger.filters[0].reasons
        {'too_long': 1}
    """

    filters: list[Filter] = field(default_factory=list)
    """In the order in which they ran."""

    def record(
        self,
        name: str,
        unit: str,
        num_in: int,
        num_out: int,
        drops: Sequence[Drop],
        *,
        is_choice: bool = False,
    ) -> None:
        """Add the counts of one filter; every row must be accounted for."""
        assert num_in == num_out + len(drops), (name, num_in, num_out, len(drops))
        reasons: dict[str, int] = {}
        examples: dict[str, list[str]] = {}
        for drop in drops:
            reasons[drop.reason] = reasons.get(drop.reason, 0) + 1
            if len(seen := examples.setdefault(drop.reason, [])) < MAX_EXAMPLES:
                seen.append(drop.example)
        ordered = dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))
        self.filters.append(Filter(name, unit, num_in, num_out, ordered, examples, is_choice))

    def counts(self) -> str:
        """Return one line: the counts of every filter."""
        return ", ".join(
            f"{f.name} {f.num_in} -> {f.num_out}"
            + (f" ({', '.join(f'{k} {v}' for k, v in f.reasons.items())})" if f.reasons else "")
            for f in self.filters
        )


def words(text: str) -> list[str]:
    """Return the words, numbers and operators of `text`, lower case, in one Unicode form."""
    return list(_words(text))


@lru_cache(maxsize=1 << 15)
def _words(text: str) -> tuple[str, ...]:
    """Every filter asks again: keep the newest."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def fraction_of(text: str) -> float:
    """Map text to a number in [0, 1) that is equal on every machine."""
    digest = hashlib.sha256(f"planish/split/{text}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


def sift(
    problems: Sequence[Problem], judge: Callable[[Problem], Drop | None]
) -> tuple[list[Problem], list[Drop]]:
    """Return the problems that `judge` keeps, in order, and why it took out each other."""
    kept: list[Problem] = []
    drops: list[Drop] = []
    for problem in problems:
        taken_out = judge(problem)
        if taken_out is None:
            kept.append(problem)
        else:
            drops.append(taken_out)
    return kept, drops


def drop(problem: Problem, reason: str) -> Drop:
    """Return the ledger entry for a problem that is taken out."""
    return Drop(reason, f"{problem.origin}: {problem.question} -> {problem.answer}")
