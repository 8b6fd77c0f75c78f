"""Collectives of small messages between the ranks of one save or load: in a tree, with time limits.

Messages go through a separate TCP store, on its own port. The calling thread uses the process group
of the training once, to send every rank the address of that store. After that a background thread
may communicate while training runs its own collectives. No tensors are sent.

Source: ByteCheckpoint, arXiv 2407.20143, section 5.2 (tree of control messages, no NCCL).
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planish.base.errors import PeerLost, PlanishError, PlanMismatch, SaveFailed
from planish.base.parallel import Words
from planish.checkpoint.ranks.messages import (
    CONNECT_SECONDS,
    EVERYONE,
    Line,
    Peer,
    TooLate,
    connect,
    decode_errors,
    encode_errors,
    here_at,
    joined_error,
    listen,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroup

FAN_IN = 8
"""Largest number of ranks in a group of the tree, above the level of machines."""
GRACE_SECONDS = 5.0
"""Seconds by which a rank waits longer for its parent than for its children."""


@dataclass(frozen=True)
class Tree:
    """Tree of ranks that exchange messages; rank 0 is the root, and no rank has many neighbours."""

    hosts: tuple[int, ...]
    """[ranks], number of the machine."""
    parents: tuple[int, ...]
    """[ranks], the parent rank, -1 for rank 0."""
    children: tuple[tuple[int, ...], ...]
    """[ranks], the child ranks, ascending."""

    def below(self, rank: int) -> set[int]:
        """Return the ranks of the subtree of `rank`, itself included."""
        return {rank}.union(*map(self.below, self.children[rank]))


def plan_tree(hosts: Sequence[int], fan_in: int = FAN_IN) -> Tree:
    """Attach the ranks of a machine to its lowest rank, then groups of these to their first."""
    parents = [-1] * len(hosts)
    roots: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        parents[rank] = roots.setdefault(host, rank)
    level = list(roots.values())
    while len(level) > 1:
        for first in range(0, len(level), fan_in):
            for rank in level[first : first + fan_in]:
                parents[rank] = level[first]
        level = level[::fan_in]
    parents[0] = -1
    below: list[list[int]] = [[] for _ in hosts]
    for rank, parent in enumerate(parents[1:], 1):
        below[parent].append(rank)
    return Tree(tuple(hosts), tuple(parents), tuple(map(tuple, below)))


_controls: dict[int, tuple[Any, Control]] = {}


def control_of(group: ProcessGroup | None = None) -> Control:
    """Return the control of a process group; the first call makes it and is a collective."""
    import torch.distributed as dist

    member: Any = None
    if dist.is_available() and dist.is_initialized():
        member = group if group is not None else dist.group.WORLD
    known = _controls.get(id(member))
    if known is None or known[0] is not member or known[1].is_closed:
        if not _controls:
            atexit.register(close_controls)
        known = member, Control.join(group)
        _controls[id(member)] = known
    return known[1]


def close_controls() -> None:
    """Close the controls that `control_of` has made."""
    while _controls:
        _controls.popitem()[1][1].close()


class Control:
    """Collectives of bytes between all ranks; every rank makes the same calls in the same order.

    `call` opens a numbered operation with its own time limit and its own message names. Use one
    object from one thread at a time; `twin` gives the background thread its own connection.
    """

    def __init__(self, line: Line, rank: int, tree: Tree) -> None:
        self.rank, self.size, self.tree = rank, len(tree.parents), tree
        self.hosts: tuple[int, ...] = tree.hosts
        self.is_closed = False
        self._line = line
        self._scope, self._deadline = "root", time.monotonic() + CONNECT_SECONDS
        self._subject = ""
        self._missing: type[PlanishError] = PlanMismatch
        self._uses: dict[str, itertools.count[int]] = {}

    @classmethod
    def single(cls) -> Control:
        """Return the control of a job of one process."""
        from torch._C._distributed_c10d import HashStore

        line = Line(Words(HashStore(), "this process"), [Peer("", "", 0, 0, 0, "")], 0)
        return cls(line, 0, plan_tree([0]))

    @classmethod
    def join(cls, group: ProcessGroup | None = None) -> Control:
        """Connect the ranks of `group` (default: all): a collective of the calling thread."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return cls.single()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size == 1:
            return cls.single()
        server = listen() if rank == 0 else None
        peers: list[Peer] = [here_at(0)] * size
        dist.all_gather_object(peers, here_at(server.port if server else 0), group=group)
        if len({peer.version for peer in peers}) > 1:
            seen = {number: peer.version for number, peer in enumerate(peers)}
            raise PlanMismatch(f"all ranks must run one version of planish, got {seen}")
        machines = list(dict.fromkeys(peer.machine for peer in peers))
        hosts = [machines.index(peer.machine) for peer in peers]
        address = "127.0.0.1" if hosts[rank] == 0 else peers[0].address
        line = Line(connect(address, peers[0].port), peers, rank, server)
        # Connect now: later a connection to a rank that has ended would take the whole limit.
        line.twin()
        return cls(line, rank, plan_tree(hosts))

    def call(
        self, subject: str, timeout_s: float, *, missing: type[PlanishError] = PlanMismatch
    ) -> Control:
        """Open the next operation (`save s3://b/run/step-8`); all ranks do so in the same order.

        It must end within `timeout_s` seconds; `missing` is the error for a rank that is late.
        """
        opened = copy.copy(self)
        opened._subject, opened._missing, opened._uses = subject, missing, {}
        opened._deadline = time.monotonic() + timeout_s
        opened._scope = self._line.next_scope(subject)
        self._line.note(f"began {subject}")
        return opened

    def twin(self, *, missing: type[PlanishError]) -> Control:
        """Return the same operation over a connection of its own, for another thread."""
        other = copy.copy(self)
        other._line, other._missing = self._line.twin(), missing
        return other

    @property
    def remaining_s(self) -> float:
        """Seconds until the time limit, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def note(self, stage: str) -> None:
        """Record the stage of this rank; the error names it if this rank does not answer later."""
        self._line.note(stage)

    def gather(self, data: bytes, tag: str) -> list[bytes] | None:
        """Collect the bytes of every rank on rank 0, in rank order; None elsewhere."""
        name = self._name(tag)
        parts = {self.rank: data}
        waiting = {child: f"{name}/{child}" for child in self.tree.children[self.rank]}
        for child in list(waiting):
            parts |= unpack(self._take(waiting.pop(child), child, 0.0, waiting))
        if self.rank:
            self._line.put(f"{name}/{self.rank}", pack(parts))
            return None
        return [parts[rank] for rank in range(self.size)]

    def broadcast(self, data: bytes | None, tag: str) -> bytes:
        """Return the bytes of rank 0 on every rank (`data` is ignored elsewhere)."""
        name = self._name(tag)
        if self.rank:
            data = self._from_parent(name)
        assert data is not None
        for child in self.tree.children[self.rank]:
            self._line.put(f"{name}/{child}", data)
        return data

    def scatter(self, data: Sequence[bytes] | None, tag: str) -> bytes:
        """Return `data[rank]` of rank 0 (`data` is ignored elsewhere)."""
        name = self._name(tag)
        parts = unpack(self._from_parent(name)) if self.rank else dict(enumerate(data or ()))
        for child in self.tree.children[self.rank]:
            below = {rank: parts[rank] for rank in self.tree.below(child)}
            self._line.put(f"{name}/{child}", pack(below))
        return parts[self.rank]

    def settle(self, error: Exception | None, tag: str) -> None:
        """Raise on every rank if any rank has an error; the raised error names all such ranks."""
        brought = self.gather(encode_errors({self.rank: error} if error else {}).encode(), tag)

        def decide() -> bytes:
            errors = {k: v for part in brought or () for k, v in decode_errors(part).items()}
            if errors:
                raise joined_error(errors, self.size)
            return b""

        self.decide(decide, f"{tag}.reply", cause=error)

    @contextlib.contextmanager
    def settled(self, tag: str) -> Iterator[None]:
        """Run the body on every rank; an error of any rank is raised on all."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.settle(error, tag)

    def decide(
        self, make: Callable[[], bytes], tag: str, *, cause: Exception | None = None
    ) -> bytes:
        """Return rank 0's `make()` on every rank; raise its error on every rank, from `cause`."""
        return self.deal(lambda: [make()] * self.size, tag, cause=cause)

    def deal(
        self, make: Callable[[], Sequence[bytes]], tag: str, *, cause: Exception | None = None
    ) -> bytes:
        """Return this rank's item of rank 0's `make()`; raise its error on all, from `cause`."""
        made: list[bytes] | None = None
        if self.rank == 0:
            try:
                made = [b"+" + part for part in make()]
            except Exception as error:
                made = [b"!" + encode_errors({EVERYONE: error}).encode()] * self.size
                cause = cause or error
        reply = self.scatter(made, tag)
        if reply[:1] == b"!":
            # Every rank must get the error before rank 0 leaves, because the store ends with it.
            self.leave_together("seen", GRACE_SECONDS)
            raise joined_error(decode_errors(reply[1:]), self.size) from cause
        return reply[1:]

    def serial(self, name: str) -> int:
        """Return the number of earlier calls with `name`, equal on ranks that make equal calls."""
        return next(self._uses.setdefault(f"serial/{name}", itertools.count()))

    def first_to_say(self, key: str, value: str) -> str:
        """Set a lasting value unless a rank has already; return the lasting value."""
        stands: bytes = self._line.words.call("compare_set", f"said/{key}", "", value)
        return stands.decode()

    def said(self, key: str) -> str:
        """Return the value that a rank has set with `first_to_say`, empty if none has."""
        return self._line.words.read(f"said/{key}").decode()

    def leave_together(self, tag: str, seconds: float) -> None:
        """Wait up to `seconds` until the ranks of the subtree have made this call; never raises."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(PeerLost):
            for child in self.tree.children[self.rank]:
                with contextlib.suppress(TooLate):
                    self._line.take(f"{self._scope}/{tag}/{child}", "quiet", child, deadline, {})
            if self.rank:
                self._line.put(f"{self._scope}/{tag}/{self.rank}", b"")

    def abort(self, error: Exception) -> None:
        """Abort this operation on all ranks: their present or next wait in it raises `error`."""
        self._line.abort(self._scope, encode_errors({self.rank: error}))

    def give_up(self, interrupt: BaseException) -> None:
        """Abort this operation on all ranks, because this rank was interrupted."""
        self.abort(joined_error({self.rank: SaveFailed(repr(interrupt))}, self.size))

    def check(self) -> None:
        """Raise if this operation was aborted, or if the parent or a child rank has ended."""
        line = self._line
        line.raise_abort(self._scope)
        above = [self.tree.parents[self.rank]] if self.rank else []
        try:
            for rank in (*above, *self.tree.children[self.rank]):
                line.watch(rank)
        except TooLate as late:
            raise self._missed(line, late, "its part") from None

    def rendezvous(self) -> TCPStore:
        """Return the connection to the store, for the rendezvous of a group of the same ranks."""
        store: TCPStore = self._line.words.store
        return store

    def close(self) -> None:
        """Close the connections; on rank 0 the store ends with them."""
        self.is_closed = True
        self._line.close()

    def _from_parent(self, name: str) -> bytes:
        return self._take(f"{name}/{self.rank}", self.tree.parents[self.rank], GRACE_SECONDS)

    def _name(self, tag: str) -> str:
        number = next(self._uses.setdefault(tag, itertools.count()))
        return f"{self._scope}/{tag}#{number}"

    def _take(
        self, key: str, peer: int, grace: float, watched: Mapping[int, str] | None = None
    ) -> bytes:
        line = self._line
        try:
            return line.take(key, self._scope, peer, self._deadline + grace, watched or {})
        except TooLate as late:
            raise self._missed(line, late, key.split("/")[1]) from None

    def _missed(self, line: Line, late: TooLate, what: str) -> Exception:
        """Abort the operation on all ranks and return the error: a rank does not answer."""
        rank, why = late.args
        text = (
            f"rank {rank} must answer in `{self._subject}`, {why}; its last stage was "
            f"`{line.stage_of(rank)}`: every rank must take part with the same arguments "
            f"(rank {self.rank} waits for {what})"
        )
        error = self._missing(text)
        error.per_rank = {rank: text}
        line.abort(self._scope, encode_errors({rank: error}))
        line.forget(self._scope, self._subject)
        if self.rank == 0:
            line.wait_heard(self._scope, rank, GRACE_SECONDS)
        else:
            line.put(f"{self._scope}/heard/{self.rank}", b"")
        return error
