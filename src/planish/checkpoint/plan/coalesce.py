"""Few requests for many byte ranges: which gaps to read over, which pieces to fetch run by run.

Source: the rules are ours; ByteCheckpoint, arXiv 2407.20143, section 4.2 only states that files are
read by ranges.
"""

from __future__ import annotations

import numpy as np

from planish.checkpoint.format.geometry import I64, Flags, before, fresh, order_by, ranges
from planish.checkpoint.format.metafile import BLOCK

GAP_BYTES = 256 << 10
"""Gaps up to this size are always read over."""
WASTE = 0.125
"""Wider gaps are, while they are at most this part of the request."""
REQUEST_BYTES = 16 << 20
REQUEST_SECONDS = 2e-3
"""What a request is taken to cost, whatever its size."""
BYTES_PER_SECOND = 1e9
"""What the store is taken to deliver in one request."""


def coalesce(line: I64, start: I64, stop: I64, sizes: I64) -> tuple[I64, I64, I64]:
    """Turn byte ranges into requests.

    Ranges are sorted; those that overlap or lie close are merged; the result is widened to the
    blocks that checksums cover, and cut into requests of at most 16 MiB.

    Args:
        line: [k], what the bytes belong to: a file, or a part of one. Lines are never merged.
        start: [k], first byte.
        stop: [k], one past the last byte; more than `start`.
        sizes: [lines], bytes of the file of each line.

    Returns:
        [q] line, first byte, one past the last byte; ascending, disjoint within a line.
    """
    line, start, stop = _merge(line, start, stop, GAP_BYTES)
    line, start, stop = _merge_while_cheap(line, start, stop)
    start = start // BLOCK * BLOCK
    stop = np.minimum(-(-stop // BLOCK) * BLOCK, sizes[line])
    line, start, stop = _merge(line, start, stop, 0)
    return cut_requests(line, start, stop)


def cut_requests(line: I64, start: I64, stop: I64) -> tuple[I64, I64, I64]:
    """Cut ranges into requests of at most 16 MiB, from the start of each on."""
    counts = -(-(stop - start) // REQUEST_BYTES)
    source = np.repeat(np.arange(len(start)), counts)
    number = ranges(np.zeros(len(start), np.int64), counts)
    first = start[source] + number * REQUEST_BYTES
    return line[source], first, np.minimum(first + REQUEST_BYTES, stop[source])


def _merge(line: I64, start: I64, stop: I64, gap: int) -> tuple[I64, I64, I64]:
    """Sort ranges, and merge those of a line that are at most `gap` bytes apart."""
    order = order_by(line, start)
    line, start, stop = line[order], start[order], stop[order]
    # All lines on one number line, far enough apart that none reaches into the next.
    span = int(stop.max(initial=0)) + gap + 1
    reach = np.maximum.accumulate(stop + line * span)
    new: Flags = fresh(line)
    new[1:] |= (start + line * span)[1:] > reach[:-1] + gap
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(order)) - 1
    if not len(order):
        return line, start, stop
    return line[first], start[first], reach[last] - line[first] * span


def _merge_while_cheap(line: I64, start: I64, stop: I64) -> tuple[I64, I64, I64]:
    """Merge neighbours of a line while the gaps stay a small part of the merged range."""
    same = ~fresh(line)
    near = same.copy()
    near[1:] &= (start[1:] - stop[:-1]) <= WASTE * (stop[1:] - start[:-1])
    if not near.any():
        # A gap that is too wide for its two neighbours may still be small after other merges, but
        # those begin with a pair that is close enough.
        return line, start, stop
    kept: list[int] = []
    ends: list[int] = []
    begin, end, gaps = 0, 0, 0
    rows = zip(start.tolist(), stop.tolist(), same.tolist(), strict=True)
    for row, (low, high, joined) in enumerate(rows):
        wasted = gaps + low - end
        if joined and wasted <= WASTE * (high - begin):
            end, gaps = high, wasted
            ends[-1] = high
            continue
        kept.append(row)
        ends.append(high)
        begin, end, gaps = low, high, 0
    rows_kept = np.array(kept, np.int64)
    return line[rows_kept], start[rows_kept], np.array(ends, np.int64)


def piece_ranges(first: I64, lengths: I64, strides: I64, itemsize: I64) -> tuple[I64, I64, I64]:
    """Return the byte ranges in which each piece is best fetched.

    A piece that is no run of its file is fetched as one range over all of it, or as several ranges
    without the gaps of its outer dimensions, whichever costs less.

    Args:
        first: [k], first byte of the piece in its file.
        lengths: [k, n], extent.
        strides: [k, n], bytes from one element to the next.
        itemsize: [k], bytes of an element.

    Returns:
        [r] the piece, first byte and one past the last byte of each range.
    """
    # inner[k, j]: bytes from the first to the last element of dimensions j and up;
    # outer[k, j]: how often that comes.
    ones = np.ones((len(first), 1), np.int64)
    reach = np.concatenate([(lengths - 1) * strides, 0 * ones], axis=1)
    inner = np.cumsum(reach[:, ::-1], axis=1)[:, ::-1] + itemsize[:, None]
    outer = np.cumprod(np.concatenate([ones, lengths], axis=1), axis=1)
    seconds = outer * REQUEST_SECONDS + outer * inner / BYTES_PER_SECOND
    level = np.argmin(seconds, axis=1)
    rows = np.arange(len(first))
    counts, extent = outer[rows, level], inner[rows, level]
    piece = np.repeat(rows, counts)
    number = ranges(np.zeros(len(first), np.int64), counts)
    start = first[piece]
    for dim in range(lengths.shape[1] - 1, -1, -1):
        inside = level[piece] > dim
        step = np.where(inside, lengths[piece, dim], 1)
        start = start + (number % step) * strides[piece, dim]
        number = number // step
    return piece, start, start + extent[piece]


def line_bases(sizes: I64) -> I64:
    """Return [f]: where each file begins on one number line, at multiples of a block."""
    return before(-(-sizes // BLOCK) * BLOCK)
