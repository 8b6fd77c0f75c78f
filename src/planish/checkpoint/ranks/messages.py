"""Messages between ranks, through a TCP store on rank 0, and errors as messages.

The tree of ranks is in `control`.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import planish
from planish.base import errors
from planish.base.errors import PeerLost, PlanMismatch
from planish.base.parallel import Words
from planish.store.processes import process_space, process_start

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

CONNECT_SECONDS = 60.0
EVERYONE = -1
"""Rank number of an error that concerns all ranks together."""
_BUILTIN = {kind.__name__: kind for kind in (TypeError, ValueError, MemoryError)}
"""Builtin errors that keep their type in messages."""


class Peer(NamedTuple):
    """Location of one rank."""

    machine: str
    """Host and process namespace; equal for processes that see each other's process ids."""
    address: str
    """Network address for other machines."""
    pid: int
    started: int
    """Start of the process in clock ticks since boot."""
    port: int
    """Port of the store on rank 0, else 0."""
    version: str
    """Version of planish; all ranks must have the same, because messages have no version."""


class TooLate(Exception):
    """A message did not arrive in time, or the process of its sender has ended."""


class Line:
    """One connection to the store of rank 0, and the locations of all ranks."""

    def __init__(
        self, words: Words, peers: Sequence[Peer], rank: int, server: TCPStore | None = None
    ) -> None:
        """Take a connection; rank 0 has the `server` too."""
        self.words, self.server, self.peers, self.rank = words, server, peers, rank
        self._twin: Line | None = None
        self._number = 0

    def twin(self) -> Line:
        """Return the second connection to the same store; the first call opens it."""
        if self._twin is None:
            clone = self.words.call("clone")
            self._twin = Line(Words(clone, self.words.owner), self.peers, self.rank)
        return self._twin

    def close(self) -> None:
        """Close the connections; on rank 0 the store ends with them."""
        if self._twin is not None:
            self._twin.close()
        self.words.store = self._twin = self.server = None

    def next_scope(self, subject: str) -> str:
        """Return the number of the next operation.

        A rank skips the number of an aborted operation that it did not take part in.
        """
        given_up = self.words.read("given_up")
        self._number += 1
        if given_up:
            number, _, missed = given_up.decode().partition(" ")
            if int(number) >= self._number and missed != subject:
                self._number = int(number) + 1
        if self.rank == 0 and given_up:
            for key in list(self.words.call("list_keys")):
                scope = key.split("/", 1)[0]
                if scope.isdigit() and int(scope) < self._number and not key.endswith("/abort"):
                    self.words.call("delete_key", key)
        return str(self._number)

    def forget(self, scope: str, subject: str) -> None:
        """Record that an operation was aborted, so that a rank that missed it skips its number."""
        self.words.tell("given_up", f"{scope} {subject}")

    def note(self, stage: str) -> None:
        """Record the stage of this rank."""
        self.words.tell(f"stage/{self.rank}", stage)

    def stage_of(self, rank: int) -> str:
        """Return the last stage of a rank, `none` without one."""
        return self.words.read(f"stage/{rank}").decode() or "none"

    def put(self, key: str, data: bytes) -> None:
        """Store a message for its only receiver."""
        # The mark `+` distinguishes an empty message from none.
        self.words.tell(key, b"+" + data)

    def take(
        self, key: str, scope: str, peer: int, deadline: float, watched: Mapping[int, str]
    ) -> bytes:
        """Wait for a message of `peer`, fetch it and remove it from the store.

        An abort of the operation `scope` ends the wait with its error. `TooLate(rank, text)` is
        raised after `deadline` (`time.monotonic`), or when `peer` or a rank of `watched` (rank ->
        key of its message) has ended without its message.
        """

        def look() -> None:
            self.raise_abort(scope)
            for rank, message in {**watched, peer: key}.items():
                self.watch(rank, message)

        started = time.monotonic()
        if not self.words.wait([key], deadline, look):
            self.raise_abort(scope)
            raise TooLate(peer, f"but has not within {time.monotonic() - started:.1f} s")
        data: bytes = self.words.call("get", key)
        self.words.call("delete_key", key)
        return data[1:]

    def watch(self, rank: int, key: str = "") -> None:
        """Raise `TooLate` if a rank of this machine has ended without its message `key`."""
        if not self._lives(rank) and not (key and self.words.call("check", [key])):
            raise TooLate(rank, f"but its process {self.peers[rank].pid} has ended")

    def abort(self, scope: str, errors: str) -> None:
        """Store the error that aborts an operation, unless there is one already."""
        self.words.call("compare_set", f"{scope}/abort", "", errors)

    def raise_abort(self, scope: str) -> None:
        """Raise the error of an operation if it was aborted, and confirm the receipt."""
        key = f"{scope}/abort"
        if self.words.call("check", [key]):
            self.put(f"{scope}/heard/{self.rank}", b"")
            raise joined_error(decode_errors(self.words.call("get", key)), len(self.peers))

    def wait_heard(self, scope: str, missed: int, seconds: float) -> None:
        """Wait until every living rank except `missed` has received the error of an operation.

        Rank 0 calls it before it raises, because its store may end after that.
        """
        deadline = time.monotonic() + seconds
        for rank in range(len(self.peers)):
            key = f"{scope}/heard/{rank}"
            while rank not in (self.rank, missed) and time.monotonic() < deadline:
                if not self._lives(rank) or self.words.call("check", [key]):
                    break
                time.sleep(0.02)

    def _lives(self, rank: int) -> bool:
        peer, here = self.peers[rank], self.peers[self.rank]
        return peer.machine != here.machine or process_start(peer.pid) == peer.started


def connect(address: str, port: int) -> Words:
    """Return a connection to the store of rank 0; PeerLost if none answers."""
    from torch._C._distributed_c10d import TCPStore

    limit = datetime.timedelta(seconds=CONNECT_SECONDS)
    try:
        store = TCPStore(address, port, None, False, limit, wait_for_workers=False)
    except RuntimeError as error:
        raise PeerLost(
            f"the store of rank 0 must answer at {address}:{port}, got {error!r}; is a firewall "
            "between the machines?"
        ) from error
    return Words(store, f"rank 0 at {address}:{port}")


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
    """Return bytes of several ranks as one message: JSON with their lengths, a line end, bytes."""
    lengths = [(rank, len(data)) for rank, data in parts.items()]
    return b"".join([json.dumps(lengths).encode(), b"\n", *parts.values()])


def unpack(message: bytes) -> dict[int, bytes]:
    """Undo `pack`."""
    head, _, data = message.partition(b"\n")
    start, parts = 0, {}
    for rank, length in json.loads(head):
        parts[rank] = data[start : start + length]
        start += length
    return parts


def encode_errors(by_rank: Mapping[int, Exception]) -> str:
    """Return the errors of some ranks as JSON, empty for none; types by name, without pickle."""
    found = {}
    for rank, error in by_rank.items():
        kept = {k: v for k, v in vars(error).items() if isinstance(v, (str, int, float, dict))}
        found[rank] = type(error).__name__, str(error) or repr(error), kept
    return json.dumps(found) if found else ""


def decode_errors(text: str | bytes) -> dict[int, Exception]:
    """Undo `encode_errors`; an unknown type becomes a `SaveFailed` that names it."""
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
    """Return one error for all ranks: the type of the lowest rank's, each message once, by rank.

    The message of an error gets no rank numbers if the error has `per_rank`, if it is of
    `EVERYONE`, or if `size` is 1.
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
    """Return ranks as text for an error: the first eight, and the number of all if more."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f", ... ({len(ranks)} in all)" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def refuse_different(action: str, by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Raise `PlanMismatch` if the arguments of one action differ between ranks."""
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
