"""Bytes that several ranks need, handed on by the one that has read them, round by round.

Ranks of one machine copy straight from the reader's ring of buckets, which lies in shared memory;
ranks of other machines get packed messages over a gloo group of our own, several of one machine by
way of one of them (see `relay`). One thread goes through the rounds, in the same order on every
rank; each begins with a one-number reduction that says that all buckets are full and that nobody
has failed. The process group of training is never used.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (all-to-all overlapped with reads).
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed import AllreduceOptions, ProcessGroupGloo, ReduceOp
from torch.distributed.distributed_c10d import PrefixStore

from planish.base.errors import PeerLost
from planish.checkpoint.format.geometry import I64
from planish.checkpoint.load.fill import Bytes, PieceList, Targets
from planish.checkpoint.load.read_pool import ReadPool, Schedule
from planish.checkpoint.load.relay import DIRECT, Relays, agree, is_useful, propose
from planish.checkpoint.plan.reads import Messages, RankReads
from planish.checkpoint.watch.timings import Recorder

if TYPE_CHECKING:
    from planish.checkpoint.ranks.control import Control

BUCKET_BYTES = 16 << 20
"""Of one rank in one round: four ranks move 64 MiB in a round. Larger ones were not faster."""
SHARED_MEMORY = Path("/dev/shm")
_TRADE_TAG = 1 << 30
"""Beyond the tags of rounds."""


class Stopped(Exception):
    """Another rank of the exchange has failed, and says itself why."""


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Tell what gloo says of members that are gone or late."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"every rank must stay until the load ends, but gloo reports {error!s:.200}; look at "
            "the ranks that have not reported an error"
        ) from error


class Mesh:
    """The gloo group of the ranks that exchange bytes in one load.

    Numbers of ranks are those of the job; only `members` take part.
    """

    def __init__(self, control: Control, members: Sequence[int], tag: str) -> None:
        """Meet the other members; a collective of all of them."""
        self.members = list(members)
        self.place = {rank: place for place, rank in enumerate(self.members)}
        self.rank = control.rank
        self.hosts = control.hosts
        store = PrefixStore(f"exchange/{tag}/{members[0]}", control.rendezvous())
        limit = datetime.timedelta(seconds=max(1.0, control.remaining_s))
        self._group: Any = ProcessGroupGloo(store, self.place[self.rank], len(self.members), limit)

    def highest(self, value: int) -> int:
        """Return the highest of all members' values, on each of them."""
        number = torch.tensor([value])
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX)
        with _peers():
            self._group.allreduce([number], options).wait()
        return int(number.item())

    def swap(
        self, peer: int, sent: Bytes | None, source: int, received: Bytes | None, tag: int
    ) -> None:
        """Send to one member while receiving from another; None for nothing."""
        works = []
        with _peers():
            if received is not None and len(received):
                target = torch.from_numpy(received)
                works.append(self._group.recv([target], self.place[source], tag))
            if sent is not None and len(sent):
                works.append(self._group.send([torch.from_numpy(sent)], self.place[peer], tag))
            for work in works:
                work.wait()

    def trade(self, found: Mapping[int, I64]) -> dict[int, I64]:
        """Send numbers to each member, as many as there are; return what each has sent."""
        heard = {}
        for peer, source in self.steps():
            mine = found[peer].reshape(-1)
            size = np.zeros(1, np.int64)
            told = np.array([len(mine)], np.int64)
            self.swap(peer, told.view(np.uint8), source, size.view(np.uint8), _TRADE_TAG)
            heard[source] = np.zeros(int(size[0]), np.int64)
            data = mine.view(np.uint8), heard[source].view(np.uint8)
            self.swap(peer, data[0], source, data[1], _TRADE_TAG + 1)
        return heard

    def steps(self) -> list[tuple[int, int]]:
        """Return (peer to send to, peer to receive from) of each step, the same order for all."""
        own, size = self.place[self.rank], len(self.members)
        return [
            (self.members[(own + k) % size], self.members[(own - k) % size]) for k in range(1, size)
        ]

    def close(self) -> None:
        """Leave; members that still wait for this one fail at once."""
        self._group = None


class Segments:
    """The rings of all members on this machine: own one to write, the others' to read."""

    def __init__(self, mesh: Mesh, ring_bytes: int, token: str) -> None:
        """Map them; a collective of the members. `near` is empty where memory is not shared."""
        self.is_shared = False
        self.own: Bytes = np.zeros(0, np.uint8)
        self.near: dict[int, Bytes] = {}
        host = mesh.hosts[mesh.rank]
        peers = [m for m in mesh.members if mesh.hosts[m] == host and m != mesh.rank]
        path = SHARED_MEMORY / f"planish-{token}-{mesh.rank}"
        failed = True
        try:
            with contextlib.suppress(OSError):
                self.own = _create(path, ring_bytes)
                failed = False
            if not mesh.highest(failed):
                failed = True
                with contextlib.suppress(OSError):
                    near = {p: _attach(SHARED_MEMORY / f"planish-{token}-{p}") for p in peers}
                    failed = False
                if not mesh.highest(failed):
                    self.near, self.is_shared = near, True
        finally:
            path.unlink(missing_ok=True)
        if len(self.own) < ring_bytes:
            self.own = np.zeros(ring_bytes, np.uint8)


def _create(path: Path, size: int) -> Bytes:
    """Make a new file of `size` bytes that are really there, and map it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if size == 0:
            return np.zeros(0, np.uint8)
        os.posix_fallocate(handle, 0, size)
        return np.frombuffer(mmap.mmap(handle, size), np.uint8)
    finally:
        os.close(handle)


def _attach(path: Path) -> Bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(handle).st_size
        if size == 0:
            return np.zeros(0, np.uint8)
        return np.frombuffer(mmap.mmap(handle, size, access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(handle)


class Exchange:
    """One load's exchange, on one rank.

    The ring lives as long as this object; numbers of rounds are those of the reader of a message.
    """

    def __init__(
        self,
        control: Control,
        members: Sequence[int],
        reads: RankReads,
        buckets: int,
        tag: str,
        *,
        relay_bytes: int = 0,
    ) -> None:
        """Meet the others and learn where their requests will lie; a collective of the members.

        Args:
            control: of the ranks that load.
            members: those that exchange.
            reads: of this rank.
            buckets: of its ring.
            tag: random name.
            relay_bytes: what it may keep for other ranks of its machine.
        """
        self._reads = reads
        self.mesh = Mesh(control, members, tag)
        self.schedule = _schedule(reads, buckets)
        self.segments = Segments(self.mesh, self.schedule.ring_bytes, tag)
        self._sends = PieceList(reads.send_pieces)
        self._receives = PieceList(reads.receive_pieces)
        self._near: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._out: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._in: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.network_bytes = 0
        """What this rank has received from other machines."""
        self._learn()
        relayed = self._relay(relay_bytes // 2, tag)
        self.rounds = self.mesh.highest(max(self.schedule.rounds, relayed))

    def run(self, pool: ReadPool, targets: Targets, recorder: Recorder, control: Control) -> None:
        """Go through all rounds; the pool reads meanwhile.

        Raises:
            Stopped: reading has failed, here or elsewhere.
            PeerLost: a member does not answer any more.
        """
        try:
            for turn in range(self.rounds):
                read = pool.wait_round(turn, control.check)
                with recorder.stage("barrier"):
                    failed = self.mesh.highest(not read)
                if failed:
                    raise Stopped
                pool.open_rounds(turn + self.schedule.buckets)
                self._copy_near(turn, pool, targets, recorder)
                self._copy_relayed(turn, pool, targets, recorder)
                self._swap_far(turn, pool, targets, recorder)
        finally:
            self.mesh.close()

    def _learn(self) -> None:
        """Tell each receiver, and learn of each reader, round and place of every message."""
        sends, receives = self._reads.sends, self._reads.receives
        dims = self._reads.send_pieces.strides.shape[1]
        self._proposed = propose(self.mesh, self._reads)
        self._offered = np.full(len(receives), DIRECT, np.int64)
        self._turns = np.zeros(len(receives), np.int64)
        for peer, source in self.mesh.steps():
            mine = np.flatnonzero(sends.peer == peer)
            theirs = np.flatnonzero(receives.peer == source)
            told = self._tell(mine, dims).reshape(-1).view(np.uint8)
            rows = int(receives.count[theirs].sum())
            heard = np.zeros(3 * len(theirs) + rows * (1 + dims), np.int64)
            self.mesh.swap(peer, told, source, heard.view(np.uint8), 0)
            self._note_sends(mine, peer)
            self._hear(theirs, source, heard, dims)

    def _tell(self, mine: I64, dims: int) -> I64:
        reads = self._reads
        places = [self.schedule.places[int(q)] for q in reads.sends.request[mine]]
        relays = self._proposed[mine].tolist()
        heads = np.array(
            [(p.round, p.base, relay) for p, relay in zip(places, relays, strict=True)], np.int64
        ).reshape(-1)
        rows = _rows(reads.sends, mine)
        pieces = reads.send_pieces
        table = np.concatenate([pieces.source[rows, None], pieces.strides[rows]], axis=1)
        return np.concatenate([heads, table.reshape(-1)])

    def _note_sends(self, mine: I64, peer: int) -> None:
        if peer in self.segments.near:
            return
        for message in mine.tolist():
            turn = self.schedule.places[int(self._reads.sends.request[message])].round
            self._out[turn, peer].append(message)

    def _hear(self, theirs: I64, source: int, heard: I64, dims: int) -> None:
        heads = heard[: 3 * len(theirs)].reshape(-1, 3).tolist()
        table = heard[3 * len(theirs) :].reshape(-1, 1 + dims).tolist()
        row = 0
        for message, (turn, base, relay) in zip(theirs.tolist(), heads, strict=True):
            self._turns[message], self._offered[message] = turn, relay
            if source in self.segments.near:
                self._near[turn].append((source, message))
            else:
                self._in[turn, source].append(message)
            for piece in self._span(self._reads.receives, message):
                # From here on a received piece can be taken from the reader's ring as it lies.
                self._receives.source[piece] = base + table[row][0]
                self._receives.strides[piece] = table[row][1:]
                row += 1

    def _relay(self, half_bytes: int, tag: str) -> int:
        """Settle what goes through relays; returns the rounds that this takes."""
        self._relays = Relays()
        self._relayed: dict[int, list[int]] = defaultdict(list)
        if not self.segments.is_shared or not is_useful(self.mesh):
            return 0
        offers = self._proposed, self._offered, self._turns
        found = agree(self.mesh, self._reads, *offers, half_bytes)
        self._kept = Segments(self.mesh, found.num_bytes, f"{tag}-relay")
        if not self._kept.is_shared:
            return 0
        self._relays = found
        for waiting, gone in ((self._out, found.skipped), (self._in, set(found.taken))):
            for key in waiting:
                waiting[key] = [message for message in waiting[key] if message not in gone]
        for message in sorted(found.taken):
            self._relayed[int(self._turns[message]) + 1].append(message)
        return max(self._relayed, default=-1) + 1

    def _copy_relayed(
        self, turn: int, pool: ReadPool, targets: Targets, recorder: Recorder
    ) -> None:
        messages = self._relayed.pop(turn, [])
        if not messages:
            return
        pool.modified = True
        sizes = self._reads.receives.nbytes
        with recorder.stage("exchange", num_bytes=int(sizes[messages].sum())):
            for message in messages:
                relay, place = self._relays.taken[message]
                data = self._kept.near[relay][place : place + int(sizes[message])]
                rows = self._span(self._reads.receives, message)
                self._receives.unpack(rows, data, targets)

    def _copy_near(self, turn: int, pool: ReadPool, targets: Targets, recorder: Recorder) -> None:
        messages = self._near.pop(turn, [])
        if not messages:
            return
        pool.modified = True
        size = sum(int(self._reads.receives.nbytes[message]) for _, message in messages)
        with recorder.stage("exchange", num_bytes=size):
            for source, message in messages:
                ring = self.segments.near[source]
                for row in self._span(self._reads.receives, message):
                    self._receives.scatter(row, ring, 0, targets)

    def _swap_far(self, turn: int, pool: ReadPool, targets: Targets, recorder: Recorder) -> None:
        for peer, source in self.mesh.steps():
            out, into = self._out.pop((turn, peer), []), self._in.pop((turn, source), [])
            if not out and not into:
                continue
            size = int(self._reads.receives.nbytes[into].sum())
            with recorder.stage("exchange", num_bytes=size):
                received = np.empty(size, np.uint8)
                self.mesh.swap(peer, self._packed(out), source, received, turn + 1)
                self.network_bytes += size
                pool.modified |= bool(into)
                self._unpack(into, received, targets)

    def _packed(self, messages: list[int]) -> Bytes:
        sends = self._reads.sends
        data = np.empty(int(sends.nbytes[messages].sum()), np.uint8)
        filled = 0
        for message in messages:
            base = self.schedule.places[int(sends.request[message])].base
            rows = self._span(sends, message)
            filled += self._sends.pack(rows, self.segments.own, base, data[filled:])
        return data

    def _unpack(self, messages: list[int], data: Bytes, targets: Targets) -> None:
        start = 0
        for message in messages:
            stop = start + int(self._reads.receives.nbytes[message])
            rows = self._span(self._reads.receives, message)
            self._receives.unpack(rows, data[start:stop], targets)
            if message in self._relays.kept:
                place = self._relays.kept[message]
                self._kept.own[place : place + stop - start] = data[start:stop]
            start = stop

    @staticmethod
    def _span(messages: Messages, message: int) -> range:
        first = int(messages.first[message])
        return range(first, first + int(messages.count[message]))


def _rows(messages: Messages, which: I64) -> I64:
    spans = [
        np.arange(first, first + count)
        for first, count in zip(
            messages.first[which].tolist(), messages.count[which].tolist(), strict=True
        )
    ]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)


def _schedule(reads: RankReads, buckets: int) -> Schedule:
    shared = np.unique(reads.sends.request)
    sizes = (reads.requests.stop - reads.requests.start)[shared]
    return Schedule.plan(shared.tolist(), sizes.tolist(), BUCKET_BYTES, buckets)
