"""How many examples a run takes of tests that draw them: a tenth, or all of them with `--full`."""

from __future__ import annotations

full = False
"""Whether this run has `--full`; tests/conftest.py sets it before it imports tests."""


def examples(whole: int) -> int:
    """Return a tenth of the number, or 20 where that is less; never more than the number."""
    return whole if full else min(whole, max(20, whole // 10))
