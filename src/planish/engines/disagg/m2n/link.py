"""A slower network than the machine's: frames are held back until a link would have brought them.

It holds frames back at the receiver by the monotonic clock of the sender, so that both must run on
one machine. It sleeps, and never spins.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from planish.base.errors import ConfigError, PlanishError
from planish.engines.disagg.m2n.frames import (
    CONTROL_MICRO_BATCH,
    HEADER_BYTES,
    Frame,
    FrameHeader,
    SendHandle,
    Slot,
    Transport,
)


class EmulatedLink:
    """A `Transport` whose frames take `bytes / bytes_per_s + latency_s` from rank to rank.

    A serial link carries one frame after another: the next one starts when the last has arrived,
    as the law of the ping-pong pipeline has it. Without `serial` any number are under way at once.
    Each pair of ranks has a link in each direction, and one more for CONTROL frames.

    Example, 10 microseconds and 25 GB/s::

        transport = EmulatedLink(transport, latency_s=10e-6, bytes_per_s=25e9)
    """

    def __init__(
        self,
        transport: Transport,
        *,
        latency_s: float,
        bytes_per_s: float = float("inf"),
        jitter_s: float = 0.0,
        serial: bool = True,
        seed: int = 0,
    ) -> None:
        """Wrap a transport; all ranks of an instance must do so alike.

        Args:
            transport: carries the frames.
            latency_s: of every frame.
            bytes_per_s: of the link; infinity for latency alone.
            jitter_s: at most this much more, uniformly; frames do not overtake each other.
            serial: a link carries one frame at a time.
            seed: of the jitter.

        Raises:
            ConfigError: a time is negative, or the bandwidth not positive.
        """
        if min(latency_s, jitter_s) < 0 or bytes_per_s <= 0:
            raise ConfigError(
                "a link must have a latency and jitter of at least 0 s and more than 0 bytes/s, "
                f"got {latency_s} s, {jitter_s} s and {bytes_per_s} bytes/s"
            )
        self.rank = transport.rank
        self._transport = transport
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._jitter_s, self._serial = jitter_s, serial
        self._random = random.Random(seed)
        self._free: dict[tuple[int, bool], float] = {}
        self._held: list[tuple[float, int, Frame]] = []
        self._numbers = itertools.count()
        self._faults: deque[PlanishError] = deque()

    def connect(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Connect the wrapped transport."""
        self._transport.connect(addresses)

    def post_receive(self, source: int, slot: Slot) -> None:
        """Give a buffer back."""
        self._transport.post_receive(source, slot)

    def send(
        self, header: FrameHeader, counts: Tensor | None, rows: Tensor | Sequence[Tensor]
    ) -> SendHandle:
        """Stamp a frame and send it."""
        return self._transport.send(replace(header, sent_ns=time.monotonic_ns()), counts, rows)

    def poll(self, timeout_s: float) -> list[Frame]:
        """Return the frames that the link has brought; see `Transport.poll`."""
        deadline = time.monotonic() + timeout_s
        has_expired = False
        while True:
            now = time.monotonic()
            frames = []
            while self._held and self._held[0][0] <= now:
                frames.append(heapq.heappop(self._held)[2])
            if frames or has_expired:
                return frames
            if self._faults and not self._held:
                raise self._faults.popleft()
            wait = max(min([deadline, *(held[0] for held in self._held[:1])]) - now, 0.0)
            if self._faults:
                time.sleep(wait)
            else:
                try:
                    arrived = self._transport.poll(wait)
                except PlanishError as error:
                    self._faults.append(error)
                    continue
                for frame in arrived:
                    at = self.arrival(frame.header)
                    heapq.heappush(self._held, (at, next(self._numbers), frame))
            has_expired = time.monotonic() >= deadline

    def arrival(self, header: FrameHeader) -> float:
        """Return when the link has brought a frame, monotonic seconds, and take the link for it."""
        link = (header.source, header.micro_batch == CONTROL_MICRO_BATCH)
        free = self._free.get(link, 0.0)
        sent = header.sent_ns * 1e-9
        took = (HEADER_BYTES + header.payload_bytes) / self._bytes_per_s + self._latency_s
        took += self._random.uniform(0.0, self._jitter_s)
        at = max(sent, free) + took if self._serial else max(sent + took, free)
        self._free[link] = at
        return at

    def close(self) -> None:
        """Close the wrapped transport."""
        self._transport.close()
