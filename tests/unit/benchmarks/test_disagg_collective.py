from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import HashStore

from tests.benchmarks.disagg.collective import CollectiveBaseline
from tests.benchmarks.disagg.m2n import quantiles


def test_pieces_reach_the_rank_that_they_are_for():
    """Two attention ranks send three expert ranks pieces that name both, and get others back."""
    store = HashStore()

    def rank_main(rank):
        baseline = CollectiveBaseline(store, rank, 2, 3)
        others = range(2, 5) if rank < 2 else range(2)
        pieces = torch.tensor([[10 * rank + other] * 4 for other in others], dtype=torch.uint8)
        there = baseline.exchange(pieces, to_experts=True)
        back = baseline.exchange(pieces, to_experts=False)
        baseline.barrier()
        return there.tolist(), back.tolist()

    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(rank_main, range(5)))
    for rank, (there, back) in enumerate(found):
        others = range(2, 5) if rank < 2 else range(2)
        got = [[10 * other + rank] * 4 for other in others]
        assert (there, back) == (([], got) if rank < 2 else (got, []))


def test_quantiles_are_in_microseconds():
    assert quantiles([1000 * n for n in range(101)]) == {"median_us": 50.0, "p99_us": 99.0}
