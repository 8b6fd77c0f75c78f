"""Bytes that several ranks need, handed on by the one that has read them, round by round.

Ranks of one machine copy straight from the reader's ring of buckets, which lies in shared memory;
ranks of other machines get packed messages over a gloo group of our own. One thread goes through
the rounds, in the same order on every rank; each begins with a one-number reduction that says that
all buckets are full and that nobody has failed. The process group of training is never used.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (all-to-all overlapped with reads).
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed import AllreduceOptions, ProcessGroupGloo, ReduceOp
from torch.distributed.distributed_c10d import PrefixStore

from planish.base.errors import PeerLost
from planish.checkpoint.load.fill import Bytes, PieceList, Targets
from planish.checkpoint.load.read_pool import ReadPool, Rounds
from planish.checkpoint.plan.reads import Messages, RankReads
from planish.checkpoint.watch.monitor import Recorder

if TYPE_CHECKING:
    from planish.checkpoint.ranks.control import Control

BUCKET_BYTES = 16 << 20
"""Of one rank in one round: four ranks move 64 MiB in a round. Larger ones were not faster."""
SHARED_MEMORY = Path("/dev/shm")


class Stopped(Exception):
    """Another rank of the exchange has failed, and says itself why."""


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Turn what gloo says of members that are gone or late into an error of ours."""
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

    def swap(self, peer: int, sent: Bytes, source: int, received: Bytes, tag: int) -> None:
        """Send to one member while receiving from another, where there is something to send."""
        works = []
        with _peers():
            if len(received):
                target = torch.from_numpy(received)
                works.append(self._group.recv([target], self.place[source], tag))
            if len(sent):
                works.append(self._group.send([torch.from_numpy(sent)], self.place[peer], tag))
            for work in works:
                work.wait()

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
                    self.near = near
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
        self, control: Control, members: Sequence[int], reads: RankReads, buckets: int, tag: str
    ) -> None:
        """Meet the others and learn where their requests will lie; a collective of the members.

        Args:
            control: of the ranks that load.
            members: those that exchange.
            reads: of this rank.
            buckets: of its ring.
            tag: random name.
        """
        self._reads = reads
        self.mesh = Mesh(control, members, tag)
        shared = np.unique(reads.sends.request)
        sizes = (reads.requests.stop - reads.requests.start)[shared]
        self.rounds = Rounds.plan(shared.tolist(), sizes.tolist(), BUCKET_BYTES, buckets)
        self.segments = Segments(self.mesh, self.rounds.ring_bytes, tag)
        self._sends = PieceList(reads.send_pieces)
        self._receives = PieceList(reads.receive_pieces)
        self._near: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Round -> (reader, message) of this machine, to be copied from the reader's ring."""
        self._out: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._in: dict[tuple[int, int], list[int]] = defaultdict(list)
        """(round, other rank) -> messages that cross the network."""
        self.network_bytes = 0
        """What this rank has received from other machines."""
        for peer, source in self.mesh.steps():
            self._learn(peer, source)
        self.num_rounds = self.mesh.highest(self.rounds.count)

    def run(self, pool: ReadPool, targets: Targets, recorder: Recorder, control: Control) -> None:
        """Go through all rounds; the pool reads meanwhile.

        Raises:
            Stopped: reading has failed, here or elsewhere.
            PeerLost: a member does not answer any more.
        """
        try:
            for turn in range(self.num_rounds):
                read = pool.wait_round(turn, control.check)
                with recorder.stage("barrier"):
                    failed = self.mesh.highest(not read)
                if failed:
                    raise Stopped
                pool.open_rounds(turn + self.rounds.buckets)
                self._copy_near(turn, pool, targets, recorder)
                self._swap_far(turn, pool, targets, recorder)
        finally:
            self.mesh.close()

    def _learn(self, peer: int, source: int) -> None:
        """Send one receiver, and get from one reader, round and place of every message.

        For each message its round and first byte in the ring; then for each of its pieces the first
        byte and the strides.
        """
        sends, receives = self._reads.sends, self._reads.receives
        mine = np.flatnonzero(sends.peer == peer).tolist()
        theirs = np.flatnonzero(receives.peer == source).tolist()
        places = [self.rounds.places[int(sends.request[message])] for message in mine]
        heads = np.array([(place.round, place.base) for place in places], np.int64).reshape(-1)
        rows = np.array([row for message in mine for row in _rows(sends, message)], np.int64)
        pieces, dims = self._reads.send_pieces, self._reads.send_pieces.strides.shape[1]
        table = np.concatenate([pieces.source[rows, None], pieces.strides[rows]], axis=1)
        sent = np.concatenate([heads, table.reshape(-1)])
        received_rows = int(receives.count[theirs].sum())
        received = np.zeros(2 * len(theirs) + received_rows * (1 + dims), np.int64)
        self.mesh.swap(peer, sent.view(np.uint8), source, received.view(np.uint8), 0)
        if peer not in self.segments.near:
            for message, place in zip(mine, places, strict=True):
                self._out[place.round, peer].append(message)
        lines = iter(received[2 * len(theirs) :].reshape(-1, 1 + dims).tolist())
        for message, (turn, base) in zip(
            theirs, received[: 2 * len(theirs)].reshape(-1, 2).tolist(), strict=True
        ):
            if source in self.segments.near:
                self._near[turn].append((source, message))
            else:
                self._in[turn, source].append(message)
            for row in _rows(receives, message):
                # From here on a received piece can be taken from the reader's ring as it lies.
                first, *strides = next(lines)
                self._receives.source[row] = base + first
                self._receives.strides[row] = strides

    def _copy_near(self, turn: int, pool: ReadPool, targets: Targets, recorder: Recorder) -> None:
        """Copy the messages of one round from the rings of this machine."""
        messages = self._near.pop(turn, [])
        if not messages:
            return
        pool.modified = True
        size = sum(int(self._reads.receives.nbytes[message]) for _, message in messages)
        with recorder.stage("exchange", num_bytes=size):
            for source, message in messages:
                ring = self.segments.near[source]
                for row in _rows(self._reads.receives, message):
                    self._receives.scatter(row, ring, 0, targets)

    def _swap_far(self, turn: int, pool: ReadPool, targets: Targets, recorder: Recorder) -> None:
        """Send and receive the messages of one round that cross the network."""
        sends, receives = self._reads.sends, self._reads.receives
        for peer, source in self.mesh.steps():
            out, into = self._out.pop((turn, peer), []), self._in.pop((turn, source), [])
            if not out and not into:
                continue
            size = int(receives.nbytes[into].sum())
            with recorder.stage("exchange", num_bytes=size):
                sent = np.empty(int(sends.nbytes[out].sum()), np.uint8)
                received = np.empty(size, np.uint8)
                filled = 0
                for message in out:
                    base = self.rounds.places[int(sends.request[message])].base
                    rows = _rows(sends, message)
                    filled += self._sends.pack(rows, self.segments.own, base, sent[filled:])
                self.mesh.swap(peer, sent, source, received, turn + 1)
                self.network_bytes += size
                pool.modified |= bool(into)
                start = 0
                for message in into:
                    stop = start + int(receives.nbytes[message])
                    self._receives.unpack(_rows(receives, message), received[start:stop], targets)
                    start = stop


def _rows(messages: Messages, message: int) -> range:
    """Return the rows of a message in the pieces beside it."""
    first = int(messages.first[message])
    return range(first, first + int(messages.count[message]))
