"""Connections between machines that share a secret, among them connections to remote ranks.

`multiprocessing.connection` proves with keyed digests of random numbers that both ends know the
secret, and never sends it. Later messages are not encrypted, so the network between ranks must be
private.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from planish import __version__
from planish.base.child import Channel, Child
from planish.base.errors import ConfigError, EngineBusy, EngineError, ProtocolError

TOKEN_ENV = "PLANISH_RANKS_TOKEN"
"""Environment variable with the token that remote ranks and their coordinators share."""
HELLO_S = 2.0
"""Seconds in which a caller must prove that it knows the secret."""
_MIN_TOKEN = 16
_REDIAL_S = 0.2


def ranks_token() -> str:
    """Return the token in the environment; ConfigError if it is missing or too short."""
    token = os.environ.get(TOKEN_ENV, "")
    if len(token) < _MIN_TOKEN:
        raise ConfigError(
            f"{TOKEN_ENV} must hold a token of at least {_MIN_TOKEN} characters, equal for ranks "
            f"and coordinator, got {len(token)} characters; take it from one secret"
        )
    return token


@contextmanager
def proven(
    end: socket.socket, secret: str, timeout_s: float, *, is_caller: bool
) -> Iterator[Connection]:
    """Yield a connection for messages once both ends have proved that they know the secret.

    The connection is closed at the end of the block; the socket `end` stays open, without a
    time-out. If the block takes longer than `timeout_s`, the socket is shut down.

    Raises:
        AuthenticationError: the peer has another secret.
        OSError: the peer is gone, silent, or uses another protocol.
    """

    def shut() -> None:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    end.settimeout(None)
    timer = threading.Timer(timeout_s, shut)
    timer.daemon = True
    timer.start()
    steps = [deliver_challenge, answer_challenge]
    try:
        with Connection(os.dup(end.fileno())) as connection:
            for step in reversed(steps) if is_caller else steps:
                step(connection, secret.encode())
            yield connection
    except (AssertionError, EOFError) as error:
        raise ConnectionError(f"it does not say who it is ({error!r})") from None
    finally:
        timer.cancel()


def dial(
    address: tuple[str, int],
    secret: str,
    timeout_s: float,
    greet: Callable[[Connection], None],
) -> socket.socket:
    """Connect to a peer that knows the secret, and return the socket; retry until `timeout_s`.

    `greet` exchanges the first messages, and raises `EngineBusy` to request another try. A try that
    begins within `timeout_s` may take two more seconds. Raises the error of the last try.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        # The last try also needs time for a complete greeting.
        left = max(deadline - time.monotonic(), HELLO_S)
        try:
            end = socket.create_connection(address, timeout=left)
            try:
                with proven(end, secret, left, is_caller=True) as connection:
                    greet(connection)
            except BaseException:
                end.close()
                raise
            return end
        except (OSError, EngineBusy):
            if time.monotonic() + _REDIAL_S > deadline:
                raise
        time.sleep(_REDIAL_S)


def keep_alive(end: socket.socket) -> None:
    """Set TCP keep-alive, so that the kernel detects a lost machine within half a minute."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def answer_coordinator(caller: socket.socket, token: str, *, is_busy: bool) -> None:
    """Tell a caller that knows the token whether it gets this rank; raises like `proven`."""
    with proven(caller, token, HELLO_S, is_caller=False) as connection:
        connection.send_bytes(json.dumps({"release": __version__, "busy": is_busy}).encode())
    keep_alive(caller)


def call_rank(address: tuple[str, int], token: str, timeout_s: float) -> socket.socket:
    """Return a connection to a rank on another machine; calls until it listens and is free.

    Raises:
        EngineError: no rank answers in time.
        EngineBusy: another coordinator keeps the rank the whole time.
        ProtocolError: its token or its release differs.
    """
    place = f"{address[0]}:{address[1]}"

    def greet(connection: Connection) -> None:
        told = json.loads(connection.recv_bytes())
        if told["release"] != __version__:
            raise ProtocolError(
                f"the rank at {place} must be of release {__version__}, got {told['release']}; run "
                "one release on ranks and coordinator"
            )
        if told["busy"]:
            raise EngineBusy(
                f"the rank at {place} must be free, got one that another coordinator has; let "
                "rollout tasks run one after another, or give each its ranks"
            )

    try:
        end = dial(address, token, timeout_s, greet)
    except AuthenticationError:
        raise ProtocolError(
            f"the rank at {place} must have the token of this coordinator, got another; take "
            f"{TOKEN_ENV} from one secret on both"
        ) from None
    except OSError as error:
        raise EngineError(
            f"a rank must listen at {place} within {timeout_s:g} s, got {error}; see whether its "
            "pod runs, whether a network policy lets this one call it, and whether the port is "
            "that of `planish rollout rank`"
        ) from None
    keep_alive(end)
    return end


def elsewhere(peers: Sequence[str], timeout_s: float) -> Callable[[int], Child]:
    """Return a launcher for ranks on other machines, which connects in the order of the ranks.

    Their hosts end them when the connection ends.

    Peers are `host:port`, attention ranks first; each has `timeout_s` to listen and to be free. If
    two coordinators start at the same time, the one that gets rank 0 gets all ranks.
    """
    token, addresses = ranks_token(), [address_of(peer) for peer in peers]
    return lambda rank: Child(Channel(call_rank(addresses[rank], token, timeout_s)))


def address_of(peer: str) -> tuple[str, int]:
    """Return host and port of `host:port`; ConfigError for another form.

    Example:
        >>> address_of("ranks-0.ranks:9610"), address_of("[::1]:9610")
        (('ranks-0.ranks', 9610), ('::1', 9610))
    """
    host, _, port = peer.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"the address of a rank must read `host:port`, got {peer!r}")
    return host, int(port)
