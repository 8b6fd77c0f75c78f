"""The event simulation: equal to the law, and what jitter, absence and uneven experts cost."""

from __future__ import annotations

import itertools
import random

import pytest

from planish.engines.planner.law import iteration_seconds
from planish.engines.planner.pipeline import KINDS, Pipeline, Work


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
        assert law + outside <= found + 1e-9
        assert found <= law + m * outside + 1e-9


def test_busy_seconds_and_spans_add_up():
    pipeline = Pipeline(2, 3, spans=[])
    pipeline.iteration(0.0, [even(2.0, 3.0, 0.5, 4, 2, 3)] * 3, 4)
    assert pipeline.busy["attention"] == [2.0 * 12] * 2
    assert pipeline.busy["experts"] == [3.0 * 12] * 3
    assert pipeline.busy["combine"] == [0.5 * 12] * 3
    for kind in KINDS:
        for rank, busy in enumerate(pipeline.busy[kind]):
            mine = sorted(s[4:] for s in pipeline.spans if s[:2] == (kind, rank))
            assert sum(end - start for start, end in mine) == pytest.approx(busy)
            assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(mine))


def test_experts_wait_for_the_slowest_attention_rank():
    slow = Work([1.0, 4.0], [0.1, 0.1], [[2.0]] * 10, [0.1], [0.0, 0.0])
    all_slow = Work([4.0, 4.0], [0.1, 0.1], [[2.0]] * 10, [0.1], [0.0, 0.0])
    ends = [Pipeline(2, 1).iteration(0.0, [work] * 2, 10) for work in (slow, all_slow)]
    assert ends[0] == ends[1]


def test_a_rank_without_rows_takes_no_part():
    both = [even(3.0, 1.0, 0.1, 5, 2, 1)] * 2
    apart = [
        Work([3.0, 0.0], [0.1, 0.1], [[1.0]] * 5, [0.1], [0.0, 0.0]),
        Work([0.0, 3.0], [0.1, 0.1], [[1.0]] * 5, [0.1], [0.0, 0.0]),
    ]
    assert Pipeline(2, 1).iteration(0.0, apart, 5) < Pipeline(2, 1).iteration(0.0, both, 5)


def test_a_rank_that_is_always_the_busiest_sets_the_pace():
    seconds = []
    for layers in ([[5.0, 1.0]] * 6, [[5.0, 1.0], [1.0, 5.0]] * 3, [[3.0, 3.0]] * 6):
        work = [Work([1.0], [0.1], layers, [0.1, 0.1], [0.0])] * 3
        seconds.append(Pipeline(1, 2).iteration(0.0, work, 6))
    same, changing, even_load = seconds
    assert same == pytest.approx(3 * 6 * 5.0 + 1.0 + 0.1 + 0.1)
    # Where the busiest changes, the others' idle time goes to the next micro-batch.
    assert even_load < changing < 1.1 * even_load


def test_jitter_costs_more_the_more_ranks_wait_for_each_other():
    source = random.Random(2)
    factors = [source.lognormvariate(-0.02, 0.2) for _ in range(4001)]
    ends = []
    for ranks in (1, 4, 16):
        work = [even(1.0, 1.0, 0.2, 40, ranks, ranks)] * 3
        ends.append(Pipeline(ranks, ranks).iteration(0.0, work, 40, factors))
    assert iteration_seconds(1.0, 1.0, 0.2, 3, 40) < ends[0] < ends[1] < ends[2]
