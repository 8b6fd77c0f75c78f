"""The connection that control messages travel through: named messages in a store on rank 0.

It knows nothing of the tree; see `coordination`.
"""

from __future__ import annotations

import datetime
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planish.base.errors import PeerLost
from planish.checkpoint.ranks import control_errors

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

CONNECT_SECONDS = 60.0
"""Limit on the first meeting of the ranks."""
LIVENESS_SECONDS = 0.5
"""How often a waiting rank looks whether its neighbours on the same machine still live."""


@dataclass(frozen=True)
class Peer:
    """Where one rank lives.

    Example:
        >>> Peer(machine="a", address="10.0.0.1", pid=7, started="99", port=0).machine
        'a'
    """

    machine: str
    """Equal for processes that see each other's process ids."""
    address: str
    """Address that other machines can reach."""
    pid: int
    """Process id, with `started` the identity of the process."""
    started: str
    """Start time of the process in clock ticks, empty where unknown."""
    port: int
    """Port of the store on rank 0, else 0."""


class TooLate(Exception):
    """No message in time, or the process that should send it has ended."""


class Line:
    """One connection to the store of rank 0, with what is known of the peers."""

    def __init__(
        self, address: str, server: TCPStore | None, peers: Sequence[Peer], rank: int
    ) -> None:
        """Connect; `server` is the store itself, on rank 0."""
        self.address, self.server, self.peers, self.rank = address, server, peers, rank
        self.port = peers[0].port
        self.store = self._connect()
        self._twin: Line | None = None
        self._number = 0

    def _connect(self) -> TCPStore:
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed import DistError

        limit = datetime.timedelta(seconds=CONNECT_SECONDS)
        try:
            return TCPStore(self.address, self.port, None, False, limit, wait_for_workers=False)
        except DistError as error:
            raise PeerLost(
                f"the store of rank 0 must answer at {self.address}:{self.port}, got {error!r}; "
                "is a firewall between the machines?"
            ) from error

    def twin(self) -> Line:
        """Return a second connection to the same store, made once."""
        if self._twin is None:
            self._twin = Line(self.address, None, self.peers, self.rank)
        return self._twin

    def close(self) -> None:
        """Drop the connections; on rank 0 the store ends with them."""
        if self._twin is not None:
            self._twin.close()
        del self.store
        self._twin = self.server = None

    def next_scope(self, subject: str) -> str:
        """Number the operation; a rank that missed one that was given up catches up."""
        given_up = self._read("given_up")
        self._number += 1
        if given_up:
            number, _, missed = given_up.decode().partition(" ")
            if int(number) >= self._number and missed != subject:
                self._number = int(number) + 1
        if self.rank == 0 and given_up:
            self._sweep()
        return str(self._number)

    def _sweep(self) -> None:
        for key in self._call("list_keys"):
            scope = key.split("/", 1)[0]
            if scope.isdigit() and int(scope) < self._number and not key.endswith("/abort"):
                self._call("delete_key", key)

    def forget(self, scope: str, subject: str) -> None:
        """Record that an operation was given up, so that a rank that missed it catches up."""
        self.put("given_up", f"{scope} {subject}".encode())

    def note(self, stage: str) -> None:
        """Record what this rank is doing."""
        self.put(f"stage/{self.rank}", stage.encode())

    def stage_of(self, rank: int) -> str:
        """Return what a rank was last doing, `none` if it never said."""
        return self._read(f"stage/{rank}").decode() or "none"

    def put(self, key: str, data: bytes) -> None:
        """Leave a message for its one receiver."""
        # The mark keeps an empty message from being taken for none.
        self._call("set", key, b"+" + data)

    def take(
        self, key: str, scope: str, peer: int, deadline: float, watched: Mapping[int, str]
    ) -> bytes:
        """Wait for a message, fetch it and remove it from the store.

        Args:
            key: Of the message.
            scope: Of the operation; its abort ends the wait.
            peer: Who sends it.
            deadline: By `time.monotonic`.
            watched: Ranks whose end ends the wait too, unless their message has come.

        Raises:
            TooLate: nothing came in time, or a process has ended; `args[0]` is the rank.
        """
        started = time.monotonic()
        looked = started
        while not self._call("check", [key]):
            now = time.monotonic()
            if now - looked > LIVENESS_SECONDS:
                looked = now
                self.raise_abort(scope)
                for rank, message in {**watched, peer: key}.items():
                    self.watch(rank, message)
            if now > deadline:
                self.raise_abort(scope)
                raise TooLate(peer, f"but has not within {now - started:.1f} s")
            # Short at first, because planning is in the way of training.
            time.sleep(min(0.02, max(0.0001, (now - started) / 10)))
        data: bytes = self._call("get", key)
        self._call("delete_key", key)
        return data[1:]

    def watch(self, rank: int, key: str = "") -> None:
        """See that a rank of this machine lives, or has left its message.

        Raises:
            TooLate: neither.
        """
        if not self._lives(rank) and not (key and self._call("check", [key])):
            raise TooLate(rank, f"but its process {self.peers[rank].pid} has ended")

    def abort(self, scope: str, data: bytes) -> None:
        """Leave the error that ends an operation, unless there is one."""
        self._call("compare_set", f"{scope}/abort", "", data.decode())

    def raise_abort(self, scope: str) -> None:
        """Raise the error that has ended an operation, if one has, and say that it was heard."""
        key = f"{scope}/abort"
        if self._call("check", [key]):
            self.put(f"{scope}/heard/{self.rank}", b"")
            found = control_errors.decode(self._call("get", key))
            raise control_errors.joined(found, len(self.peers))

    def see_heard(self, scope: str, missed: int, seconds: float) -> None:
        """Wait until every rank that lives, but `missed`, has heard why an operation ended.

        Rank 0 does, for its store may end with it as soon as it has raised.
        """
        deadline = time.monotonic() + seconds
        for rank in range(len(self.peers)):
            key = f"{scope}/heard/{rank}"
            while rank not in (self.rank, missed) and time.monotonic() < deadline:
                if not self._lives(rank) or self._call("check", [key]):
                    break
                time.sleep(0.02)

    def first_to_set(self, key: str, value: str) -> str:
        """Set a lasting value unless there is one; returns the value that stands."""
        found: bytes = self._call("compare_set", key, "", value)
        return found.decode()

    def lasting(self, key: str) -> str:
        """Return a value of `first_to_set`, empty if there is none."""
        found: bytes = self._call("get", key) if self._call("check", [key]) else b""
        return found.decode()

    def _read(self, key: str) -> bytes:
        found: bytes = self._call("get", key) if self._call("check", [key]) else b""
        return found[1:]

    def _lives(self, rank: int) -> bool:
        peer, here = self.peers[rank], self.peers[self.rank]
        return peer.machine != here.machine or started_at(peer.pid) == peer.started

    def _call(self, method: str, *args: Any) -> Any:
        from torch.distributed import DistError

        try:
            return getattr(self.store, method)(*args)
        except (DistError, RuntimeError) as error:
            raise PeerLost(
                f"rank 0 must keep its store open at {self.address}:{self.port}, "
                f"got {str(error).splitlines()[0]!r}; has its process ended?"
            ) from error


def pack(parts: Mapping[int, bytes]) -> bytes:
    """Return bytes of several ranks as one message: count, (rank, length) table, contents."""
    table = b"".join(struct.pack("<IQ", rank, len(data)) for rank, data in parts.items())
    return b"".join([struct.pack("<I", len(parts)), table, *parts.values()])


def unpack(message: bytes) -> dict[int, bytes]:
    """Undo `pack`."""
    (count,) = struct.unpack_from("<I", message)
    place, found = 4 + 12 * count, {}
    for index in range(count):
        rank, length = struct.unpack_from("<IQ", message, 4 + 12 * index)
        found[rank] = message[place : place + length]
        place += length
    assert place == len(message), "messages come from our own ranks only"
    return found


def listen() -> TCPStore:
    """Return the store of rank 0, open on a free port."""
    from torch._C._distributed_c10d import TCPStore

    limit = datetime.timedelta(seconds=CONNECT_SECONDS)
    return TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)


def here_at(port: int) -> Peer:
    """Return where this process lives."""
    return Peer(
        machine=machine_identity(),
        address=_address(),
        pid=os.getpid(),
        started=started_at(os.getpid()),
        port=port,
    )


def machine_identity() -> str:
    """Return a text that is equal for processes that see each other's process ids."""
    facts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            facts.append(file.read().strip())
        facts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass
    return "/".join(facts)


def started_at(pid: int) -> str:
    """Return when a process started in clock ticks; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _address() -> str:
    """Return the address of this machine on the network that the ranks share."""
    target = os.environ.get("MASTER_ADDR", "")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            found = str(probe.getsockname()[0])
    except OSError:
        found = "127.0.0.1"
    if found.startswith("127."):
        try:
            found = socket.gethostbyname(socket.gethostname())
        except OSError:
            return "127.0.0.1"
    return found
