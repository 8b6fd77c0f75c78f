"""The law of the pipeline by vectors and limits, and the event simulation that equals it."""

import random

import pytest

from planish.engines.planner.pipeline import Pipeline, Work, iteration_seconds


@pytest.mark.parametrize(
    ("times", "m", "layers", "expected"),
    [
        ((400, 300, 100), 1, 56, 50400),
        ((400, 300, 100), 2, 56, 50800),
        ((300, 400, 350), 3, 56, 79200),
        ((300, 400, 350), 4, 56, 90600),
        ((3, 5, 1), 1, 7, (3 + 5 + 2) * 7),
    ],
)
def test_iteration_seconds_equals_the_vectors(times, m, layers, expected):
    assert iteration_seconds(*times, m, layers) == expected


def random_times(source):
    return [source.uniform(0.01, 5) for _ in range(3)]


def test_with_all_conditions_it_is_equation_5_inside_the_bounds_of_equation_4():
    source, checked = random.Random(0), 0
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


def test_it_never_falls_when_a_stage_takes_longer_nor_the_rate_with_one_more_micro_batch():
    source = random.Random(4)
    for which in [0, 1, 2] * 300:
        times = random_times(source)
        m, layers = source.randint(1, 5), source.randint(1, 60)
        longer = list(times)
        longer[which] *= 1 + source.random()
        assert iteration_seconds(*longer, m, layers) >= iteration_seconds(*times, m, layers)
        one, more = (n / iteration_seconds(*times, n, layers) for n in (m, m + 1))
        assert more >= one * (1 - 1e-12)


def even(attention, experts, network, layers, n_a=1, n_e=1, outside=0.0):
    """Return the work of a micro-batch that is equal on all ranks."""
    return Work(
        attention=[attention] * n_a,
        dispatch=[network] * n_a,
        experts=[[experts] * n_e] * layers,
        combine=[network] * n_e,
        outside=[outside] * n_a,
    )


@pytest.mark.parametrize("ranks", [(1, 1), (3, 2), (2, 5)])
def test_equal_times_give_the_law(ranks):
    source = random.Random(sum(ranks))
    for _ in range(600):
        times = [source.uniform(0.0, 3.0) + 1e-6 for _ in range(3)]
        m, layers = source.randint(1, 6), source.randint(1, 40)
        work = [even(*times, layers, *ranks)] * m
        found = Pipeline(*ranks).iteration(7.0, work, layers) - 7.0
        assert found == pytest.approx(iteration_seconds(*times, m, layers), rel=1e-9)


def test_work_outside_is_bounded_by_what_the_planner_adds():
    source = random.Random(5)
    for _ in range(300):
        times = [source.uniform(0.1, 3.0) for _ in range(3)]
        m, layers, outside = source.randint(1, 5), source.randint(1, 20), source.uniform(0.1, 9)
        work = [even(*times, layers, outside=outside)] * m
        found = Pipeline(1, 1).iteration(0.0, work, layers)
        law = iteration_seconds(*times, m, layers)
        assert law + outside - 1e-9 <= found <= law + m * outside + 1e-9


def test_experts_wait_for_the_slowest_attention_rank_that_has_rows():
    def end(*attention):
        links = [0.1] * 2, [[2.0]] * 10, [0.1], [0.0, 0.0]
        return Pipeline(2, 1).iteration(0.0, [Work(one, *links) for one in attention], 10)

    assert end([1.0, 4.0], [1.0, 4.0]) == end([4.0, 4.0], [4.0, 4.0])
    assert end([3.0, 0.0], [0.0, 3.0]) < end([3.0, 3.0], [3.0, 3.0])
