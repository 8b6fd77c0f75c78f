"""The law of the pipeline: vectors by hand, limits, and that it never falls."""

from __future__ import annotations

import random

import pytest

from planish.base.errors import ConfigError
from planish.engines.planner.law import iteration_seconds, min_micro_batches, speedup


@pytest.mark.parametrize(
    ("attention", "experts", "network", "m", "layers", "expected"),
    [
        (400, 300, 100, 1, 56, 50400),
        (400, 300, 100, 2, 56, 50800),
        (300, 400, 350, 3, 56, 79200),
        (300, 400, 350, 4, 56, 90600),
    ],
)
def test_iteration_seconds_equals_the_vectors(attention, experts, network, m, layers, expected):
    assert iteration_seconds(attention, experts, network, m, layers) == expected


def random_times(source):
    return [source.uniform(0.01, 5) for _ in range(3)]


def test_with_all_conditions_it_is_equation_5_inside_the_bounds_of_equation_4():
    source = random.Random(0)
    checked = 0
    for _ in range(2000):
        a, e, c = random_times(source)
        m, layers = source.randint(1, 6), source.randint(1, 80)
        slowest = max(a, e)
        if c > slowest or m * slowest < a + e + 2 * c:
            continue
        checked += 1
        found = iteration_seconds(a, e, c, m, layers)
        assert found == pytest.approx((a + e + 2 * c) + slowest * (m * layers - 1), rel=1e-12)
        assert found >= (a + e + 2 * c) + m * slowest * (layers - 1)
    assert checked > 200


def test_one_micro_batch_walks_through_all_layers_alone():
    assert iteration_seconds(3, 5, 1, 1, 7) == (3 + 5 + 2) * 7


@pytest.mark.parametrize("which", range(3))
def test_it_never_falls_when_a_stage_takes_longer(which):
    source = random.Random(which)
    for _ in range(500):
        times = random_times(source)
        m, layers = source.randint(1, 5), source.randint(1, 60)
        longer = list(times)
        longer[which] *= 1 + source.random()
        assert iteration_seconds(*longer, m, layers) >= iteration_seconds(*times, m, layers)


def test_one_more_micro_batch_never_lowers_the_rate():
    source = random.Random(4)
    for _ in range(500):
        times = random_times(source)
        layers, m = source.randint(1, 60), source.randint(1, 5)
        assert speedup(*times, layers, fewer=m, more=m + 1) >= 1 - 1e-12


def test_min_micro_batches_equals_the_vectors_and_suffices():
    shares = (0.0, 0.10, 0.49, 0.5, 0.75, 0.99)
    assert [min_micro_batches(share, 1.0) for share in shares] == [2, 3, 3, 3, 4, 4]
    assert min_micro_batches(0.3, 0.6) == 3


def test_the_second_micro_batch_gives_nearly_2_and_the_third_what_the_network_took():
    assert speedup(1.0, 1.0, 0.2, 60, fewer=1, more=2) == pytest.approx(1.98, abs=0.02)
    assert speedup(1.0, 1.0, 0.2, 60, fewer=2, more=3) == pytest.approx(1.2, abs=0.02)
    assert speedup(1.0, 1.0, 0.2, 60, fewer=3, more=4) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("m", "layers"), [(0, 3), (3, 0)])
def test_no_micro_batch_or_layer_is_refused(m, layers):
    with pytest.raises(ConfigError, match="must be at least 1"):
        iteration_seconds(1.0, 1.0, 1.0, m, layers)
