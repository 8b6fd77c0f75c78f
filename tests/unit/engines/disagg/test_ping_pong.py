"""Who computes when, and what a failing micro-batch does to the others."""

import time
from functools import partial

import pytest

from planish.engines.disagg.ping_pong import Turns
from planish.engines.planner.pipeline import iteration_seconds
from tests.benchmarks.disagg.link import behind
from tests.unit.engines.disagg.instances import ThreadRank, disagg, moe_policy
from tests.unit.engines.tiny import request


def walk(turns, order, name, num_layers):
    """Return a job that notes each of its layers and pauses between them."""

    def job():
        for layer in range(num_layers):
            order.append((name, layer))
            turns.pause()
        return name

    return job


def test_micro_batches_go_on_in_the_order_of_their_replies():
    turns, order = Turns(3), []
    replies = iter([[1], [0, 2], [1], [2, 0], [1], []])
    jobs = {name: walk(turns, order, name, 2) for name in (2, 0, 1)}
    results = turns.run(jobs, lambda must: next(replies) if must else [])
    assert results == {0: 0, 1: 1, 2: 2}
    assert order == [(0, 0), (1, 0), (2, 0), (1, 1), (0, 1), (2, 1)]
    turns.close()


def test_a_failing_job_stops_the_others_where_they_wait():
    turns, order = Turns(3), []

    def failing():
        raise ValueError("no weights")

    jobs = {0: walk(turns, order, 0, 3), 1: failing, 2: walk(turns, order, 2, 3)}
    with pytest.raises(ValueError, match="no weights"):
        turns.run(jobs, lambda must: [])
    assert order == [(0, 0)]
    assert turns.run({1: walk(turns, order, 1, 1)}, lambda must: [1] * must) == {1: 1}
    turns.close()


def test_a_failing_wait_stops_all_jobs():
    turns, order = Turns(2), []

    def wait(must):
        if must:
            raise TimeoutError("late")
        return []

    with pytest.raises(TimeoutError, match="late"):
        turns.run({name: walk(turns, order, name, 2) for name in (0, 1)}, wait)
    assert order == [(0, 0), (1, 0)]
    turns.close()


@pytest.mark.parametrize(
    ("stage_s", "link_s", "micro_batches"),
    [((0.03, 0.01), 0.0, 3), ((0.01, 0.03), 0.005, 2), ((0.02, 0.02), 0.016, 4)],
    ids=["attention", "experts", "even"],
)
def test_an_iteration_of_paced_ranks_is_no_faster_than_the_law(stage_s, link_s, micro_batches):
    with disagg(
        moe_policy("Qwen3Moe"),
        1,
        1,
        micro_batches,
        launcher=partial(ThreadRank, new_transport=partial(behind, link_s)),
        stage_s=stage_s,
    ) as engine:
        engine.submit([request(i, 5) for i in range(micro_batches)])
        engine.poll(0.0)
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            engine.poll(0.0)
            times.append(time.perf_counter() - begin)
    law = iteration_seconds(*stage_s, link_s, micro_batches, 3)
    # Ranks sleep at least as long as they are told.
    assert law <= min(times)
