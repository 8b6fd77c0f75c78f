"""Open the two connections of each pair of ranks, and refuse who is of another instance.

The lower rank of a pair dials. Both sides compare the release, the token of the instance, the
ranks and the sizes of buffers. The token keeps out strangers and left-over ranks of an earlier
start; it is no secret on the wire, so that the network itself must be private.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import astuple
from enum import IntEnum

from planish.base.errors import PeerLost, ProtocolError
from planish.engines.disagg.m2n.frames import PROTOCOL, FrameLimits

logger = logging.getLogger(__name__)

HELLO_MAGIC = b"M2NH"
_ANSWER_MAGIC = b"M2NA"
_HELLO = struct.Struct("<4sBBHH5I32s")
_ANSWER = struct.Struct("<4sBB")
_REDIAL_S = 0.05
_HELLO_S = 2.0


class Lane(IntEnum):
    """Which of the two connections of a pair."""

    DATA = 0
    """DISPATCH frames."""
    URGENT = 1
    """REPLY, CONTROL and CREDIT frames: never behind rows on their way out."""


class Answer(IntEnum):
    """What a rank answers to a caller."""

    WELCOME = 0
    OTHER_RELEASE = 1
    WRONG_TOKEN = 2
    UNKNOWN_RANK = 3
    OTHER_SIZES = 4


_REASONS = {
    Answer.OTHER_RELEASE: "it speaks another protocol version; run one release on all ranks",
    Answer.WRONG_TOKEN: "its token differs: it is of another instance",
    Answer.UNKNOWN_RANK: "its address and its rank do not belong together, or it came twice",
    Answer.OTHER_SIZES: "its buffers have other sizes; give all ranks one configuration",
}


class Handshake:
    """Connects one rank with its peers; used once."""

    def __init__(self, rank: int, limits: FrameLimits, token: str, timeout_s: float) -> None:
        """Start the clock.

        Args:
            rank: of this process.
            limits: sizes of its buffers.
            token: of the instance.
            timeout_s: for all connections together.
        """
        self._rank, self._sizes = rank, astuple(limits)
        self._digest = hashlib.sha256(token.encode()).digest()
        self._deadline = time.monotonic() + timeout_s
        self._made: dict[tuple[int, Lane], socket.socket] = {}

    def connect(
        self, listener: socket.socket, addresses: Mapping[int, tuple[str, int]]
    ) -> dict[tuple[int, Lane], socket.socket]:
        """Return the connections with all peers, by peer and lane.

        Args:
            listener: where lower ranks dial this one.
            addresses: host and port by rank.

        Raises:
            PeerLost: a peer did not answer or did not call in time.
            ProtocolError: a peer refused this rank, or is configured otherwise.
        """
        higher = sorted(rank for rank in addresses if rank > self._rank)
        try:
            for peer in higher:
                for lane in Lane:
                    self._made[peer, lane] = self.dial(peer, lane, addresses[peer])
            self.accept(listener, {(r, lane) for r in addresses if r < self._rank for lane in Lane})
        except BaseException:
            for connection in self._made.values():
                connection.close()
            raise
        for connection in self._made.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
        return self._made

    def dial(self, peer: int, lane: Lane, address: tuple[str, int]) -> socket.socket:
        """Call a peer until it answers.

        Raises:
            PeerLost: it does not, in time.
            ProtocolError: it refused this rank.
        """
        problem = "no time was left"
        hello = _HELLO.pack(
            HELLO_MAGIC, PROTOCOL, lane, self._rank, peer, *self._sizes, self._digest
        )
        while (left := self._deadline - time.monotonic()) > 0:
            connection = None
            try:
                connection = socket.create_connection(address, timeout=left)
                connection.sendall(hello)
                answer = connection.recv(_ANSWER.size, socket.MSG_WAITALL)
                if len(answer) == _ANSWER.size:
                    break
                problem = "it closed the connection before it answered"
            except OSError as error:
                problem = str(error)
            if connection is not None:
                connection.close()
            time.sleep(min(_REDIAL_S, left))
        else:
            reason = f"did not answer at {address[0]}:{address[1]} ({problem})"
            raise PeerLost(
                f"rank {peer} must answer its peers in time, but it {reason}; see whether it runs",
                per_rank={peer: reason},
            )
        magic, protocol, verdict = _ANSWER.unpack(answer)
        if (magic, protocol, verdict) == (_ANSWER_MAGIC, PROTOCOL, Answer.WELCOME):
            return connection
        connection.close()
        reason = f"what answers is no rank, it says {answer!r}"
        if magic == _ANSWER_MAGIC:
            told = _REASONS.get(verdict, f"verdict {verdict}")
            reason = f"it speaks protocol {protocol} and refuses rank {self._rank}: {told}"
        raise ProtocolError(f"rank {peer} must be at {address[0]}:{address[1]}, but {reason}")

    def accept(self, listener: socket.socket, expected: set[tuple[int, Lane]]) -> None:
        """Take calls until all expected ones have come; strangers are refused and forgotten.

        A caller that says nothing holds the others up for at most two seconds.

        Raises:
            PeerLost: an expected peer did not call in time.
            ProtocolError: a peer has other sizes of buffers.
        """
        refused: list[str] = []
        while missing := expected - self._made.keys():
            left = self._deadline - time.monotonic()
            caller = None
            try:
                listener.settimeout(max(left, 0.001))
                caller, _ = listener.accept()
                caller.settimeout(max(min(left, _HELLO_S), 0.001))
                hello = caller.recv(_HELLO.size, socket.MSG_WAITALL)
                verdict, owner = self.judge(hello, missing)
                caller.sendall(_ANSWER.pack(_ANSWER_MAGIC, PROTOCOL, verdict))
            except OSError as error:
                if caller is not None:
                    caller.close()
                    refused.append(f"it did not say who it is ({error})")
                if left > 0:
                    continue
                lost = sorted({rank for rank, _ in missing})
                reason = f"did not call in time; refused callers: {refused or 'none'}"
                raise PeerLost(
                    f"ranks {lost} must call rank {self._rank}, but they {reason}",
                    per_rank=dict.fromkeys(lost, reason),
                ) from error
            if verdict is Answer.WELCOME:
                self._made[owner] = caller
                continue
            caller.close()
            refused.append(_REASONS[verdict])
            logger.warning("refused_caller rank=%d reason=%r", self._rank, refused[-1])
            if verdict is Answer.OTHER_SIZES:
                raise ProtocolError(f"rank {owner[0]} called rank {self._rank}, but {refused[-1]}")

    def judge(
        self, hello: bytes, missing: set[tuple[int, Lane]]
    ) -> tuple[Answer, tuple[int, Lane]]:
        """Return whether a caller may stay, and who it says it is."""
        if len(hello) != _HELLO.size:
            return Answer.OTHER_RELEASE, (-1, Lane.DATA)
        magic, protocol, lane, source, target, *sizes, digest = _HELLO.unpack(hello)
        if magic != HELLO_MAGIC or protocol != PROTOCOL:
            return Answer.OTHER_RELEASE, (-1, Lane.DATA)
        if not hmac.compare_digest(digest, self._digest):
            return Answer.WRONG_TOKEN, (source, Lane.DATA)
        if target != self._rank or (source, lane) not in missing:
            return Answer.UNKNOWN_RANK, (source, Lane.DATA)
        is_equal = tuple(sizes) == self._sizes
        return (Answer.WELCOME if is_equal else Answer.OTHER_SIZES), (source, Lane(lane))
