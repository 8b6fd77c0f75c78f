"""Messages between ranks: a TCP store on rank 0 that carries them, and errors as messages.

Nothing here knows the tree of ranks; see `control`.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import planish
from planish.base import errors
from planish.base.errors import PeerLost, PlanMismatch
from planish.store.processes import process_space, process_start

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

CONNECT_SECONDS = 60.0
LIVENESS_SECONDS = 0.5
"""How often a waiting rank checks whether the ranks it waits for on its own machine still live."""
EVERYONE = -1
"""In place of a rank: the error concerns all ranks together."""
_BUILTIN = {kind.__name__: kind for kind in (TypeError, ValueError, MemoryError)}
"""Kinds outside of our own tree that keep their kind on the way."""


class Peer(NamedTuple):
    """Where one rank lives."""

    machine: str
    """Equal for processes that see each other's process ids."""
    address: str
    """Address that other machines can reach."""
    pid: int
    started: int
    """Start of the process in clock ticks since boot."""
    port: int
    """Port of the store on rank 0, else 0."""
    version: str
    """Of this program: what ranks tell each other has no form of its own for each release."""


class TooLate(Exception):
    """No message in time, or the process that should send it has ended."""


class Line:
    """One connection to the store of rank 0, with what is known of the peers."""

    def __init__(
        self, address: str, server: TCPStore | None, peers: Sequence[Peer], rank: int
    ) -> None:
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed import DistError

        self.address, self.server, self.peers, self.rank = address, server, peers, rank
        self.port = peers[0].port
        self._twin: Line | None = None
        self._number = 0
        limit = datetime.timedelta(seconds=CONNECT_SECONDS)
        try:
            self.store = TCPStore(address, self.port, None, False, limit, wait_for_workers=False)
        except DistError as error:
            raise PeerLost(
                f"the store of rank 0 must answer at {self.address}:{self.port}, got {error!r}; "
                "is a firewall between the machines?"
            ) from error

    def twin(self) -> Line:
        """Return a second connection to the same store; it is made once."""
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
        """Return the number of the next operation.

        A rank that missed an operation that was given up skips its number.
        """
        given_up = self._read("given_up")[1:]
        self._number += 1
        if given_up:
            number, _, missed = given_up.decode().partition(" ")
            if int(number) >= self._number and missed != subject:
                self._number = int(number) + 1
        if self.rank == 0 and given_up:
            for key in self._call("list_keys"):
                scope = key.split("/", 1)[0]
                if scope.isdigit() and int(scope) < self._number and not key.endswith("/abort"):
                    self._call("delete_key", key)
        return str(self._number)

    def forget(self, scope: str, subject: str) -> None:
        """Record that an operation was given up, so that a rank that missed it catches up."""
        self.put("given_up", f"{scope} {subject}".encode())

    def note(self, stage: str) -> None:
        """Record what this rank is doing."""
        self.put(f"stage/{self.rank}", stage.encode())

    def stage_of(self, rank: int) -> str:
        """Return the last note of a rank, `none` without one."""
        return self._read(f"stage/{rank}")[1:].decode() or "none"

    def put(self, key: str, data: bytes) -> None:
        """Leave a message for its one receiver."""
        # The mark keeps an empty message from being taken for none.
        self._call("set", key, b"+" + data)

    def take(
        self, key: str, scope: str, peer: int, deadline: float, watched: Mapping[int, str]
    ) -> bytes:
        """Wait for a message of `peer`, fetch it and remove it from the store.

        An abort of the operation `scope` ends the wait. `TooLate`, with the rank, is raised once
        `deadline` (`time.monotonic`) has passed, or once one of the processes `watched` whose
        message has not come has ended.
        """
        started = looked = time.monotonic()
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
            # Short at first, because planning holds up training.
            time.sleep(min(0.02, max(0.0001, (now - started) / 10)))
        data: bytes = self._call("get", key)
        self._call("delete_key", key)
        return data[1:]

    def watch(self, rank: int, key: str = "") -> None:
        """Raise `TooLate` if a rank of this machine neither lives nor has left its message."""
        if not self._lives(rank) and not (key and self._call("check", [key])):
            raise TooLate(rank, f"but its process {self.peers[rank].pid} has ended")

    def abort(self, scope: str, errors: str) -> None:
        """Leave the error that ends an operation, unless there is one."""
        self._call("compare_set", f"{scope}/abort", "", errors)

    def raise_abort(self, scope: str) -> None:
        """Raise the error that has ended an operation, if one has, and confirm its receipt."""
        key = f"{scope}/abort"
        if self._call("check", [key]):
            self.put(f"{scope}/heard/{self.rank}", b"")
            raise joined_error(decode_errors(self._call("get", key)), len(self.peers))

    def wait_heard(self, scope: str, missed: int, seconds: float) -> None:
        """Wait until every rank that lives, but `missed`, knows why an operation ended.

        Called on rank 0, whose store may end as soon as it raises.
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
        stands: bytes = self._call("compare_set", key, "", value)
        return stands.decode()

    def lasting(self, key: str) -> str:
        """Return a value of `first_to_set`, empty if there is none."""
        return self._read(key).decode()

    def _read(self, key: str) -> bytes:
        data: bytes = self._call("get", key) if self._call("check", [key]) else b""
        return data

    def _lives(self, rank: int) -> bool:
        peer, here = self.peers[rank], self.peers[self.rank]
        return peer.machine != here.machine or process_start(peer.pid) == peer.started

    def _call(self, method: str, *args: Any) -> Any:
        from torch.distributed import DistError

        try:
            return getattr(self.store, method)(*args)
        except (DistError, RuntimeError) as error:
            raise PeerLost(
                f"rank 0 must keep its store open at {self.address}:{self.port}, "
                f"got {str(error).splitlines()[0]!r}; has its process ended?"
            ) from error


def listen() -> TCPStore:
    """Return the store of rank 0, open on a free port."""
    from torch._C._distributed_c10d import TCPStore

    limit = datetime.timedelta(seconds=CONNECT_SECONDS)
    return TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)


def here_at(port: int) -> Peer:
    """Return the address of this process, with the port of its store."""
    machine, pid = f"{socket.gethostname()}/{process_space()}", os.getpid()
    return Peer(machine, _address(), pid, process_start(pid), port, planish.__version__)


def _address() -> str:
    """Return the address of this machine on the network that the ranks share."""
    target = os.environ.get("MASTER_ADDR", "")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            address = str(probe.getsockname()[0])
    except OSError:
        address = "127.0.0.1"
    if address.startswith("127."):
        try:
            address = socket.gethostbyname(socket.gethostname())
        except OSError:
            return "127.0.0.1"
    return address


def pack(parts: Mapping[int, bytes]) -> bytes:
    """Return bytes of several ranks as one message: count, (rank, length) table, contents."""
    table = b"".join(struct.pack("<IQ", rank, len(data)) for rank, data in parts.items())
    return b"".join([struct.pack("<I", len(parts)), table, *parts.values()])


def unpack(message: bytes) -> dict[int, bytes]:
    """Undo `pack`."""
    (count,) = struct.unpack_from("<I", message)
    place, parts = 4 + 12 * count, {}
    for index in range(count):
        rank, length = struct.unpack_from("<IQ", message, 4 + 12 * index)
        parts[rank] = message[place : place + length]
        place += length
    assert place == len(message), "messages come from our own ranks only"
    return parts


def encode_errors(by_rank: Mapping[int, Exception]) -> str:
    """Return the errors of some ranks as JSON, empty for none; kinds by name, never pickled."""
    found = {}
    for rank, error in by_rank.items():
        kept = {k: v for k, v in vars(error).items() if isinstance(v, (str, int, float, dict))}
        found[rank] = type(error).__name__, str(error) or repr(error), kept
    return json.dumps(found) if found else ""


def decode_errors(text: str | bytes) -> dict[int, Exception]:
    """Undo `encode_errors`; an unknown kind becomes a `SaveFailed` that names it."""
    found: dict[int, Exception] = {}
    for rank, (name, message, facts) in json.loads(text or "{}").items():
        kind = getattr(errors, name, None) or _BUILTIN.get(name)
        text = message if kind else f"{name}: {message}"
        kind = kind or errors.SaveFailed
        error = kind.__new__(kind, text)
        per_rank = {int(each): why for each, why in facts.pop("per_rank", {}).items()}
        vars(error).update(facts, per_rank=per_rank)
        found[int(rank)] = error
    return found


def joined_error(by_rank: Mapping[int, Exception], size: int) -> Exception:
    """Return one error for all ranks: the lowest rank's kind, every message once, by rank.

    An error that has `per_rank`, or is that of `EVERYONE`, or of the only one of `size` ranks, is
    not given the names of ranks.
    """
    first = by_rank[min(by_rank)]
    if size == 1:
        return first
    per_rank: dict[int, str] = {}
    ranks_of: dict[str, list[int]] = {}
    for rank, error in sorted(by_rank.items()):
        own = getattr(error, "per_rank", {})
        ranks = ranks_of.setdefault(str(error), [])
        if rank != EVERYONE and not own:
            ranks.append(rank)
            own = {rank: str(error)}
        per_rank |= own
    message = "; ".join(
        f"{ranks_text(ranks)}: {text}" if ranks else text for text, ranks in ranks_of.items()
    )
    joined = decode_errors(encode_errors({0: first}))[0]
    joined.args = (message,)
    joined.per_rank = per_rank  # type: ignore[attr-defined]
    return joined


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks for an error: the first eight, and how many there are."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f", ... ({len(ranks)} in all)" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def refuse_different(action: str, by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Raise `PlanMismatch` where ranks were given different arguments of one action."""
    wrong = []
    for name in by_rank[0]:
        values: dict[str, list[int]] = {}
        for rank, arguments in enumerate(by_rank):
            values.setdefault(repr(arguments.get(name)), []).append(rank)
        if len(values) > 1:
            texts = (f"{value} on {ranks_text(ranks)}" for value, ranks in values.items())
            wrong.append(f"`{name}`: {', '.join(texts)}")
    if wrong:
        raise PlanMismatch(
            f"every rank must {action} with the same arguments, got {'; '.join(wrong)}"
        )
