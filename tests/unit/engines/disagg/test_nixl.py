"""Frames over NIXL: what is written arrives in turn, and a rank that is lost is told by name.

The memory is the host's here; on accelerators the same calls move that of devices.
"""

import contextlib
import multiprocessing
import queue
import sys
from types import SimpleNamespace

import pytest
import torch

from planish.base.errors import EngineError, PeerLost, ProtocolError
from planish.engines.disagg.m2n.frames import FrameHeader, FrameKind
from planish.engines.disagg.m2n.nixl import NixlTransport
from tests.unit.engines.disagg.frames import LIMITS, SECRET, counts_of, header, received

api = pytest.importorskip("nixl_cu13._api", reason="pip install nixl-cu13")

CPU = torch.device("cpu")


class Rank(NixlTransport):
    """A transport with what has arrived over it."""

    def __init__(self, rank, attention=1, expert=1, limits=LIMITS, secret=SECRET, device=CPU):
        roles = range(attention), range(attention, attention + expert)
        own, peers = roles if rank < attention else roles[::-1]
        super().__init__(rank, limits, secret, own=own, peers=peers, device=device)
        self.inbox = queue.SimpleQueue()

    def join(self, *others):
        self.connect({other.rank: other.address for other in others}, self.inbox.put)

    def get(self):
        return received(self.inbox)

    def write(self, header, rows, counts=None):
        """Send rows of a tensor that is not in the transport's memory."""
        room = self.room(header, len(rows))
        self.send(header, counts, room.copy_(rows))


@pytest.fixture
def joined():
    """Make connected ranks, attention ranks first."""
    made = []

    def make(attention=1, expert=1, **options):
        ranks = [Rank(rank, attention, expert, **options) for rank in range(attention + expert)]
        made.extend(ranks)
        for rank in ranks:
            rank.join(*(ranks[attention:] if rank.rank < attention else ranks[:attention]))
        return ranks

    yield make
    for rank in made:
        rank.close()
        rank.close()


@pytest.mark.parametrize("num_rows", [0, 5, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_frame_arrives_as_it_was_written_and_so_does_its_answer(joined, dtype, num_rows):
    a, b = joined()
    rows = torch.arange(4 * num_rows).view(num_rows, 4).to(dtype)
    one = header(num_rows, micro_batch=1, dtype=dtype, is_prefill=True, placement_version=4)
    a.write(one, rows, counts_of(num_rows))
    frame = b.get()
    assert torch.equal(frame.rows, rows)
    assert frame.rows.dtype == dtype
    assert frame.counts.tolist() == counts_of(num_rows).tolist()
    assert frame.header._replace(sent_ns=0) == one
    b.write(frame.header.reply(), frame.rows + frame.rows)
    reply = a.get()
    assert torch.equal(reply.rows, rows + rows)
    assert reply.header.kind is FrameKind.REPLY
    assert reply.counts.tolist() == []


def test_every_peer_and_micro_batch_has_a_place_of_its_own(joined):
    ranks = joined(2, 2)
    for source in (0, 1):
        for micro_batch in (0, 1):
            # Both frames of a micro-batch stand in one room, one after the other.
            first = header(2, source=source, target=2, micro_batch=micro_batch)
            room = ranks[source].room(first, 5)
            room[:] = 10 * source + micro_batch
            ranks[source].send(first, counts_of(2), room[:2])
            other = first._replace(target=3, num_rows=3)
            ranks[source].send(other, counts_of(3), room[2:])
    for target in (2, 3):
        frames = [ranks[target].get() for _ in range(4)]
        found = {(f.header.source, f.header.micro_batch): f.rows for f in frames}
        for (source, micro_batch), rows in found.items():
            assert rows.shape == (target, 4)
            assert (rows == 10 * source + micro_batch).all()
        assert len(found) == 4


def test_words_that_no_agent_has_told_are_refused_by_name():
    a, b = Rank(0), Rank(1)
    b.address[0] = "AAAA"
    with pytest.raises(PeerLost, match="rank 1 is lost: NIXL can not reach it"):
        a.join(b)
    a.close()
    b.close()


@pytest.mark.parametrize("age", [0, 1])
def test_a_notification_twice_or_late_is_no_frame(joined, age, monkeypatch):
    a, b = joined()
    a.write(header(1), torch.ones(1, 4), counts_of(1))
    frame = b.get()
    encode = FrameHeader.encode
    stale = encode(frame.header)[:-8] + (frame.header.sent_ns - age).to_bytes(8, "little")
    monkeypatch.setattr(FrameHeader, "encode", lambda self: stale)
    a.write(header(1), torch.zeros(1, 4), counts_of(1))
    with pytest.raises(ProtocolError, match="must send each frame of a micro-batch once"):
        b.get()
    monkeypatch.undo()
    a.write(header(1, micro_batch=1), torch.ones(1, 4), counts_of(1))
    assert b.get().header.micro_batch == 1


@pytest.mark.parametrize(
    "told",
    [
        lambda made: made.encode() + b"\0" * 8,
        lambda made: made.encode() + b"\0" * 16,
        lambda made: made._replace(num_rows=33).encode() + b"\0" * 12,
        lambda made: made._replace(row_bytes=1 << 31).encode() + b"\0" * 12,
    ],
)
def test_a_frame_of_other_sizes_than_it_names_is_none(joined, told):
    a, b = joined()
    told = told(header(32, dtype=torch.float64))
    with pytest.raises(ProtocolError, match="must have the counts and rows that it names"):
        b._arrived("0", told)
    with a._lock:
        a._agent.send_notif(a._name(1), told)
    with pytest.raises(ProtocolError, match="must have the counts and rows that it names"):
        b.get()


def test_a_frame_in_the_name_of_another_rank_is_none(joined):
    ranks = joined(2, 1)
    ranks[0].write(header(1, target=2, source=1), torch.ones(1, 4), counts_of(1))
    with pytest.raises(ProtocolError, match="in its own name"):
        ranks[2].get()


def test_nothing_is_written_after_the_end(joined):
    a, b = joined()
    a.close()
    with pytest.raises(PeerLost, match="rank 1 is lost: this transport is closed"):
        a.write(header(1), torch.ones(1, 4), counts_of(1))
    assert not a._thread.is_alive()
    assert b._thread.is_alive()


def test_a_missing_package_or_back_end_is_told_with_what_to_do(monkeypatch):
    agent = SimpleNamespace(backends={}, get_plugin_list=lambda: ["POSIX"])
    monkeypatch.setattr(api, "nixl_agent", lambda *_: agent)
    with pytest.raises(EngineError, match=r"needs the back end UCX, got \[\] of .*POSIX"):
        Rank(0)
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    with pytest.raises(EngineError, match=r"needs the package nixl-cu13.*`engine.transport"):
        Rank(0)


# Two processes.


def _answering(pipe, device):
    """Be rank 1: send back twice the rows of each frame, until the pipe ends."""
    rank = Rank(1, device=torch.device(device))
    pipe.send(rank.address)
    rank.connect({0: pipe.recv()}, rank.inbox.put)
    pipe.send("connected")
    while not pipe.poll():
        with contextlib.suppress(queue.Empty):
            frame = rank.inbox.get(timeout=0.1)
            rank.write(frame.header.reply(), frame.rows + frame.rows)
    rank.close()


@contextlib.contextmanager
def other_process(device):
    """A rank of this process and the process that answers it."""
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    process = context.Process(target=_answering, args=(far, device))
    process.start()
    far.close()
    rank = Rank(0, device=torch.device(device))
    try:
        rank.connect({1: pipe.recv()}, rank.inbox.put)
        pipe.send(rank.address)
        assert pipe.recv() == "connected"
        yield rank, process
        pipe.close()
        process.join(60)
    finally:
        process.kill()
        process.join()
        rank.close()


def exchange_frames(device):
    """Send frames of both micro-batches to another process many times, and check each answer."""
    with other_process(device) as (rank, process):
        for number in range(200):
            one = header(32, micro_batch=number % 2, layer=number)
            rank.write(one, torch.full((32, 4), float(number), device=device), counts_of(32))
            reply = rank.get()
            assert reply.rows.device.type == device
            assert (reply.header.layer, reply.rows.unique().tolist()) == (number, [2.0 * number])
    assert process.exitcode == 0


@pytest.mark.slow
def test_rows_go_from_process_to_process_and_back():
    exchange_frames("cpu")


@pytest.mark.slow
def test_a_killed_process_ends_nothing_but_itself():
    """Writes to it fail or are never done; its coordinator tells that it is gone."""
    with other_process("cpu") as (rank, process):
        rank.write(header(1), torch.ones(1, 4), counts_of(1))
        rank.get()
        process.kill()
        process.join()
        for _ in range(3):
            with contextlib.suppress(PeerLost):
                rank.write(header(1), torch.ones(1, 4), counts_of(1))
        assert rank._thread.is_alive()
        rank.close()
        assert not rank._thread.is_alive()
