"""Parts: groups of machines whose values differ from the rest of the job, e.g. behind one switch.

The paper does not look for parts. If a fifth to a half of the machines have the same difference, no
normal score is large, but the values have two modes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planish.minder.detect.distances import median_of_known
from planish.minder.detect.frame import F32, I64, Mask

BLOCK_SECONDS = 30
"""Length of a block; a machine is compared by its median over a block, which covers an iteration of
most jobs."""
_SEPARATION = 3.0
"""Smallest gap between two sides, in units of the mean deviation within them."""
_SAME_SHARE = 0.9
"""Share of the machines that must stay on their side from one block to the next."""


@dataclass(frozen=True)
class Part:
    """A group of machines that differed from the rest of the job for long enough."""

    columns: I64
    """Column numbers of the smaller side; of two equal sides the one without the first machine."""
    start: int
    """Unix second at which the group began to differ."""
    stop: int
    """Unix second after the last second in which the group differed."""

    @property
    def seconds(self) -> int:
        """Seconds for which the group differed."""
        return self.stop - self.start


def find_parts(
    ts: I64,
    values: F32,
    masked: Mask,
    ignored: Mask,
    *,
    gap: float,
    smallest: int,
    max_masked: float,
) -> list[Part]:
    """Return the groups that differ for more than one block without a break, in order of time.

    Args:
        ts: [T] unix seconds.
        values: [T, N] in 0 .. 1, of machines that are compared with each other.
        masked: [T, N], True where nothing is known.
        ignored: [T], seconds that end a run.
        gap: least distance between the nearest machines of the two sides.
        smallest: fewest machines of a side.
        max_masked: share of unknown machines above which a block neither counts nor ends a run.
    """
    first = int(-ts[0] % BLOCK_SECONDS) if len(ts) else 0
    blocks = (len(ts) - first) // BLOCK_SECONDS
    if blocks < 2 or values.shape[1] < 2 * smallest:
        return []
    medians = block_medians(values, masked, first, blocks)
    known = np.isfinite(medians)
    counted = np.flatnonzero((~known).mean(axis=1) <= max_masked)
    sides, apart = _sides(medians[counted], gap, smallest)
    rows = slice(first, first + blocks * BLOCK_SECONDS)
    apart &= ~ignored[rows].reshape(blocks, BLOCK_SECONDS).max(axis=1)[counted]
    begin, parts = 0, []
    for row in range(len(counted)):
        if not apart[row]:
            begin = row + 1
        elif not _same(sides[begin], sides[row]):
            begin = row
        goes_on = row + 1 < len(counted) and apart[row + 1] and _same(sides[begin], sides[row + 1])
        if not goes_on and row > begin:
            ends = counted[[begin, row]] + [0, 1]
            start, stop = (int(ts[0]) + first + ends * BLOCK_SECONDS).tolist()
            low, high = np.flatnonzero(sides[row] < 0), np.flatnonzero(sides[row] > 0)
            is_low_smaller = len(low) < len(high) or (len(low) == len(high) and 0 not in low)
            parts.append(Part(low if is_low_smaller else high, start, stop))
    return parts


def block_medians(values: F32, masked: Mask, first: int, blocks: int) -> F32:
    """Return [B, N], each machine's median in each block; NaN where less than half of it is
    known.
    """
    rows = slice(first, first + blocks * BLOCK_SECONDS)
    shape = (blocks, BLOCK_SECONDS, values.shape[1])
    pieces, unknown = values[rows].reshape(shape), masked[rows].reshape(shape)
    lines = pieces.transpose(0, 2, 1).reshape(-1, BLOCK_SECONDS)
    here = ~unknown.transpose(0, 2, 1).reshape(-1, BLOCK_SECONDS)
    medians = median_of_known(lines, here)
    medians[2 * here.sum(axis=1) < BLOCK_SECONDS] = np.nan
    return medians.reshape(blocks, -1)


def _sides(medians: F32, gap: float, smallest: int) -> tuple[I64, Mask]:
    """Cut each row [N] at its widest gap. Return sides [B, N] (-1, 1, or 0 if unknown), and [B],
    True where the gap is wide enough.
    """
    ordered = np.sort(medians, axis=1)
    counts = np.isfinite(medians).sum(axis=1, keepdims=True)
    steps = np.diff(ordered, axis=1)
    below = np.arange(1, medians.shape[1])[None, :]
    allowed = (below >= smallest) & (counts - below >= smallest) & np.isfinite(steps)
    steps = np.where(allowed, steps, -1.0)
    place = steps.argmax(axis=1)
    rows = np.arange(len(medians))
    widest = steps[rows, place]
    cut = (ordered[rows, place] + ordered[rows, place + 1]) / 2
    sides = np.sign(medians - cut[:, None])
    sides = np.where(np.isfinite(sides), sides, 0).astype(np.int64)
    apart = widest > gap
    for row in np.flatnonzero(apart).tolist():
        split = place[row] + 1
        both = (ordered[row, :split], ordered[row, split : counts[row, 0]])
        # The values of each side are sorted, so the middle one is the median.
        within = sum(np.abs(side - side[len(side) // 2]).sum() for side in both) / counts[row, 0]
        apart[row] = widest[row] > _SEPARATION * within
    return sides, apart


def _same(a: I64, b: I64) -> bool:
    """Return whether the machines that are known in both rows are on the same sides."""
    both = (a != 0) & (b != 0)
    return bool(both.any() and (a[both] == b[both]).mean() >= _SAME_SHARE)
