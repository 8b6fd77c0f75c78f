"""Messages of JSON between the coordinator and one rank, over a pair of sockets.

They steer: settings, requests, plans of iterations, outputs. Rows of tokens never come this way.
Nothing is pickled, and every length is checked before it is read.
"""

from __future__ import annotations

import base64
import contextlib
import json
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from planish.base.errors import PeerLost, ProtocolError
from planish.engines.requests import Output, Request, Sampling
from planish.records.rollouts import FinishReason

MAX_BYTES = 256 << 20
"""Of one message."""
_LENGTH = 4
_READ = 1 << 16

Message = dict[str, Any]


class Channel:
    """One end of a connection; any thread may send, one may receive.

    Example:
        >>> here, there = (Channel(end) for end in socket.socketpair())
        >>> here.send({"op": "ping"})
        >>> there.receive(60.0)
        {'op': 'ping'}
        >>> here.close(); there.close()
    """

    def __init__(self, end: socket.socket, *, send_timeout_s: float = 30.0) -> None:
        """Take over a connected socket; a peer that reads nothing for the time-out is lost."""
        self._socket = end
        self._socket.settimeout(send_timeout_s)
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._messages: deque[Message] = deque()

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message.

        Raises:
            PeerLost: the other end is closed or does not read.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            try:
                self._socket.sendall(len(data).to_bytes(_LENGTH, "little") + data)
            except OSError as error:
                why = "it was closed here" if self.fileno() < 0 else error
                raise PeerLost(f"the other end of a control connection is gone: {why}") from None

    def receive(self, timeout_s: float | None) -> Message | None:
        """Return the next message; None when none came in time.

        Raises:
            PeerLost: the other end is closed.
            ProtocolError: not a message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self._socket, selectors.EVENT_READ)
            except (OSError, ValueError):
                raise PeerLost("this end of a control connection is closed") from None
            while not self._messages:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left < 0:
                    return None
                if selector.select(left):
                    self.read()
        return self._messages.popleft()

    def read(self) -> None:
        """Read what has come without waiting; `pop` returns it.

        Raises:
            PeerLost: the other end is closed.
            ProtocolError: not a message.
        """
        # With a time-out `recv` waits for data whatever its flags say.
        if not self._poll.poll(0):
            return
        try:
            data = self._socket.recv(_READ, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"a control connection broke: {error}") from None
        if not data:
            raise PeerLost("the other end of a control connection has closed it")
        self._buffer += data
        while len(self._buffer) >= _LENGTH:
            size = int.from_bytes(self._buffer[:_LENGTH], "little")
            if size > MAX_BYTES:
                raise ProtocolError(
                    f"a control message must have at most {MAX_BYTES} bytes, got {size}"
                )
            if len(self._buffer) < _LENGTH + size:
                return
            text = bytes(self._buffer[_LENGTH : _LENGTH + size])
            del self._buffer[: _LENGTH + size]
            try:
                message = json.loads(text)
            except ValueError as error:
                raise ProtocolError(f"a control message must be JSON, got {error}") from None
            if not isinstance(message, dict):
                raise ProtocolError(f"a control message must be an object, got {text[:80]!r}")
            self._messages.append(message)

    def pop(self) -> Message | None:
        """Return the next message that has been read; None when there is none."""
        return self._messages.popleft() if self._messages else None

    def close(self) -> None:
        """Close this end; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def encode_request(request: Request) -> Message:
    """Return a request as JSON holds it, without the driver's own notes."""
    plain = {field.name: getattr(request, field.name) for field in fields(Request)}
    del plain["meta"]
    return {**plain, "sampling": asdict(request.sampling)}


def decode_request(plain: Mapping[str, Any]) -> Request:
    """Return the request that `encode_request` was given."""
    sampling = dict(plain["sampling"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    return Request(
        **{
            **plain,
            "prompt_ids": tuple(plain["prompt_ids"]),
            "response_prefix": tuple(plain["response_prefix"]),
            "sampling": Sampling(**sampling),
        }
    )


def encode_outputs(outputs: Collection[Output]) -> list[Message]:
    """Return outputs as JSON holds them."""
    plain = []
    for output in outputs:
        one = {field.name: getattr(output, field.name) for field in fields(Output)}
        one["finish_reason"] = int(output.finish_reason)
        if output.routing is not None:
            one["routing"] = base64.b64encode(output.routing.tobytes()).decode()
            one["routing_form"] = [str(output.routing.dtype), *output.routing.shape]
        plain.append(one)
    return plain


def decode_outputs(plain: Collection[Mapping[str, Any]]) -> list[Output]:
    """Return the outputs that `encode_outputs` was given."""
    outputs = []
    for one in plain:
        given = dict(one)
        dtype, *shape = given.pop("routing_form", [None])
        if dtype is not None:
            data = base64.b64decode(given["routing"])
            given["routing"] = np.frombuffer(data, dtype).reshape(shape)
        given["finish_reason"] = FinishReason(given["finish_reason"])
        outputs.append(Output(**given))
    return outputs
