"""Who computes when, and what a failing micro-batch does to the others."""

import pytest

from planish.engines.disagg.ping_pong import Turns


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
