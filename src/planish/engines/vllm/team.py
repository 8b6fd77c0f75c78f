"""Training processes that share one vLLM: the first process leads, the others follow its engine.

With `external_launcher` each rank has its own scheduler. The schedulers stay equal as long as they
add, step and end the same requests in the same order. Source: vLLM 0.32,
`v1/executor/uniproc_executor.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from planish.base.parallel import Ranks, neighbours, peers


class Team:
    """`size` neighbouring ranks; the first rank sends messages to the others."""

    def __init__(self, ranks: Ranks, size: int, timeout_seconds: float) -> None:
        """Make the process groups of all teams; every rank must call this. `size` divides the
        number of ranks.
        """
        self._group = neighbours(size, timeout_seconds)
        self._size, self._first = size, ranks.rank // size * size
        self.leads = ranks.rank == self._first

    def together(self) -> AbstractContextManager[None]:
        """Turn errors in a collective of the team into PeerLost."""
        return peers("the ranks that share a vLLM")

    def tell(self, call: str, words: Any = None) -> None:
        """Send a message to the other ranks, where `hear` returns it."""
        self._pass([call, words])

    def hear(self) -> tuple[str, Any]:
        """Return the next message of the first rank."""
        call, words = self._pass([None, None])
        return call, words

    def _pass(self, message: list[Any]) -> list[Any]:
        with self.together():
            dist.broadcast_object_list(message, self._first, self._group, torch.device("cpu"))
        return message

    def union(self, found: Collection[str]) -> set[str]:
        """Return the names that any rank of the team has found."""
        every: list[Any] = [None] * self._size
        with self.together():
            dist.all_gather_object(every, sorted(found), self._group)
        return set().union(*every)
