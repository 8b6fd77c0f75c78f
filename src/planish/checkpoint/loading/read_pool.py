"""Threads that read requests: those that other ranks need go first, in rounds; the rest between.

The bytes of round r lie in bucket `r % RING` of a ring. Its read starts once round `r - RING` has
been sent to all ranks. The memory is the ring and one buffer for each thread.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (reads overlapped with the exchange).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from planish.checkpoint.loading.fill import Bytes, PieceList, Targets
from planish.checkpoint.loading.reader import BlockReader
from planish.checkpoint.plan.reads import RankReads
from planish.checkpoint.watch.monitor import Recorder, Timing

RING = 4
"""Buckets of a ring: reads are at most three rounds ahead of the exchange."""
WAIT_SECONDS = 0.5
"""Seconds after which a waiting thread checks again whether the load still goes on."""


class Place(NamedTuple):
    """Round of a shared request, and the first byte of its place in the ring."""

    round: int
    base: int


@dataclass
class Rounds:
    """The rounds of one rank's shared requests."""

    places: dict[int, Place] = field(default_factory=dict)
    count: int = 0
    ring_bytes: int = 0

    @classmethod
    def plan(cls, requests: list[int], sizes: list[int], bucket_bytes: int) -> Rounds:
        """Fill buckets with requests in their order; no request is larger than a bucket."""
        places: dict[int, Place] = {}
        turn, filled, ring_bytes = 0, 0, 0
        for request, size in zip(requests, sizes, strict=True):
            if filled + size > bucket_bytes:
                turn, filled = turn + 1, 0
            places[request] = Place(turn, turn % RING * bucket_bytes + filled)
            ring_bytes = max(ring_bytes, places[request].base + size)
            # Align to 16 bytes, so that every element has an aligned address.
            filled += -(-size // 16) * 16
        return cls(places, turn + 1 if places else 0, ring_bytes)


class ReadPool:
    """Reads, verifies and copies the requests of one rank."""

    def __init__(
        self, reader: BlockReader, reads: RankReads, targets: Targets, recorder: Recorder
    ) -> None:
        self.reader, self.reads, self.targets, self.recorder = reader, reads, targets, recorder
        self.modified = False
        """True once an element of the targets may have changed."""
        self.ring: Bytes = np.zeros(0, np.uint8)
        self._error: BaseException | None = None
        self._copies = PieceList(reads.copies)
        # Pieces are sorted by request.
        bounds = np.searchsorted(reads.copies.request, np.arange(len(reads.requests) + 1)).tolist()
        self._rows = [range(*pair) for pair in itertools.pairwise(bounds)]
        self._change = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self, num_threads: int, rounds: Rounds | None = None) -> None:
        """Start the threads; they read the requests of `rounds` into the ring, round by round."""
        rounds = rounds or Rounds()
        self.ring = np.zeros(rounds.ring_bytes, np.uint8)
        self._places, self._open_rounds = rounds.places, RING
        self._shared = deque(rounds.places)
        self._private = deque(q for q in range(len(self.reads.requests)) if q not in rounds.places)
        self._left = [0] * rounds.count
        for place in rounds.places.values():
            self._left[place.round] += 1
        for number in range(min(num_threads, len(self.reads.requests))):
            name = f"planish-read-{number}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()

    def wait_round(self, turn: int, check: Callable[[], None]) -> bool:
        """Return True once the bytes of a round are in the ring, False if a read has failed.

        `check` is called at least every `WAIT_SECONDS`; it raises if another rank has failed.
        """
        while True:
            with self._change:
                if self._error is not None:
                    return False
                if turn >= len(self._left) or self._left[turn] == 0:
                    return True
                self._change.wait(WAIT_SECONDS)
            check()

    def open_rounds(self, count: int) -> None:
        """Allow the threads to read rounds below `count`."""
        with self._change:
            self._open_rounds = count
            self._change.notify_all()

    def finish(self) -> None:
        """Wait for all threads, and raise the first error of a thread."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def stop(self, error: BaseException) -> None:
        """Stop all threads before their next request."""
        with self._change:
            self._error = self._error or error
            self._change.notify_all()

    def _next(self) -> int:
        """Wait for the next request whose read may start and return it; -1 if none is left."""
        with self._change:
            while self._error is None:
                if self._shared and self._places[self._shared[0]].round < self._open_rounds:
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
                place = self._places.get(request)
                if place is not None:
                    self._handle(request, self.ring, place.base, size)
                    with self._change:
                        self._left[place.round] -= 1
                        self._change.notify_all()
                    continue
                if len(own) < size:
                    own = np.empty(size, np.uint8)
                self._handle(request, own, 0, size)
        except BaseException as error:
            self.stop(error)

    def _handle(self, request: int, buffer: Bytes, base: int, size: int) -> None:
        """Read one request to byte `base` of `buffer`, verify it, and copy this rank's pieces."""
        requests = self.reads.requests
        file, start = int(requests.file[request]), int(requests.start[request])
        clock = [time.time()]
        view = buffer[base : base + size].data
        self.reader.fetch(file, start, view)
        clock.append(time.time())
        self.reader.check(file, start, view)
        clock.append(time.time())
        for row in self._rows[request]:
            self.modified = True
            self._copies.scatter(row, buffer, base, self.targets)
        clock.append(time.time())
        key = self.reader.opened.metadata.files.keys[file]
        state = key.split("/")[-2]
        for stage, begin, end in zip(("read", "verify", "copy"), clock, clock[1:], strict=False):
            self.recorder.add(Timing(0, "load", state, stage, begin, end, size, key))
