"""Runs of candidates: their borders, tolerated gaps and masked windows."""

import numpy as np
import pytest

from planish.minder.detect.continuity import Rule, Run, long_runs, runs


def windows(*pieces):
    """Return [W, 8], who is candidate, from (machine or None, number of windows)."""
    named = np.zeros((sum(count for _, count in pieces), 8), bool)
    start = 0
    for machine, count in pieces:
        if machine is not None:
            named[start : start + count, machine] = True
        start += count
    return named


def lengths(named, machine=5, **options):
    found = runs(machine, named[:, machine], np.zeros(len(named), bool), **options)
    return [run.length for run in found]


def longest(named, needed=240.0, *, resting=(), sample=0):
    quiet = np.zeros(len(named), bool)
    quiet[list(resting)] = True
    machines = named.shape[1]
    samples = np.full(machines, sample)
    rule = Rule(np.full(machines, needed), samples, quiet, 0)
    return long_runs(named, np.zeros(len(named), bool), rule)


@pytest.mark.parametrize(("length", "fires"), [(239, False), (240, False), (241, True)])
def test_a_run_must_last_for_more_than_240_windows(length, fires):
    named = windows((None, 30), (5, length), (None, 30))
    found = longest(named)
    assert found == [Run(5, 30, 29 + length, length)] * fires


def test_one_other_candidate_ends_a_run_as_published():
    named = windows((5, 130), (2, 1), (5, 130))
    assert (lengths(named), lengths(named, 2)) == ([130, 130], [1])


def test_three_windows_in_a_long_run_are_tolerated_and_four_are_not():
    for gap, expected in ((3, [403]), (4, [200, 200])):
        for between in (None, 2):
            assert lengths(windows((5, 200), (between, gap), (5, 200)), gap_tolerance=3) == expected


def test_a_tolerated_gap_is_at_most_2_percent_of_the_run():
    assert lengths(windows((5, 20), (None, 1), (5, 20)), gap_tolerance=3) == [20, 20]


def test_masked_windows_neither_count_nor_end_a_run():
    named = windows((5, 100), (None, 50), (5, 145))
    masked = np.zeros(len(named), bool)
    masked[100:150] = True
    assert runs(5, named[:, 5], masked) == [Run(5, 0, 294, 245)]


def test_of_two_runs_that_begin_together_the_first_machine_comes_first():
    named = windows((None, 5), (1, 295)) | windows((7, 300)) | windows((3, 300))
    found = longest(named)
    assert [run.machine for run in found] == [3, 7, 1]


def test_windows_in_which_all_rest_do_not_end_a_run_and_others_do():
    named = windows((5, 150), (None, 20), (5, 150))
    assert longest(named) == []
    assert longest(named, resting=range(150, 170)) == [Run(5, 0, 319, 300)]
    # A machine that is a candidate at rest too counts on.
    assert longest(windows((5, 300)), resting=range(150, 170)) == [Run(5, 0, 299, 300)]


def test_one_held_sample_may_lack_the_candidate_where_samples_are_held():
    named = windows((5, 140), (None, 27), (5, 140))
    assert longest(named) == []
    assert [run.length for run in longest(named, sample=27)] == [307]
    assert longest(windows((5, 140), (None, 28), (5, 140)), sample=27) == []


@pytest.mark.parametrize(("burst", "fires"), [(27, False), (28, True)])
def test_a_burst_that_a_single_sample_has_met_is_no_part_of_a_run(burst, fires):
    for pieces in ((burst, 200), (200, burst)):
        named = windows((5, pieces[0]), (None, 13), (5, pieces[1]))
        assert bool(longest(named, sample=27)) is fires
