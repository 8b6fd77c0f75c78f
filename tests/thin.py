"""How many examples and cases a run takes: a sample, or all of them with `--full`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")

full = False
"""Whether this run has `--full`; tests/conftest.py sets it before it imports tests."""


def examples(whole: int) -> int:
    """Return a tenth of the number, or 20 where that is less; never more than the number."""
    return whole if full else min(whole, max(20, whole // 10))


def third(cases: Sequence[Case]) -> Sequence[Case]:
    """Return every third of cases that take seconds each."""
    return cases if full else cases[::3]
