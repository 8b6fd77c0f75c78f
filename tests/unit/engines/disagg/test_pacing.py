"""Paced ranks over an emulated link: an iteration takes at least what the law says."""

import time
from functools import partial

import pytest

from planish.engines.planner.pipeline import iteration_seconds
from tests.benchmarks.disagg.link import behind
from tests.unit.engines.disagg.instances import ThreadRank, disagg, moe_policy
from tests.unit.engines.tiny import request


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
