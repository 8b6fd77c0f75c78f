"""The coordinator's side of ranks on other machines: called at their addresses, not started.

A rank there belongs to one coordinator at a time. It ends when that one's connection does, and its
host waits for the next.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from planish.base.errors import ConfigError
from planish.engines.deploy.handshake import call_host, ranks_token


class RemoteRank:
    """A rank whose only sign of life is its connection; a `Process` as far as that goes."""

    pid = 0
    """Its number on the other machine says nothing here."""

    def poll(self) -> int | None:
        """Return None: that it has ended shows at its connection."""
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return at once: its host ends it when the connection is closed."""
        return 0

    def kill(self) -> None:
        """Leave the end to its host, which sees that the connection is closed."""


class Dialer:
    """Opens the connections with the ranks of one instance, in the order of the ranks.

    Two coordinators that come at once do not hold half of the ranks each: who gets rank 0 gets all.
    """

    def __init__(self, peers: Sequence[str], timeout_s: float) -> None:
        """Read the token and the addresses.

        Args:
            peers: `host:port` of each rank, attention ranks first.
            timeout_s: for each rank to listen and to be free.

        Raises:
            ConfigError: no token in the environment.
        """
        self._token, self._timeout_s = ranks_token(), timeout_s
        self._addresses = [address_of(peer) for peer in peers]

    def __call__(self, rank: int) -> tuple[RemoteRank, socket.socket]:
        """Return a rank and the connection to it; as `call_host` raises."""
        connection = call_host(self._addresses[rank], self._token, self._timeout_s)
        return RemoteRank(), connection


def address_of(peer: str) -> tuple[str, int]:
    """Return host and port of `host:port`.

    Raises:
        ConfigError: another form.

    Example:
        >>> address_of("ranks-0.ranks:9610"), address_of("[::1]:9610")
        (('ranks-0.ranks', 9610), ('::1', 9610))
    """
    host, _, port = peer.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"the address of a rank must read `host:port`, got {peer!r}")
    return host, int(port)
