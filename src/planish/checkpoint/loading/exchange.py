"""Exchange of bytes that several ranks need: the rank that reads them sends them, in rounds.

Ranks request pieces from each other, then send them packed, over a gloo group of their own. One
thread per rank goes through the rounds, in the same order everywhere. Each round begins with a
reduction of one number: it waits until all buckets are full, and says if a rank has failed.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (all-to-all overlapped with reads).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed import AllreduceOptions, ProcessGroupGloo, ReduceOp
from torch.distributed.distributed_c10d import PrefixStore

from planish.base.errors import PeerLost
from planish.checkpoint.format.geometry import I64
from planish.checkpoint.format.metafile import as_bytes
from planish.checkpoint.loading.fill import Array, PieceList, Targets
from planish.checkpoint.loading.read_pool import RING, ReadPool, Rounds
from planish.checkpoint.plan.reads import Pieces, RankReads
from planish.checkpoint.watch.monitor import Recorder

if TYPE_CHECKING:
    from planish.checkpoint.ranks.control import Control

BUCKET_BYTES = 16 << 20
"""Bucket of one rank in one round: four ranks move 64 MiB. Larger ones were not faster."""


class Stopped(Exception):
    """Another rank of the exchange has failed, and reports its own error."""


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Raise `PeerLost` for gloo's error about members that are gone or late."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"every rank must stay until the load ends, but gloo reports {error!s:.200}; look at "
            "the ranks that have not reported an error"
        ) from error


class _Messages:
    """The pieces that go from one rank to another, round by round."""

    def __init__(self, pieces: Pieces, rounds: I64) -> None:
        self.pieces = PieceList(pieces)
        self._nbytes, self._rounds = pieces.nbytes, rounds

    def of(self, turn: int) -> tuple[range, int]:
        """Return the rows of the pieces of one round, and their bytes."""
        first, last = np.searchsorted(self._rounds, [turn, turn + 1]).tolist()
        return range(first, last), int(self._nbytes[first:last].sum())


class Exchange:
    """The exchange of one load, on one rank."""

    def __init__(self, control: Control, members: list[int], tag: str, reads: RankReads) -> None:
        """Connect the `members` under an equal `tag` and request pieces from them: a collective."""
        self._members, self._own = members, members.index(control.rank)
        store = PrefixStore(f"exchange/{tag}/{members[0]}", control.rendezvous())
        limit = datetime.timedelta(seconds=max(1.0, control.remaining_s))
        self._group: Any = ProcessGroupGloo(store, self._own, len(members), limit)
        self.num_bytes = 0
        """Bytes received from other ranks so far."""
        asked = {peer: self._ask(peer, source, reads) for peer, source in self._steps()}
        shared = np.unique(np.concatenate([pieces.request for pieces in asked.values()]))
        sizes = (reads.requests.stop - reads.requests.start)[shared]
        self.rounds = Rounds.plan(shared.tolist(), sizes.tolist(), BUCKET_BYTES)
        self._num_rounds = self._highest(self.rounds.count)
        self._out: dict[int, _Messages] = {}
        self._in: dict[int, _Messages] = {}
        for peer, source in self._steps():
            places = [self.rounds.places[request] for request in asked[peer].request.tolist()]
            told, bases = np.array(places, np.int64).reshape(-1, 2).T.copy()
            mine = reads.asks.take(reads.readers == source)
            heard = np.zeros(len(mine), np.int64)
            self._swap(peer, told, source, heard)
            in_ring = replace(asked[peer], source=asked[peer].source + bases)
            self._out[peer] = _Messages(in_ring, told)
            self._in[source] = _Messages(mine, heard)

    def run(self, pool: ReadPool, targets: Targets, recorder: Recorder, control: Control) -> None:
        """Run all rounds, while the threads of `pool` read."""
        try:
            for turn in range(self._num_rounds):
                is_read = pool.wait_round(turn, control.check)
                with recorder.stage("barrier"):
                    failed = self._highest(not is_read)
                if failed:
                    raise Stopped
                for peer, source in self._steps():
                    out, num_sent = self._out[peer].of(turn)
                    into, num_received = self._in[source].of(turn)
                    if not out and not into:
                        continue
                    with recorder.stage("exchange", num_bytes=num_received):
                        sent = np.empty(num_sent, np.uint8)
                        received = np.empty(num_received, np.uint8)
                        self._out[peer].pieces.pack(out, pool.ring, sent)
                        self._swap(peer, sent, source, received, turn + 1)
                        self.num_bytes += num_received
                        pool.modified |= bool(into)
                        self._in[source].pieces.unpack(into, received, targets)
                pool.open_rounds(turn + 1 + RING)
        finally:
            # Without the group, members that still wait for this one fail at once.
            self._group = None

    def _steps(self) -> list[tuple[int, int]]:
        """Return (rank to send to, rank to receive from) of each step; steps match on all ranks."""
        own, size = self._own, len(self._members)
        return [
            (self._members[(own + k) % size], self._members[(own - k) % size])
            for k in range(1, size)
        ]

    def _ask(self, peer: int, source: int, reads: RankReads) -> Pieces:
        """Send `source` the pieces that it reads for this rank; return those that `peer` wants."""
        mine = reads.asks.take(reads.readers == source).asked()
        count = np.zeros(1, np.int64)
        self._swap(source, np.array([len(mine)]), peer, count)
        theirs = np.zeros((int(count[0]), mine.shape[1]), np.int64)
        self._swap(source, mine, peer, theirs)
        return Pieces.from_asked(theirs)

    def _swap(self, peer: int, sent: Array, source: int, received: Array, tag: int = 0) -> None:
        """Send to one member while receiving from another; an empty message is not sent."""
        works = []
        with _peers():
            if len(received):
                target = torch.from_numpy(as_bytes(received))
                works.append(self._group.recv([target], self._members.index(source), tag))
            if len(sent):
                place = self._members.index(peer)
                data = torch.from_numpy(as_bytes(sent))
                works.append(self._group.send([data], place, tag))
            for work in works:
                work.wait()

    def _highest(self, value: int) -> int:
        """Return the maximum of the members' values, on every member."""
        number = torch.tensor([value])
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX)
        with _peers():
            self._group.allreduce([number], options).wait()
        return int(number.item())
