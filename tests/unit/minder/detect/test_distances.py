"""Distances, scores and thresholds, against plain loops in float64."""

import numpy as np
import pytest

from planish.minder.detect.distances import distance_sums, normal_scores, threshold


def plain_sums(x, distance):
    orders = {"euclidean": 2, "manhattan": 1, "chebyshev": np.inf}
    gaps = x[:, :, None].astype(np.float64) - x[:, None].astype(np.float64)
    return np.linalg.norm(gaps, ord=orders[distance], axis=3).sum(axis=2)


@pytest.mark.parametrize("distance", ["euclidean", "manhattan", "chebyshev"])
@pytest.mark.parametrize("machines", [4, 37, 300])
def test_sums_agree_with_plain_loops(distance, machines):
    x = np.random.default_rng(machines).random((5, machines, 8), dtype=np.float32)
    np.testing.assert_allclose(distance_sums(x, distance), plain_sums(x, distance), rtol=1e-4)


def test_machines_that_spin_alike_are_told_apart_all_the_same():
    x = np.float32(0.8) + np.float32(4e-4) * np.random.default_rng(0).random((3, 40, 8), np.float32)
    np.testing.assert_allclose(distance_sums(x), plain_sums(x, "euclidean"), rtol=1e-4)


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
    np.testing.assert_allclose(np.delete(scores, 3, axis=1), expected, atol=1e-5)


def test_machines_that_are_all_alike_have_score_0():
    assert (normal_scores(distance_sums(np.full((3, 6, 8), 0.7, np.float32))) == 0).all()


@pytest.mark.parametrize(("machines", "bound"), [(4, 1.7321), (8, 2.6458), (64, 7.9373)])
def test_no_score_exceeds_its_bound_and_theta_stays_below_it(machines, bound):
    sums = np.zeros((1, machines), np.float32)
    sums[0, 0] = 1.0
    assert normal_scores(sums).max() == pytest.approx(bound, abs=1e-4)
    assert threshold(2.0, 0.9, machines) == pytest.approx(min(2.0, 0.9 * bound), abs=1e-4)
