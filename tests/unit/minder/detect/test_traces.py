"""Runs of candidates: their borders, tolerated gaps and masked windows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from planish.minder.detect.denoise import Vae, shapes
from planish.minder.detect.distances import distance_sums, normal_scores, threshold
from planish.minder.detect.frame import align, clean
from planish.minder.detect.runs import Rule, Run, long_runs, runs, runs_of
from planish.minder.lab.vae import LstmVae
from tests.rounding import VALUES


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


def longest(named, *, resting=(), sample=0):
    quiet = np.zeros(len(named), bool)
    quiet[list(resting)] = True
    machines = named.shape[1]
    samples = np.full(machines, sample)
    rule = Rule(np.full(machines, 240.0), samples, quiet, 0)
    unknown, nobody = np.zeros(len(named), bool), np.zeros(named.shape, bool)
    return long_runs(runs_of(named, rule, unknown, ~nobody, nobody), rule)


@pytest.mark.parametrize(("length", "fires"), [(239, False), (240, False), (241, True)])
def test_a_run_must_last_for_more_than_240_windows(length, fires):
    named = windows((None, 30), (5, length), (None, 30))
    found = longest(named)
    assert found == [Run(5, 30, 29 + length, length)] * fires


def test_one_other_candidate_ends_a_run_as_published():
    named = windows((5, 130), (2, 1), (5, 130))
    assert (lengths(named), lengths(named, 2)) == ([130, 130], [1])


def test_three_windows_and_at_most_2_percent_of_a_run_are_tolerated():
    for gap, expected in ((3, [403]), (4, [200, 200])):
        for between in (None, 2):
            assert lengths(windows((5, 200), (between, gap), (5, 200)), gap_tolerance=3) == expected
    assert lengths(windows((5, 20), (None, 1), (5, 20)), gap_tolerance=3) == [20, 20]


def test_a_wait_and_a_moment_of_another_machine_end_no_run():
    named = windows((5, 150), (None, 60), (5, 150))
    gap = np.zeros(named.shape, bool)
    gap[150:210, 5] = True
    unknown, nobody = np.zeros(len(named), bool), np.zeros(named.shape, bool)
    rule = Rule(np.full(8, 240.0), np.zeros(8, int), unknown, 3)

    def found(present, far, rule=rule, named=named):
        return [run.length for run in runs_of(named, rule, unknown, present, far)[5]]

    assert found(~nobody, nobody) == [150, 150]
    # It waits for a minute, and counts for what lies before and after.
    assert found(~gap, nobody) == [300]
    # Another machine hides it for 20 windows, but not for a minute.
    assert found(~nobody, gap) == [150, 150]
    short = named.copy()
    short[170:210, 5] = True
    assert found(~nobody, gap, named=short) == [340]
    # As published each of them ends a run.
    published = replace(rule, gap_tolerance=0)
    assert found(~gap, gap, published) == [150, 150]
    assert found(~nobody, gap, published, short) == [150, 190]


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


def plain_sums(x):
    gaps = x[:, :, None].astype(np.float64) - x[:, None].astype(np.float64)
    return np.linalg.norm(gaps, axis=3).sum(axis=2)


@pytest.mark.parametrize("machines", [4, 37, 300])
def test_sums_agree_with_plain_loops(machines):
    x = np.random.default_rng(machines).random((5, machines, 8), dtype=np.float32)
    np.testing.assert_allclose(distance_sums(x), plain_sums(x), rtol=1e-4)


def test_machines_that_spin_alike_are_told_apart_all_the_same():
    x = np.float32(0.8) + np.float32(4e-4) * np.random.default_rng(0).random((3, 40, 8), np.float32)
    np.testing.assert_allclose(distance_sums(x), plain_sums(x), rtol=1e-4)


def test_absent_machines_weigh_nothing():
    x = np.random.default_rng(1).random((4, 9, 8), dtype=np.float32)
    present = np.ones((4, 9), bool)
    present[:, 3] = False
    rest = np.delete(x, 3, axis=1)
    sums = distance_sums(x, present=present)
    np.testing.assert_allclose(np.delete(sums, 3, axis=1), distance_sums(rest), rtol=1e-5)
    assert (sums[:, 3] == 0).all()
    scores = normal_scores(sums, present)
    expected = normal_scores(distance_sums(rest))
    np.testing.assert_allclose(np.delete(scores, 3, axis=1), expected, atol=2e-5)


def test_machines_that_are_all_alike_have_score_0():
    assert (normal_scores(distance_sums(np.full((3, 6, 8), 0.7, np.float32))) == 0).all()


@pytest.mark.parametrize(("machines", "bound"), [(4, 1.7321), (8, 2.6458), (64, 7.9373)])
def test_no_score_exceeds_its_bound_and_theta_stays_below_it(machines, bound):
    sums = np.zeros((1, machines), np.float32)
    sums[0, 0] = 1.0
    assert normal_scores(sums).max() == pytest.approx(bound, abs=1e-4)
    assert threshold(2.0, 0.9, machines) == pytest.approx(min(2.0, 0.9 * bound), abs=1e-4)


def one(ts, values, *, start=0, end=4, metric="cpu_usage"):
    samples = {metric: {"a": (np.array(ts, float), np.array(values, float))}}
    return align("job", start, end, ["a", "b"], samples).values[metric]


def test_disorder_duplicates_and_broken_values_are_cleaned():
    ts, values = clean(
        np.array([3, 1, 1, 2, 4, 5, 6.0]), np.array([30, 9, 10, np.nan, -1, 1e300, np.inf])
    )
    assert ts.tolist() == [1, 3]
    assert values.tolist() == [10, 30]


@pytest.mark.parametrize(
    ("ts", "values", "wanted"),
    [
        # A clock that is off by a part of a second is moved; a lost sample is not repeated.
        ([0.4, 1.4, 2.4, 3.4], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([0, 1, 3], [1, 2, 4], [1, 2, np.nan, 4]),
    ],
)
def test_samples_are_put_on_whole_seconds_and_nothing_else_is_known(ts, values, wanted):
    found = one(ts, values)
    np.testing.assert_array_equal(found[:, 0], np.array(wanted, np.float32))
    assert np.isnan(found[:, 1]).all()


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


@pytest.mark.parametrize(("hidden", "latent"), [(4, 8), (6, 3)])
def test_reconstructions_equal_those_of_torch(hidden, latent):
    torch.manual_seed(3)
    model = LstmVae(hidden=hidden, latent=latent)
    for tensor in model.parameters():
        tensor.data *= 4
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert {name: array.shape for name, array in weights.items()} == shapes(hidden, latent)
    windows = np.random.default_rng(0).uniform(0, 1, (5000, 8)).astype(np.float32)
    with torch.no_grad():
        restored, _, _ = model(torch.from_numpy(windows)[..., None])
    found = Vae("cpu_usage", weights, version="v").embed(windows)
    np.testing.assert_allclose(found, restored[..., 0].numpy(), atol=VALUES)
    assert found.std() > 0.005
