"""What every transport must do, whatever carries its frames."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from planish.base.errors import EngineError, PeerLost, ProtocolError
from planish.engines.disagg.m2n import peers
from planish.engines.disagg.m2n.frames import FrameHeader, FrameKind, FrameLimits, Slot
from planish.engines.disagg.m2n.peers import Timeouts
from tests.unit.engines.disagg.m2n.ranks import (
    KINDS,
    LIMITS,
    PATIENT,
    QUICK,
    close_all,
    connect,
    counts_of,
    header,
    make,
)


@pytest.fixture(params=KINDS)
def pair(request):
    """Transports of ranks 0 and 1, connected."""
    transports = make(request.param, 2)
    connect(transports, lambda rank: [1 - rank])
    yield transports[0], transports[1]
    close_all(transports)


def receive(transport, number=1):
    """Return that many frames."""
    frames = []
    deadline = time.monotonic() + 120
    while len(frames) < number:
        assert time.monotonic() < deadline, frames
        frames += transport.poll(0.5)
    return frames


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8]
)
def test_a_frame_arrives_as_it_was_sent(pair, dtype):
    a, b = pair
    rows = torch.arange(20).view(5, 4).to(dtype)
    one = header(5, layer=3, micro_batch=2, dtype=dtype, row_bytes=4 * dtype.itemsize)
    a.send(one, counts_of(5), rows)
    (frame,) = receive(b)
    assert torch.equal(frame.rows, rows)
    assert frame.rows.dtype == dtype
    assert frame.counts.tolist() == [2, 0, 3]
    assert frame.slot == Slot(2, 1)
    assert frame.header.weight_version == 7
    assert 0 < frame.header.sent_ns <= time.monotonic_ns()


def test_a_frame_without_rows_arrives(pair):
    a, b = pair
    a.send(header(0), counts_of(0), [])
    (frame,) = receive(b)
    assert frame.rows.shape == (0, 4)
    assert frame.counts.tolist() == [0, 0, 0]


def test_pieces_of_rows_arrive_as_one(pair):
    a, b = pair
    rows = torch.randn(32, 4)
    a.send(header(32), counts_of(32), list(rows.split([1, 0, 30, 1])))
    assert torch.equal(receive(b)[0].rows, rows)


def test_replies_and_control_come_back(pair):
    a, b = pair
    a.send(header(5), counts_of(5), torch.ones(5, 4))
    (frame,) = receive(b)
    outputs = 2 * frame.rows
    b.post_receive(frame.source, frame.slot)
    b.send(frame.header.reply(), None, outputs)
    (reply,) = receive(a)
    assert reply.header.kind is FrameKind.REPLY
    assert torch.equal(reply.rows, torch.full((5, 4), 2.0))
    told = torch.frombuffer(bytearray(b"stop"), dtype=torch.uint8)
    b.send(FrameHeader.control(1, 0, 0, 4), None, told)
    assert bytes(receive(a)[0].rows.flatten().tolist()) == b"stop"


@pytest.mark.slow
def test_a_stream_in_one_direction_never_runs_out_of_credits(pair):
    a, b = pair
    seen = []

    def consume():
        while len(seen) < 300:
            for frame in b.poll(0.2):
                seen.append(int(frame.rows[0, 0]))
                b.post_receive(frame.source, frame.slot)

    consumer = threading.Thread(target=consume)
    consumer.start()
    for number in range(300):
        rows = torch.full((1, 4), float(number))
        a.send(header(1, layer=number), counts_of(1), rows)
    consumer.join(120)
    assert seen == list(range(300))


def test_a_sender_is_held_back_in_bounded_time(pair):
    a, b = pair
    for layer in (0, 1):
        a.send(header(1, layer=layer), counts_of(1), torch.ones(1, 4))
    a.send(header(1, micro_batch=1), counts_of(1), torch.ones(1, 4))
    a.timeouts = QUICK
    with pytest.raises(PeerLost, match="did not free the buffer"):
        a.send(header(1, layer=2), counts_of(1), torch.ones(1, 4))
    a.timeouts = PATIENT
    frames = receive(b, 3)
    b.post_receive(0, frames[0].slot)
    b.poll(0)
    a.send(header(1, layer=2), counts_of(1), torch.ones(1, 4))
    assert receive(b)[0].header.layer == 2


def test_what_exceeds_the_buffers_is_refused_before_it_is_sent(pair):
    a, b = pair
    with pytest.raises(ProtocolError, match="num_rows=33 exceeds the capacity 32"):
        a.send(header(33), counts_of(33), torch.zeros(33, 4))
    with pytest.raises(ProtocolError, match="as their header says"):
        a.send(header(5), counts_of(5), torch.zeros(6, 4))
    with pytest.raises(ProtocolError, match="connected ranks"):
        a.send(header(1, target=3), counts_of(1), torch.zeros(1, 4))
    with pytest.raises(ProtocolError, match="its own frames"):
        a.send(header(1, source=1), counts_of(1), torch.zeros(1, 4))
    a.send(header(1), counts_of(1), torch.zeros(1, 4))
    assert len(receive(b)) == 1


def test_a_buffer_is_posted_once(pair):
    a, b = pair
    a.send(header(1), counts_of(1), torch.zeros(1, 4))
    (frame,) = receive(b)
    b.post_receive(0, frame.slot)
    with pytest.raises(ProtocolError, match="only a buffer that holds a frame"):
        b.post_receive(0, frame.slot)


def test_an_empty_poll_ends_in_time(pair):
    assert pair[0].poll(0.1) == []
    assert pair[0].poll(0) == []


def test_a_closed_transport_says_so_and_closes_once_more(pair):
    a, _ = pair
    waiting = []

    def wait():
        try:
            a.poll(120)
        except EngineError as error:
            waiting.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    a.close()
    thread.join(120)
    assert waiting == ["the transport of rank 0 is closed"]
    a.close()
    with pytest.raises(ProtocolError, match="after `close`"):
        a.send(header(1), counts_of(1), torch.zeros(1, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_who_closes_is_lost_to_its_peers_and_the_others_go_on(kind):
    transports = make(kind, 3)
    peers = {0: [2], 1: [2], 2: [0, 1]}
    connect(transports, peers.__getitem__)
    transports[0].send(header(1, target=2), counts_of(1), torch.ones(1, 4))
    assert len(receive(transports[2])) == 1
    transports[0].close()
    with pytest.raises(PeerLost, match="rank 0 is lost") as error:
        receive(transports[2])
    assert list(error.value.per_rank) == [0]
    assert transports[2].poll(0) == []
    with pytest.raises(PeerLost):
        transports[2].send(
            header(1, source=2, target=0, kind=FrameKind.REPLY), counts_of(1), torch.ones(1, 4)
        )
    transports[1].send(header(1, source=1, target=2), counts_of(1), torch.ones(1, 4))
    assert receive(transports[2])[0].source == 1
    close_all(transports)


LAYERS = 15


def rows_of(source, target, layer, micro_batch):
    """Return what one attention rank sends to one expert rank."""
    seed = ((source * 8 + target) * LAYERS + layer) * 2 + micro_batch
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(seed % 40, 16, generator=generator)


def dispatch(transport, layer, micro_batch):
    """Send a layer of a micro-batch to all expert ranks."""
    for target in transport.peers:
        rows = rows_of(transport.rank, target, layer, micro_batch)
        names = {"target": target, "layer": layer, "micro_batch": micro_batch, "row_bytes": 64}
        one = header(len(rows), source=transport.rank, **names)
        transport.send(one, counts_of(len(rows)), rows)


def attend(transport):
    """Walk through the layers of two micro-batches and check what comes back."""
    missing, layer = {0: 4, 1: 4}, {0: 0, 1: 0}
    for micro_batch in missing:
        dispatch(transport, 0, micro_batch)
    while any(missing.values()):
        for frame in receive(transport):
            one = frame.header
            assert one.layer == layer[one.micro_batch]
            sent = rows_of(transport.rank, one.source, one.layer, one.micro_batch)
            assert torch.equal(frame.rows, sent * one.source)
            transport.post_receive(frame.source, frame.slot)
            missing[one.micro_batch] -= 1
            if not missing[one.micro_batch] and one.layer + 1 < LAYERS:
                missing[one.micro_batch] = 4
                layer[one.micro_batch] += 1
                dispatch(transport, one.layer + 1, one.micro_batch)


def serve(transport):
    """Answer four attention ranks, whose layers must come in order."""
    last = {}
    left = 4 * LAYERS * 2
    while left:
        for frame in receive(transport):
            key = (frame.source, frame.header.micro_batch)
            assert frame.header.layer == last.get(key, -1) + 1
            last[key] = frame.header.layer
            outputs = frame.rows * transport.rank
            transport.post_receive(frame.source, frame.slot)
            transport.send(frame.header.reply(), None, outputs)
            left -= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_frames_of_four_by_four_ranks_keep_order_and_content(kind):
    transports = make(kind, 8, FrameLimits(2, 40, 64, 3))
    connect(transports, lambda rank: [4, 5, 6, 7] if rank < 4 else [0, 1, 2, 3])
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(attend if r < 4 else serve, t) for r, t in transports.items()]
        for call in calls:
            call.result(300)
    close_all(transports)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_other_sizes_do_not_connect(kind):
    transports = make(kind, 2, [LIMITS, FrameLimits(4, 31, 32, 3)])
    with pytest.raises(ProtocolError, match=r"sizes|of one size"):
        connect(transports, lambda rank: [1 - rank])
    close_all(transports)


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_never_comes_is_named(kind):
    transports = make(kind, 2, LIMITS, Timeouts(connect_s=0.3, heartbeat_s=0.1, dead_after_s=1))
    if kind == "sockets":
        transports[1].close()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for rank in (0, 1) if kind != "sockets" else (0,):
            with pytest.raises(PeerLost) as error:
                transports[rank].connect({1 - rank + 4: nobody.getsockname()})
            assert list(error.value.per_rank) == [1 - rank + 4]
    close_all(transports)


def test_a_rank_that_was_stopped_itself_holds_no_peer_for_dead(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], monotonic_ns=time.monotonic_ns)
    monkeypatch.setattr(peers, "time", clock)
    transports = make("local", 2, LIMITS, Timeouts(heartbeat_s=1, dead_after_s=4))
    connect(transports, lambda rank: [1 - rank])
    now[0] += 100
    transports[0].watch()
    assert transports[0].poll(0) == []
    for _ in range(5):
        now[0] += 1
        transports[0].watch()
    with pytest.raises(PeerLost, match="rank 1 is lost: it was silent for 5"):
        transports[0].poll(0)
    close_all(transports)
