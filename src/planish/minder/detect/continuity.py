"""From candidates of single windows to machines that stay candidate for long enough.

Source: Minder, arXiv 2411.01791, section 4.5 (continuity of four minutes); tolerance of gaps and
masked windows are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

NOBODY = -1
"""No candidate in this window."""

_TOLERATED_SHARE = 0.02


@dataclass(frozen=True)
class Run:
    """Consecutive windows with the same candidate.

    Example:
        >>> Run(3, 10, 250, 241).length
        241
    """

    machine: int
    """Column of the frame."""
    first: int
    """First window of the run."""
    last: int
    """Last window of the run with this candidate."""
    length: int
    """Windows that counted, tolerated gaps included, masked windows not."""


def runs(candidates: I64, masked: Mask | None = None, *, gap_tolerance: int = 0) -> list[Run]:
    """Return all runs, in the order of their first windows.

    A window with another or no candidate ends a run, unless the tolerance allows it: at most
    `gap_tolerance` such windows, and at most 2 % of the run, and then the same machine again.
    Masked windows neither count nor end anything.

    Args:
        candidates: [W], column of the candidate or `NOBODY`.
        masked: [W], windows of which too little is known.
        gap_tolerance: windows in a run that may lack the candidate.

    Example:
        >>> [(r.machine, r.length) for r in runs(np.array([2, 2, -1, 2, 5]))]
        [(2, 2), (2, 1), (5, 1)]
    """
    known = np.arange(len(candidates)) if masked is None else np.flatnonzero(~masked)
    found = candidates[known]
    pieces = _pieces(found)
    result: list[Run] = []
    # A tolerated gap may hold another candidate's windows, so every machine joins its own pieces.
    for machine in sorted({m for m, _, _ in pieces if m != NOBODY}):
        mine = [(low, high) for m, low, high in pieces if m == machine]
        low, high, gaps = *mine[0], 0
        for next_low, next_high in mine[1:]:
            gap = next_low - high - 1
            length = next_high - low + 1
            if gaps + gap <= min(gap_tolerance, _TOLERATED_SHARE * length):
                high, gaps = next_high, gaps + gap
                continue
            result.append(_run(machine, low, high, known))
            low, high, gaps = next_low, next_high, 0
        result.append(_run(machine, low, high, known))
    return sorted(result, key=lambda run: (run.first, run.machine))


def _pieces(found: I64) -> list[tuple[int, int, int]]:
    """Return (candidate, first, last) of each stretch of equal candidates."""
    if not len(found):
        return []
    starts = np.append(0, np.flatnonzero(np.diff(found)) + 1)
    ends = np.append(starts[1:] - 1, len(found) - 1)
    return list(zip(found[starts].tolist(), starts.tolist(), ends.tolist(), strict=True))


def _run(machine: int, low: int, high: int, known: I64) -> Run:
    return Run(machine, int(known[low]), int(known[high]), high - low + 1)


def runs_of(machine: int, named: Mask, masked: Mask, *, gap_tolerance: int) -> list[Run]:
    """Return the runs of one machine, whoever else is candidate.

    Args:
        machine: its column.
        named: [W], windows in which it is candidate.
        masked: as for `runs`.
        gap_tolerance: as for `runs`.
    """
    return runs(np.where(named, machine, NOBODY), masked, gap_tolerance=gap_tolerance)


def long_runs(named: Mask, masked: Mask, min_windows: int, *, gap_tolerance: int) -> list[Run]:
    """Return for each machine its first run of more than `min_windows`, by machine.

    Args:
        named: [W, N], who is candidate in which windows.
        masked: as for `runs`.
        min_windows: of a run.
        gap_tolerance: as for `runs`.
    """
    # Whoever is candidate in so few windows has no such run, gaps included.
    often = np.flatnonzero(named.sum(axis=0) > 0.9 * min_windows).tolist()
    each = (runs_of(n, named[:, n], masked, gap_tolerance=gap_tolerance) for n in often)
    first = (first_long_run(mine, min_windows) for mine in each)
    return [run for run in first if run is not None]


def first_long_run(found: list[Run], min_windows: int) -> Run | None:
    """Return the run that was first to last for more than `min_windows`; ties by machine."""
    long = [run for run in found if run.length > min_windows]
    if not long:
        return None
    return min(long, key=lambda run: (run.first, run.machine))
