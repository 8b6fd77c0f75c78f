"""How many examples and cases a run takes: a sample, or all of them with `--full`."""

from collections.abc import Sequence
from typing import Any, TypeVar

Case = TypeVar("Case")

full = False
"""Whether this run has `--full`; tests/conftest.py sets it before it imports tests."""


def examples(whole: int) -> int:
    """Return a tenth of the number, or 20 where that is less; never more than the number."""
    return whole if full else min(whole, max(20, whole // 10))


def third(cases: Sequence[Case]) -> Sequence[Case]:
    """Return every third of cases that take seconds each."""
    return cases if full else cases[::3]


def spread(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Part collected tests into those that run and those that only `--full` runs.

    What is marked `full` does not run: another test of its file goes the same way. Of the cases of
    a `long` test every third runs, and at least one; the first test of a file
    begins with its first case, the next with its second, so that each engine and each fault has its
    turn.
    """
    left = {item for item in items if not full and item.get_closest_marker("full")}
    cases: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        is_long = item not in left and item.get_closest_marker("long")
        if not full and is_long and hasattr(item, "callspec"):
            cases.setdefault((str(item.path), item.originalname), []).append(item)
    begun: dict[str, int] = {}
    for (path, _), group in cases.items():
        first = begun[path] = begun.get(path, -1) + 1
        left |= set(group) - set(group[first % min(3, len(group)) :: 3])
    return [item for item in items if item not in left], [item for item in items if item in left]
