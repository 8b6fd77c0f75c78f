"""Messages between a trainer and its uploading process: JSON, bytes, file descriptors.

::

    head     u32 bytes of JSON, u32 number of blobs
    sizes    u64 for each blob
    JSON, then the blobs

Both ends are ours; what arrives is trusted. A thread of the channel writes, because a signal that
interrupts the caller would leave half a message, and the other end would take the next one for
the rest of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_HEAD = struct.Struct("<II")
_MOST_FDS = 4


class Message(NamedTuple):
    """One message."""

    fields: dict[str, Any]
    blobs: list[bytes]
    fds: list[int]
    """Descriptors of the receiver, who must close them."""


class Channel:
    """One end; any thread may send, one thread at a time receives.

    Example:
        >>> a, b = map(Channel, socket.socketpair())
        >>> a.send({"do": "x"}, [b"12"])
        >>> b.receive(1.0).blobs
        [b'12']
        >>> a.close(); b.close()
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._outgoing: queue.SimpleQueue[tuple[list[bytes], list[int]] | None]
        self._outgoing = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="channel", daemon=True)
        self._sender.start()

    def fileno(self) -> int:
        """Return the descriptor of this end."""
        return self._socket.fileno()

    def send(
        self, fields: Mapping[str, Any], blobs: Sequence[bytes] = (), fds: Sequence[int] = ()
    ) -> None:
        """Send a message as a whole, in the background; none arrives once the other end is gone.

        Descriptors are duplicated, so the caller may close its own.
        """
        body = json.dumps(fields).encode()
        head = _HEAD.pack(len(body), len(blobs))
        sizes = struct.pack(f"<{len(blobs)}Q", *map(len, blobs))
        self._outgoing.put(([head, sizes + body, *blobs], [os.dup(fd) for fd in fds]))

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, None if none begins within `timeout_s`.

        Raises:
            EOFError: the other end is gone.
        """
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MOST_FDS)
            head += self._exactly(_HEAD.size - len(head)) if head else b""
            if not head:
                raise EOFError
            length, count = _HEAD.unpack(head)
            sizes = struct.unpack(f"<{count}Q", self._exactly(8 * count))
            fields = json.loads(self._exactly(length))
            blobs = [bytes(self._exactly(size)) for size in sizes]
        except OSError as error:
            raise EOFError from error
        return Message(fields, blobs, list(fds))

    def close(self) -> None:
        """Close this end, whether or not all is sent; the other one sees it."""
        self._outgoing.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._sender.join()
        self._socket.close()

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            (head, *rest), fds = message
            with contextlib.suppress(OSError):
                if fds:
                    socket.send_fds(self._socket, [head], fds)
                else:
                    self._socket.sendall(head)
                for part in rest:
                    self._socket.sendall(part)
            for fd in fds:
                os.close(fd)

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise EOFError
            done += count
        return bytes(data)
