"""Bytes that several ranks need, handed on round by round by the rank that has read them.

Ranks send each other packed messages over a gloo group of their own, never over the process group
of training. One thread goes through the rounds, in the same order on every rank; each round begins
with a reduction of one number, which says that all buckets are full and that nobody has failed.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (all-to-all overlapped with reads).
"""

from __future__ import annotations

import contextlib
import datetime
from collections import defaultdict
from collections.abc import Iterator
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


class Exchange:
    """The exchange of one load, on one rank."""

    def __init__(
        self, control: Control, members: list[int], tag: str, reads: RankReads, buckets: int
    ) -> None:
        """Meet the other `members` and learn the rounds of their messages: a collective of them.

        `tag` is equal on all ranks; the memory of this rank holds `buckets` rounds.
        """
        self._members, self._own = members, members.index(control.rank)
        store = PrefixStore(f"exchange/{tag}/{members[0]}", control.rendezvous())
        limit = datetime.timedelta(seconds=max(1.0, control.remaining_s))
        self._group: Any = ProcessGroupGloo(store, self._own, len(members), limit)
        self._reads = reads
        self._sends = PieceList(reads.send_pieces)
        self._receives = PieceList(reads.receive_pieces)
        shared = np.unique(reads.sends.request)
        sizes = (reads.requests.stop - reads.requests.start)[shared]
        self.rounds = Rounds.plan(shared.tolist(), sizes.tolist(), BUCKET_BYTES, buckets)
        self.num_bytes = 0
        """Received from other ranks so far."""
        self._out: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._in: dict[tuple[int, int], list[int]] = defaultdict(list)
        for peer, source in self._steps():
            self._learn_rounds(peer, source)
        self._num_rounds = self._highest(self.rounds.count)

    def run(self, pool: ReadPool, targets: Targets, recorder: Recorder, control: Control) -> None:
        """Go through all rounds; the pool reads meanwhile."""
        try:
            for turn in range(self._num_rounds):
                is_read = pool.wait_round(turn, control.check)
                with recorder.stage("barrier"):
                    failed = self._highest(not is_read)
                if failed:
                    raise Stopped
                for peer, source in self._steps():
                    self._swap_messages(turn, peer, source, pool, targets, recorder)
                pool.open_rounds(turn + 1 + self.rounds.buckets)
        finally:
            # Members that still wait for this one fail at once.
            self._group = None

    def _steps(self) -> list[tuple[int, int]]:
        """Return (rank to send to, rank to receive from) of each step, in one order for all."""
        own, size = self._own, len(self._members)
        return [
            (self._members[(own + k) % size], self._members[(own - k) % size])
            for k in range(1, size)
        ]

    def _learn_rounds(self, peer: int, source: int) -> None:
        """Tell one receiver the round of each of its messages, and hear those of one reader."""
        sends, receives = self._reads.sends, self._reads.receives
        mine = np.flatnonzero(sends.peer == peer).tolist()
        theirs = np.flatnonzero(receives.peer == source).tolist()
        told = [self.rounds.places[int(sends.request[message])].round for message in mine]
        heard = np.zeros(len(theirs), np.int64)
        self._swap(peer, np.array(told, np.int64).view(np.uint8), source, heard.view(np.uint8))
        for turn, message in zip(told, mine, strict=True):
            self._out[turn, peer].append(message)
        for turn, message in zip(heard.tolist(), theirs, strict=True):
            self._in[turn, source].append(message)

    def _swap_messages(
        self,
        turn: int,
        peer: int,
        source: int,
        pool: ReadPool,
        targets: Targets,
        recorder: Recorder,
    ) -> None:
        sends, receives = self._reads.sends, self._reads.receives
        out, into = self._out.pop((turn, peer), []), self._in.pop((turn, source), [])
        if not out and not into:
            return
        size = int(receives.nbytes[into].sum())
        with recorder.stage("exchange", num_bytes=size):
            sent = np.empty(int(sends.nbytes[out].sum()), np.uint8)
            received = np.empty(size, np.uint8)
            filled = 0
            for message in out:
                base = self.rounds.places[int(sends.request[message])].base
                filled += self._sends.pack(_rows(sends, message), pool.ring, base, sent[filled:])
            self._swap(peer, sent, source, received, turn + 1)
            self.num_bytes += size
            pool.modified |= bool(into)
            start = 0
            for message in into:
                stop = start + int(receives.nbytes[message])
                self._receives.unpack(_rows(receives, message), received[start:stop], targets)
                start = stop

    def _swap(self, peer: int, sent: Bytes, source: int, received: Bytes, tag: int = 0) -> None:
        """Send to one member while receiving from another, where there is something to send."""
        works = []
        with _peers():
            if len(received):
                target = torch.from_numpy(received)
                works.append(self._group.recv([target], self._members.index(source), tag))
            if len(sent):
                place = self._members.index(peer)
                works.append(self._group.send([torch.from_numpy(sent)], place, tag))
            for work in works:
                work.wait()

    def _highest(self, value: int) -> int:
        """Return the highest of all members' values, on each of them."""
        number = torch.tensor([value])
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX)
        with _peers():
            self._group.allreduce([number], options).wait()
        return int(number.item())


def _rows(messages: Messages, message: int) -> range:
    """Return the rows of a message in the pieces beside it."""
    first = int(messages.first[message])
    return range(first, first + int(messages.count[message]))
