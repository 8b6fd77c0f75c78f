"""A slower network than the machine's: frames are held back until a link would have brought them.

It holds frames back at the receiver by the monotonic clock of the sender, so that both must run on
one machine. It sleeps, and never spins. `python -m tests.benchmarks.disagg.link LATENCY_S` is a
rank of `disagg` behind such a link.
"""

import heapq
import itertools
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from planish.base.errors import PlanishError
from planish.engines.disagg.m2n.frames import Deliver, Frame, FrameHeader, Transport
from planish.engines.disagg.processes import Launcher, launch
from planish.engines.disagg.rank import open_transport, run
from planish.engines.disagg.settings import RankSettings


class EmulatedLink:
    """A transport whose frames take `bytes / bytes_per_s + latency_s` from rank to rank.

    A link carries one frame after another: the next one starts when the last has arrived, as the
    law of the ping-pong pipeline has it. Each pair of ranks has a link in each direction.
    """

    def __init__(
        self, transport: Transport, latency_s: float, bytes_per_s: float = float("inf")
    ) -> None:
        """Wrap a transport; all ranks of an instance must do so alike."""
        self.address = transport.address
        self._transport, self._latency_s, self._bytes_per_s = transport, latency_s, bytes_per_s
        self._free: dict[int, float] = {}
        self._held: list[tuple[float, int, Frame | PlanishError]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._is_closed = False

    def connect(self, addresses: Mapping[int, tuple[str, int]], deliver: Deliver) -> None:
        """Connect the wrapped transport."""
        threading.Thread(target=self._bring, args=(deliver,), name="link", daemon=True).start()
        self._transport.connect(addresses, self.take)

    def room(self, first: FrameHeader, num_rows: int) -> Tensor:
        """Return memory of the wrapped transport."""
        return self._transport.room(first, num_rows)

    def send(self, header: FrameHeader, counts: Tensor | None, rows: Tensor) -> None:
        """Send a frame."""
        self._transport.send(header, counts, rows)

    def close(self) -> None:
        """Close the wrapped transport."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._transport.close()

    def take(self, item: Frame | PlanishError) -> None:
        """Hold back what has arrived; a loss is told after the frames that are under way."""
        with self._changed:
            if isinstance(item, Frame):
                at = self.arrival(item.header)
            else:
                at = max([time.monotonic(), *(held[0] for held in self._held)])
            heapq.heappush(self._held, (at, next(self._numbers), item))
            self._changed.notify_all()

    def arrival(self, header: FrameHeader) -> float:
        """Return when the link has brought a frame, monotonic seconds, and take the link for it."""
        took = header.num_bytes / self._bytes_per_s + self._latency_s
        at = max(header.sent_ns * 1e-9, self._free.get(header.source, 0.0)) + took
        self._free[header.source] = at
        return at

    def _bring(self, deliver: Deliver) -> None:
        while True:
            with self._changed:
                left = self._held[0][0] - time.monotonic() if self._held else None
                if left is None or left > 0:
                    self._changed.wait(left)
                if self._is_closed:
                    return
                now = time.monotonic()
                due = []
                while self._held and self._held[0][0] <= now:
                    due.append(heapq.heappop(self._held)[2])
            for item in due:
                deliver(item)


def behind(latency_s: float, settings: RankSettings) -> EmulatedLink:
    """Return a transport of a rank behind a link of some latency."""
    return EmulatedLink(open_transport(settings), latency_s)


def linked(latency_s: float) -> Launcher:
    """Return a launcher of ranks behind links of some latency."""
    return partial(launch, command=("-m", __name__, str(latency_s)))


if __name__ == "__main__":
    run(partial(behind, float(sys.argv[1])))
