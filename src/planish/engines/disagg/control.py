"""JSON messages between the coordinator and one rank.

They carry settings, requests, plans of iterations and outputs. Hidden states travel between ranks
only, and nothing is pickled.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from planish.base.errors import PeerLost
from planish.engines.requests import Output, Request, Sampling
from planish.records.rollouts import FinishReason

SEND_S = 30
"""Seconds after which a peer that does not read counts as lost."""

Message = dict[str, Any]


class Channel:
    """One end of a connection. Any thread may send; one thread may receive."""

    def __init__(self, connection: Connection, receive_s: int = 0) -> None:
        """Wrap a connection; a message must be complete within `receive_s` seconds of its start."""
        self.connection, self._lock = connection, threading.Lock()
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            for option, seconds in ((socket.SO_SNDTIMEO, SEND_S), (socket.SO_RCVTIMEO, receive_s)):
                end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, 0))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message.

        Raises:
            PeerLost: the peer has closed the connection or does not read.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            try:
                self.connection.send_bytes(data)
            except OSError as error:
                raise PeerLost(f"the other end of a control connection is gone: {error}") from None

    def receive(self) -> Message:
        """Return the next message.

        Raises:
            PeerLost: the peer has closed the connection, or stopped in the middle of a message.
        """
        try:
            message: Message = json.loads(self.connection.recv_bytes())
        except EOFError:
            raise PeerLost("the other end of a control connection has closed it") from None
        except OSError as error:
            raise PeerLost(f"a control connection broke: {error}") from None
        return message

    def has_message(self) -> bool:
        """Return whether `receive` would return or raise without waiting."""
        return self.connection.poll()

    def close(self) -> None:
        """Close the connection, which wakes a receiving thread; a second call does nothing."""
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end, suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def encode_request(request: Request) -> Message:
    """Return a request in JSON form."""
    return {**vars(request), "sampling": vars(request.sampling)}


def decode_requests(plain: Collection[Mapping[str, Any]]) -> list[Request]:
    """Return the requests from the results of `encode_request`."""
    requests = []
    for one in plain:
        ids = {name: tuple(one[name]) for name in ("prompt_ids", "response_prefix")}
        requests.append(Request(**{**one, **ids, "sampling": Sampling(**one["sampling"])}))
    return requests


def encode_outputs(outputs: Collection[Output]) -> list[Message]:
    """Return outputs in JSON form."""
    plain = []
    for output in outputs:
        one = {**vars(output), "finish_reason": int(output.finish_reason)}
        if output.routing is not None:
            data = base64.b64encode(output.routing.tobytes()).decode()
            one["routing"] = [data, str(output.routing.dtype), output.routing.shape]
        plain.append(one)
    return plain


def decode_outputs(plain: Collection[Mapping[str, Any]]) -> list[Output]:
    """Return the outputs from the result of `encode_outputs`."""
    outputs = []
    for one in plain:
        output = Output(**{**one, "finish_reason": FinishReason(one["finish_reason"])})
        if one["routing"] is not None:
            data, dtype, shape = one["routing"]
            output.routing = np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
        outputs.append(output)
    return outputs
