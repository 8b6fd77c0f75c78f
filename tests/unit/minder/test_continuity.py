"""Runs of candidates: their borders, tolerated gaps and masked windows."""

from __future__ import annotations

import numpy as np
import pytest

from planish.minder.detect.continuity import NOBODY, Run, first_long_run, runs


def candidates(*pieces):
    return np.concatenate([np.full(count, machine) for machine, count in pieces])


@pytest.mark.parametrize(("length", "fires"), [(239, False), (240, False), (241, True)])
def test_a_run_must_last_for_more_than_240_windows(length, fires):
    found = runs(candidates((NOBODY, 30), (5, length), (NOBODY, 30)))
    assert (first_long_run(found, 240) is not None) == fires


def test_one_other_candidate_ends_a_run_as_published():
    found = runs(candidates((5, 130), (2, 1), (5, 130)))
    assert [(r.machine, r.length) for r in found] == [(5, 130), (2, 1), (5, 130)]


def test_three_windows_in_a_long_run_are_tolerated_and_four_are_not():
    for gap, expected in ((3, [403]), (4, [200, 200])):
        found = runs(candidates((5, 200), (NOBODY, gap), (5, 200)), gap_tolerance=3)
        assert [r.length for r in found if r.machine == 5] == expected


def test_a_tolerated_gap_is_at_most_2_percent_of_the_run():
    found = runs(candidates((5, 20), (NOBODY, 1), (5, 20)), gap_tolerance=3)
    assert [r.length for r in found if r.machine == 5] == [20, 20]


def test_masked_windows_neither_count_nor_end_a_run():
    found = candidates((5, 100), (NOBODY, 50), (5, 145))
    masked = np.zeros(len(found), bool)
    masked[100:150] = True
    assert runs(found, masked)[0] == Run(5, 0, 294, 245)


def test_of_two_runs_that_begin_together_the_first_machine_wins():
    long = [Run(7, 0, 300, 300), Run(3, 0, 300, 300), Run(1, 5, 300, 295)]
    assert first_long_run(long, 240) == long[1]
