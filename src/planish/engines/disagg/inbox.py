"""What comes to a rank, in one line: messages of the coordinator, and frames of its peers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from planish.base.errors import PlanishError
from planish.engines.disagg.control import Channel, Message
from planish.engines.disagg.m2n.frames import Frame, Transport

_POLL_S = 0.5


class Inbox:
    """Collects from one channel, and from one transport once it is connected."""

    def __init__(self, channel: Channel, on_end: Callable[[], None]) -> None:
        """Begin to read the channel; a `ping` is answered here and returned to nobody.

        Args:
            channel: to the coordinator.
            on_end: called by the reading thread when the coordinator is gone.
        """
        self._channel, self._on_end = channel, on_end
        self._items: queue.SimpleQueue[Message | Frame | PlanishError] = queue.SimpleQueue()
        threading.Thread(target=self._read_channel, name="control", daemon=True).start()

    def watch(self, transport: Transport) -> None:
        """Begin to read a connected transport."""
        threading.Thread(
            target=self._read_frames, args=(transport,), name="frames", daemon=True
        ).start()

    def get(self, timeout_s: float | None) -> Message | Frame | PlanishError | None:
        """Return what came first; None when nothing came in time. Errors are returned as well."""
        try:
            return self._items.get(timeout_s != 0, timeout_s)
        except queue.Empty:
            return None

    def _read_channel(self) -> None:
        try:
            while True:
                message: dict[str, Any] | None = self._channel.receive(None)
                assert message is not None
                if message["op"] == "ping":
                    self._channel.send({"re": message["id"]})
                else:
                    self._items.put(message)
        except PlanishError:  # without a coordinator there is nobody to tell
            self._items.put({"op": "close", "id": 0, "reason": "the coordinator is gone"})
            self._on_end()

    def _read_frames(self, transport: Transport) -> None:
        while True:
            try:
                for frame in transport.poll(_POLL_S):
                    self._items.put(frame)
            except PlanishError as error:
                self._items.put(error)
                if not error.per_rank:
                    return
