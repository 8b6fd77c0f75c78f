"""Few requests for many ranges."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from planish.checkpoint.plan import coalesce as plan_coalesce
from planish.checkpoint.plan.coalesce import (
    REQUEST_BYTES,
    coalesce,
    cut_requests,
    piece_ranges,
)

KIB, MIB = 1 << 10, 1 << 20


def joined(pairs, *, size=1 << 40, lines=None):
    """Return the requests for ranges of one file, as (start, stop)."""
    start, stop = np.array(pairs, np.int64).reshape(-1, 2).T
    line = np.zeros(len(start), np.int64) if lines is None else np.array(lines)
    sizes = np.full(int(line.max(initial=0)) + 1, size)
    found = coalesce(line, start, stop, sizes)
    rows = [tuple(map(int, row)) for row in zip(*found, strict=True)]
    return rows if lines is not None else [row[1:] for row in rows]


def blocks(pairs):
    return [(low // MIB, high // MIB) for low, high in pairs]


def test_requests_are_whole_blocks_within_the_file():
    assert joined([(MIB + 5, MIB + 6)], size=10 * MIB) == [(MIB, 2 * MIB)]
    assert joined([(MIB + 5, MIB + 6)], size=MIB + 100) == [(MIB, MIB + 100)]


def test_ranges_are_sorted_and_overlaps_are_read_once():
    pairs = [(3 * MIB, 4 * MIB), (0, 2 * MIB), (MIB, 3 * MIB), (MIB, 2 * MIB)]
    assert joined(pairs) == [(0, 4 * MIB)]


@pytest.mark.parametrize("gap", [256 * KIB, 256 * KIB + 1])
def test_gaps_up_to_256_kib_are_read_over_whatever_they_cost(gap, monkeypatch):
    # Blocks of 64 KiB; one byte, a gap, one byte.
    monkeypatch.setattr(plan_coalesce, "BLOCK", 64 * KIB)
    found = joined([(64 * KIB - 1, 64 * KIB), (64 * KIB + gap, 64 * KIB + gap + 1)])
    whole = [(0, 6 * 64 * KIB)] if gap == 256 * KIB else None
    assert found == (whole or [(0, 64 * KIB), (5 * 64 * KIB, 6 * 64 * KIB)])


def test_wider_gaps_are_read_over_up_to_an_eighth_of_the_request():
    # 7 MiB, a gap of g, 8 MiB: an eighth of 16 MiB is 2 MiB.
    assert blocks(joined([(0, 6 * MIB), (8 * MIB, 16 * MIB)])) == [(0, 16)]
    assert blocks(joined([(0, 5 * MIB), (8 * MIB, 16 * MIB)])) == [(0, 5), (8, 16)]


def test_the_waste_of_all_gaps_counts():
    # Each gap alone is an eighth of its neighbours; together with the first one it is more.
    pairs = [(0, 7 * MIB), (8 * MIB, 9 * MIB), (10 * MIB, 11 * MIB)]
    assert blocks(joined(pairs)) == [(0, 9), (10, 11)]


def test_long_requests_are_cut_into_16_mib():
    assert REQUEST_BYTES == 16 * MIB
    assert blocks(joined([(MIB, 40 * MIB)])) == [(1, 17), (17, 33), (33, 40)]
    line, start, stop = cut_requests(*(np.array([x]) for x in (3, 0, 16 * MIB)))
    assert (line.tolist(), start.tolist(), stop.tolist()) == ([3], [0], [16 * MIB])


def test_files_are_never_joined():
    pairs = [(0, MIB), (0, 5), (MIB, 2 * MIB)]
    assert joined(pairs, lines=[0, 1, 0]) == [(0, 0, 2 * MIB), (1, 0, MIB)]


def test_no_ranges_are_no_requests():
    assert joined([]) == []


def test_random_ranges_are_covered_and_requests_are_disjoint():
    rng = random.Random(1)
    for _ in range(200):
        count, size = rng.randint(1, 30), rng.randint(1, 60) * MIB + rng.randint(0, MIB)
        lows = [rng.randrange(size) for _ in range(count)]
        pairs = [(low, min(size, low + rng.randint(1, 3 * MIB))) for low in lows]
        found = joined(pairs, size=size)
        assert all(low % MIB == 0 and (high % MIB == 0 or high == size) for low, high in found)
        assert all(high - low <= 16 * MIB for low, high in found)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))
        mark = np.zeros(size // KIB + 2, bool)
        for low, high in found:
            mark[low // KIB : -(-high // KIB)] = True
        assert all(mark[low // KIB : -(-high // KIB)].all() for low, high in pairs)


def ranges_of(lengths, strides, itemsize=4):
    lengths, strides = np.array([lengths], np.int64), np.array([strides], np.int64)
    _, start, stop = piece_ranges(np.array([100]), lengths, strides, np.array([itemsize]))
    return list(zip(start.tolist(), stop.tolist(), strict=True))


def test_a_run_is_one_range():
    assert ranges_of((3, 5), (20, 4)) == [(100, 160)]


def test_a_piece_with_gaps_is_fetched_by_what_costs_less(monkeypatch):
    # Two rows of 20 bytes, 10 MB apart: 10 ms of bytes against 2 ms of one more request.
    far = ranges_of((2, 5), (10_000_000, 4))
    assert far == [(100, 120), (10_000_100, 10_000_120)]
    assert ranges_of((2, 5), (1_000_000, 4)) == [(100, 1_000_120)]
    monkeypatch.setattr(plan_coalesce, "REQUEST_SECONDS", 2e-1)
    assert ranges_of((2, 5), (10_000_000, 4)) == [(100, 10_000_120)]


def test_gaps_of_outer_dimensions_are_left_out_and_inner_ones_read_over():
    found = ranges_of((2, 3, 1), (50_000_000, 1000, 4))
    assert found == [(100, 2104), (50_000_100, 50_002_104)]
