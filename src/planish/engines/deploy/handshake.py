"""How a coordinator and the host of a rank show each other that both know one token.

Each side answers the random number of the other by a keyed digest, so that the token is never on
the wire and an answer is of no use a second time. What follows is not encrypted: the network
between ranks must be private.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import time
from enum import IntEnum

from planish.base.errors import ConfigError, EngineBusy, EngineError, ProtocolError

TOKEN_ENV = "PLANISH_RANKS_TOKEN"
"""Environment variable with the token, on ranks and coordinators."""
HELLO_S = 2.0
"""For a caller to show that it knows the token."""
MAGIC = b"PLRANK01"
"""Begins what a host says; the digits are the version of this exchange."""
_NONCE, _DIGEST, _MIN_TOKEN = 32, 32, 16
_REDIAL_S = 0.2


class CallVerdict(IntEnum):
    """What a host answers to a caller."""

    WELCOME = 0
    WRONG_TOKEN = 1
    BUSY = 2


def ranks_token() -> str:
    """Return the token of this environment.

    Raises:
        ConfigError: there is none, or it can be guessed.
    """
    token = os.environ.get(TOKEN_ENV, "")
    if len(token) < _MIN_TOKEN:
        raise ConfigError(
            f"{TOKEN_ENV} must hold a token of at least {_MIN_TOKEN} characters, equal for ranks "
            f"and coordinator, got {len(token)} characters; take it from one secret"
        )
    return token


def answer_caller(caller: socket.socket, token: str, *, is_busy: bool) -> bool:
    """Say who this is, see whether a caller knows the token, and tell it the verdict.

    Args:
        caller: that has just connected.
        token: of this instance.
        is_busy: another coordinator has this rank.

    Returns:
        Whether it may stay.

    Raises:
        OSError: it is gone, or says nothing for two seconds.
    """
    deadline = time.monotonic() + HELLO_S
    caller.settimeout(HELLO_S)
    ours = secrets.token_bytes(_NONCE)
    caller.sendall(MAGIC + ours)
    said = _receive(caller, _NONCE + _DIGEST, deadline)
    theirs, shown = said[:_NONCE], said[_NONCE:]
    verdict = CallVerdict.BUSY if is_busy else CallVerdict.WELCOME
    if not hmac.compare_digest(shown, _digest(token, b"coordinator", ours, theirs)):
        verdict = CallVerdict.WRONG_TOKEN
    told = bytes([verdict])
    caller.sendall(told + _digest(token, b"host" + told, ours, theirs))
    return verdict is CallVerdict.WELCOME


def call_host(address: tuple[str, int], token: str, timeout_s: float) -> socket.socket:
    """Return a connection to the host of a rank; calls until it listens and is free.

    Args:
        address: of the host.
        token: of the instance.
        timeout_s: for all of it.

    Raises:
        EngineError: nobody listens there in time.
        EngineBusy: another coordinator has the rank all the time.
        ProtocolError: what listens there is no rank, or its token differs.
    """
    place = f"{address[0]}:{address[1]}"
    deadline = time.monotonic() + timeout_s
    problem: Exception = EngineError("no time was left")
    while (left := deadline - time.monotonic()) > 0:
        connection = None
        try:
            connection = socket.create_connection(address, timeout=left)
            prove(connection, token, place, deadline)
            keep_alive(connection)
            return connection
        except (OSError, EngineBusy) as error:
            problem = error
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        if connection is not None:
            connection.close()
        time.sleep(min(_REDIAL_S, left))
    if isinstance(problem, EngineBusy):
        raise problem
    raise EngineError(
        f"a rank must listen at {place} within {timeout_s:g} s, got {problem}; see whether its pod "
        "runs and whether a network policy lets this one call it"
    )


def prove(connection: socket.socket, token: str, place: str, deadline: float) -> None:
    """Show the token to a host and see that it knows it as well; as `call_host` raises."""
    said = _receive(connection, len(MAGIC) + _NONCE, deadline)
    if not said.startswith(MAGIC):
        raise ProtocolError(
            f"a rank of this release must be at {place}, got something that says {said[:8]!r}; run "
            "one release on ranks and coordinator, and give ports of `planish rollout rank`"
        )
    theirs, ours = said[len(MAGIC) :], secrets.token_bytes(_NONCE)
    connection.sendall(ours + _digest(token, b"coordinator", theirs, ours))
    answer = _receive(connection, 1 + _DIGEST, deadline)
    told, shown = answer[:1], answer[1:]
    is_known = hmac.compare_digest(shown, _digest(token, b"host" + told, theirs, ours))
    if not is_known or told[0] == CallVerdict.WRONG_TOKEN:
        raise ProtocolError(
            f"the rank at {place} must have the token of this coordinator, got another; take "
            f"{TOKEN_ENV} from one secret on both"
        )
    if told[0] != CallVerdict.WELCOME:
        raise EngineBusy(
            f"the rank at {place} must be free, got one that another coordinator has; let rollout "
            "tasks run one after another, or give each its ranks"
        )


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out within half a minute that the machine at the other end is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        # Bytes that trickle in do not prolong the wait.
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("it closed the connection before it had said who it is")
        data += part
    return data


def _digest(token: str, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token.encode(), side + first + second, hashlib.sha256)
