"""The two sides of a task that samples ahead: this rank's side, and the messages between the sides.

The first ranks train, so that they fill whole machines; the others sample. Each side has its own
process group, and the rest of the program sees no ranks outside it. The sides exchange short
messages through the launcher's store. Weights pass through one more group, which joins the samplers
and the first rank that trains.
"""

from __future__ import annotations

import signal
import time
from threading import Event
from typing import Any

import torch

from planish.base.errors import EXIT_TRANSIENT, PeerLost
from planish.base.parallel import Ranks, Words, join, launcher_store, open_group
from planish.run.signals import Terminated, stops_with
from planish.run.stage_metrics import show_phase
from planish.stages.train.ranks.job import TrainJob


class Roles:
    """This rank among all ranks of a task, and among those of its side."""

    def __init__(self, job: TrainJob, device: torch.device, timeout_seconds: float) -> None:
        """Join the process groups; every rank does so."""
        from torch._C._distributed_c10d import PrefixStore

        store, self.everyone = launcher_store(timeout_seconds)
        rank, num_trainers = self.everyone.rank, job.num_trainers(self.everyone.size)
        self.num_samplers = self.everyone.size - num_trainers
        self.trains = rank < num_trainers
        if self.trains:
            self.mine = Ranks(rank, num_trainers)
        else:
            self.mine = Ranks(rank - num_trainers, self.num_samplers)
        self._words = Words(PrefixStore("told", store), "the launcher")
        self._limit, self.device = timeout_seconds, device
        side = PrefixStore("trainers" if self.trains else "samplers", store)
        join(device, timeout_seconds=job.train.timeout_seconds, part=(side, self.mine))
        self.group: Any = None
        if not self.trains or self.mine.is_first:
            place = 0 if self.trains else 1 + self.mine.rank
            among = Ranks(place, 1 + self.num_samplers)
            weights = PrefixStore("weights", store)
            self.group = open_group(weights, among, device, timeout_seconds=timeout_seconds)

    def tell(self, key: str, words: str) -> None:
        """Send `words` to all ranks under `key`; ranks that share a key send the same words."""
        self._words.tell(key, words)

    def hear(self, *keys: str, asked: Event | None = None) -> list[str]:
        """Wait for the messages under all of these keys and return them.

        A signal ends the wait, and so does an earlier one that has set `asked`.

        Raises:
            PeerLost: a message does not arrive in time, or the launcher is gone.
        """
        show_phase("waiting")
        if asked is not None and asked.is_set():
            raise Terminated(signal.SIGTERM, EXIT_TRANSIENT)
        with stops_with(EXIT_TRANSIENT):
            if not self._words.wait(keys, time.monotonic() + self._limit):
                raise PeerLost(f"{', '.join(keys)} must be told in {self._limit:.0f} s")
        return [self._words.read(key).decode() for key in keys]
