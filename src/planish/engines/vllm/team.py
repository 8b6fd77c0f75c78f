"""Training processes that share one vLLM: the first process leads, the others follow its engine.

With `external_launcher` each rank has its own scheduler. The schedulers stay equal as long as they
add, step and end the same requests in the same order. Source: vLLM 0.32,
`v1/executor/uniproc_executor.py`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from planish.base.parallel import Ranks, neighbours, peers


class Team:
    """`size` neighbouring ranks; the first rank sends JSON messages to the others."""

    def __init__(self, ranks: Ranks, size: int, timeout_seconds: float) -> None:
        """Make the process groups of all teams; every rank must call this. `size` divides the
        number of ranks.
        """
        self._group = neighbours(size, timeout_seconds)
        self._first = ranks.rank // size * size
        self.leads = ranks.rank == self._first

    def together(self) -> AbstractContextManager[None]:
        """Turn errors in a collective of the team into PeerLost."""
        return peers("the ranks that share a vLLM")

    def tell(self, call: str, words: Any = None) -> None:
        """Send a message to the other ranks, where `hear` returns it."""
        data = torch.frombuffer(bytearray(json.dumps([call, words]).encode()), dtype=torch.uint8)
        with self.together():
            dist.broadcast(torch.tensor([len(data)]), self._first, self._group)
            dist.broadcast(data, self._first, self._group)

    def hear(self) -> tuple[str, Any]:
        """Return the next message of the first rank."""
        length = torch.zeros(1, dtype=torch.int64)
        with self.together():
            dist.broadcast(length, self._first, self._group)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, self._first, self._group)
        call, words = json.loads(data.numpy().tobytes())
        return call, words

    def union(self, found: Collection[str], among: Iterable[str]) -> set[str]:
        """Return the names in `among` that any rank of the team has found."""
        names = list(among)
        marks = torch.tensor([name in found for name in names], dtype=torch.uint8)
        with self.together():
            dist.all_reduce(marks, dist.ReduceOp.MAX, self._group)
        return {name for name, mark in zip(names, marks.tolist(), strict=True) if mark}
