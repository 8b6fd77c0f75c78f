"""Frames from raw samples: order, duplicates, gaps, clocks."""

import numpy as np
import pytest

from planish.minder.detect.frame import align, clean


def one(ts, values, *, start=0, end=4, metric="cpu_usage"):
    samples = {metric: {"a": (np.array(ts, float), np.array(values, float))}}
    return align("job", start, end, ["a", "b"], samples).values[metric]


def test_disorder_duplicates_and_broken_values_are_cleaned():
    ts, values = clean(
        np.array([3, 1, 1, 2, 4, 5, 6.0]), np.array([30, 9, 10, np.nan, -1, 1e300, np.inf])
    )
    assert ts.tolist() == [1, 3]
    assert values.tolist() == [10, 30]


def test_a_clock_that_is_off_by_a_part_of_a_second_is_moved():
    found = one([0.4, 1.4, 2.4, 3.4], [1, 2, 3, 4])
    assert found[:, 0].tolist() == [1, 2, 3, 4]


def test_a_machine_without_samples_stays_without_values():
    assert np.isnan(one([0, 1, 2, 3], [1, 2, 3, 4])[:, 1]).all()


def test_a_lost_sample_is_missing_and_not_repeated():
    found = one([0, 1, 3], [1, 2, 4])[:, 0]
    np.testing.assert_array_equal(found, np.array([1, 2, np.nan, 4], np.float32))


def test_exporters_of_one_machine_are_asked_at_different_fractions_of_a_second():
    rng = np.random.default_rng(0)
    ts = 100.0 + np.arange(60)
    fractions = (0.05, 0.47, 0.5, 0.83)
    samples = {
        f"m{i}": {"a": (ts + fraction + rng.normal(0, 0.02, 60), np.arange(60.0))}
        for i, fraction in enumerate(fractions)
    }
    frame = align("job", 101, 159, ["a"], samples)
    for values in frame.values.values():
        assert np.isfinite(values).all()
        assert np.ptp(values[:, 0] - np.arange(58)) <= 1.0


@pytest.mark.parametrize("spacing", [2, 5, 15, 60])
def test_samples_that_come_regularly_but_rarely_stand_until_the_next_one(spacing):
    ts = 3.3 + spacing * np.arange(20.0)
    found = one(ts, np.arange(20.0), start=3, end=3 + 19 * spacing)[:, 0]
    assert np.isfinite(found).all()
    assert np.abs(found - np.arange(19 * spacing) / spacing).max() <= 0.5


def test_a_gap_in_rare_samples_and_too_rare_ones_stay_unknown():
    ts = 15.0 * np.arange(20)
    gap = (ts < 90) | (ts > 150)
    found = one(ts[gap], ts[gap], end=286)[:, 0]
    assert np.flatnonzero(np.isnan(found)).tolist() == list(range(83, 158))
    assert np.isfinite(one(61.0 * np.arange(20), np.zeros(20), end=1_000)[:, 0]).sum() < 20
