"""Threads that read requests: those that others wait for in rounds, the rest in between.

The bytes of round r lie in a ring of buckets, so a round is read once the one that held its bucket
before has been copied by everybody. Memory is the ring and one buffer for each thread.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (reads overlapped with the exchange).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planish.checkpoint.load.fill import Bytes, PieceList, Targets, rows_by_request
from planish.checkpoint.load.reader import BlockReader
from planish.checkpoint.plan.reads import RankReads
from planish.checkpoint.watch.monitor import Recorder, Timing

RING = 4
"""Buckets of a ring, at most: read ahead of the slowest rank by three. At least two."""
WAIT_SECONDS = 0.5
"""How often a waiting thread looks whether the load still goes on."""


class Place(NamedTuple):
    """Where in the ring the bytes of a shared request go."""

    round: int
    base: int
    """First byte in the ring."""


@dataclass
class Rounds:
    """The rounds of one rank's shared requests.

    Example:
        >>> Rounds.plan([0, 1], [3, 2], 4).places[1]
        Place(round=1, base=4)
    """

    places: dict[int, Place]
    """Shared request to its place."""
    count: int
    """How many."""
    ring_bytes: int
    """Size of the ring."""
    buckets: int = RING
    """Rounds that the ring holds."""

    @classmethod
    def plan(
        cls, requests: list[int], sizes: list[int], bucket_bytes: int, buckets: int = RING
    ) -> Rounds:
        """Fill buckets with requests in their order; no request is larger than a bucket."""
        places: dict[int, Place] = {}
        turn, filled = 0, 0
        for request, size in zip(requests, sizes, strict=True):
            assert size <= bucket_bytes
            if filled + size > bucket_bytes:
                turn, filled = turn + 1, 0
            places[request] = Place(turn, turn % buckets * bucket_bytes + filled)
            # Aligned, so that no element is copied from an odd address.
            filled += -(-size // 16) * 16
        ends = [place.base + size for place, size in zip(places.values(), sizes, strict=True)]
        return cls(places, turn + 1 if places else 0, max(ends, default=0), buckets)


class ReadPool:
    """Reads, verifies and copies the requests of one rank."""

    def __init__(
        self,
        reader: BlockReader,
        reads: RankReads,
        targets: Targets,
        recorder: Recorder,
        rounds: Rounds,
    ) -> None:
        """Prepare; `start` begins to read."""
        self.reader, self.reads, self.targets, self.recorder = reader, reads, targets, recorder
        self.rounds = rounds
        self.error: BaseException | None = None
        self.modified = False
        self._ring: Bytes = np.zeros(0, np.uint8)
        self._copies = PieceList(reads.copies)
        self._rows = rows_by_request(reads.copies, len(reads.requests))
        self._shared = deque(sorted(rounds.places, key=lambda q: (rounds.places[q].round, q)))
        self._private = deque(q for q in range(len(reads.requests)) if q not in rounds.places)
        self._left = [0] * rounds.count
        for place in rounds.places.values():
            self._left[place.round] += 1
        self._open_rounds = rounds.buckets
        self._change = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self, ring: Bytes, num_threads: int) -> None:
        """Begin; shared requests go to `ring`."""
        self._ring = ring
        count = min(num_threads, len(self._shared) + len(self._private))
        self._threads = [
            threading.Thread(target=self._work, name=f"planish-read-{k}", daemon=True)
            for k in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def wait_round(self, turn: int, check: Callable[[], None]) -> bool:
        """Return True once the bytes of a round are in the ring, False if reading has failed.

        Args:
            turn: the round.
            check: called now and then; raises if another rank has given up.
        """
        while True:
            with self._change:
                if self.error is not None:
                    return False
                if turn >= len(self._left) or self._left[turn] == 0:
                    return True
                self._change.wait(WAIT_SECONDS)
            check()

    def open_rounds(self, count: int) -> None:
        """Let rounds below `count` be read."""
        with self._change:
            self._open_rounds = max(self._open_rounds, count)
            self._change.notify_all()

    def finish(self) -> None:
        """Wait for all threads, and raise what one of them raised."""
        for thread in self._threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def stop(self, error: BaseException | None = None) -> None:
        """Let no thread begin another request."""
        with self._change:
            self.error = self.error or error or InterruptedError("stopped")
            self._change.notify_all()

    def _next(self) -> int:
        """Return the next request that may be read; -1 when there will be none."""
        places = self.rounds.places
        with self._change:
            while self.error is None:
                if self._shared and places[self._shared[0]].round < self._open_rounds:
                    return self._shared.popleft()
                if self._private:
                    return self._private.popleft()
                if not self._shared:
                    return -1
                self._change.wait(WAIT_SECONDS)
            return -1

    def _work(self) -> None:
        own: Bytes = np.zeros(0, np.uint8)
        requests = self.reads.requests
        try:
            while (request := self._next()) >= 0:
                size = int(requests.stop[request] - requests.start[request])
                place = self.rounds.places.get(request)
                if place is None and len(own) < size:
                    own = np.empty(size, np.uint8)
                buffer, base = (own, 0) if place is None else (self._ring, place.base)
                self._handle(request, buffer, base, size)
                if place is not None:
                    with self._change:
                        self._left[place.round] -= 1
                        self._change.notify_all()
        except BaseException as error:
            self.stop(error)

    def _handle(self, request: int, buffer: Bytes, base: int, size: int) -> None:
        """Read one request to byte `base` of `buffer`, verify it, and copy what this rank wants."""
        requests = self.reads.requests
        file, start = int(requests.file[request]), int(requests.start[request])
        clock = [time.time()]
        view = buffer[base : base + size].data
        self.reader.fetch(file, start, view)
        clock.append(time.time())
        self.reader.check(file, start, view)
        clock.append(time.time())
        if self._rows[request]:
            self.modified = True
            for row in self._rows[request]:
                self._copies.scatter(row, buffer, base, self.targets)
        clock.append(time.time())
        key = self.reader.opened.metadata.files.keys[file]
        state = key.split("/")[-2] if "/" in key else ""
        for stage, begin, end in zip(("read", "verify", "copy"), clock, clock[1:], strict=False):
            self.recorder.add(Timing(0, "load", state, stage, begin, end, size, key))
