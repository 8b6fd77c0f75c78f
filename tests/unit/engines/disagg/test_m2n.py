"""Frames over TCP: what is sent arrives, strangers are refused, and lost peers are noticed."""

import contextlib
import queue
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from planish.base.errors import PeerLost, ProtocolError
from planish.engines.disagg.m2n import sockets
from planish.engines.disagg.m2n.frames import HEADER_BYTES, FrameKind, FrameLimits
from planish.engines.disagg.m2n.sockets import SocketTransport
from tests.integration.waiting import wait_for
from tests.unit.engines.disagg.frames import LIMITS, SECRET, counts_of, header, received

LARGE = FrameLimits(1, 4096, 4096, 3)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)


class Rank(SocketTransport):
    """A transport with what has arrived over it."""

    def __init__(self, rank, limits=LIMITS, secret=SECRET, **options):
        super().__init__(rank, limits, secret, **{"connect_s": 120, **options})
        self.inbox = queue.SimpleQueue()

    def join(self, addresses):
        self.connect(addresses, self.inbox.put)

    def get(self):
        return received(self.inbox)


def connected(num_attention=1, num_expert=1, limits=LIMITS, **options):
    """Return connected ranks, attention ranks first."""
    ranks = [Rank(rank, limits, **options) for rank in range(num_attention + num_expert)]
    attention, experts = ranks[:num_attention], ranks[num_attention:]
    with ThreadPoolExecutor(len(ranks)) as pool:
        for call in [
            pool.submit(rank.join, {peer.rank: peer.address for peer in others})
            for own, others in ((attention, experts), (experts, attention))
            for rank in own
        ]:
            call.result(120)
    return ranks


@pytest.fixture
def pair():
    ranks = connected()
    yield ranks
    for rank in ranks:
        rank.close()


@pytest.fixture
def by_hand():
    """An expert rank 1 and the connection of a rank 0 that the test speaks for."""
    speaker, listener = Rank(0), Rank(1)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(listener.join, {0: ("", 0)})
        end = speaker._dial(1, listener.address, time.monotonic() + 120)
        call.result(120)
    yield listener, end
    end.close()
    speaker.close()
    listener.close()


def wire(header, rows):
    """Return the bytes of a frame."""
    payload = sockets._arrays(counts_of(len(rows)), rows)
    return sockets._signed(header, payload) + b"".join(part.tobytes() for part in payload)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frame_arrives_as_it_was_sent_and_so_does_its_answer(pair, dtype):
    a, b = pair
    rows = torch.arange(20).view(5, 4).to(dtype)
    one = header(5, layer=3, micro_batch=2, dtype=dtype)
    a.send(one._replace(is_prefill=True, placement_version=4), counts_of(5), rows)
    frame = b.get()
    assert torch.equal(frame.rows, rows)
    assert frame.rows.dtype == dtype
    assert frame.counts.tolist() == [2, 0, 3]
    b.send(frame.header.reply(), None, frame.rows + frame.rows)
    reply = a.get()
    assert torch.equal(reply.rows, rows + rows)
    assert reply.header.kind is FrameKind.REPLY
    assert (reply.header.source, reply.header.layer, reply.header.iteration) == (1, 3, 40)
    assert (reply.header.weight_version, reply.header.is_prefill) == (7, True)
    assert reply.counts.tolist() == []


def test_a_frame_may_come_byte_by_byte(by_hand):
    listener, end = by_hand
    for number in wire(header(2), torch.ones(2, 4)):
        end.sendall(bytes([number]))
    assert torch.equal(listener.get().rows, torch.ones(2, 4))


FIELDS = [
    "kind", "source", "target", "weight_version", "iteration", "layer", "micro_batch", "num_rows",
    "row_bytes", "dtype", "num_local_experts", "placement_version", "is_prefill", "sent_ns",
]  # fmt: skip
STARTS = dict(zip(FIELDS, (0, 1, 3, 5, 9, 17, 21, 23, 27, 31, 32, 34, 38, 39), strict=True))
PLACES = STARTS | {
    "sum of the payload": HEADER_BYTES,
    "sum of the header": HEADER_BYTES + 4,
    "counts": HEADER_BYTES + 8,
    "first row": HEADER_BYTES + 20,
    "last row": -1,
}


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_anywhere_loses_the_peer_and_delivers_no_row(by_hand, place, bit):
    listener, end = by_hand
    data = bytearray(wire(header(2), torch.ones(2, 4)))
    data[PLACES[place]] ^= 1 << bit
    end.sendall(data)
    with pytest.raises(PeerLost, match="rank 0 is lost: its frame came damaged") as error:
        listener.get()
    assert list(error.value.per_rank) == [0]
    assert listener.inbox.empty()


def burst(data):
    """Return the bytes of a frame with zeros within its rows."""
    return data[:200] + bytes(64) + data[264:]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (burst(wire(header(32), torch.ones(32, 4))), PeerLost, "came damaged"),
        (bytes(HEADER_BYTES + 8), PeerLost, "came damaged"),
        (wire(header(1, source=2, layer=1), torch.ones(1, 4)), ProtocolError, "in its own name"),
    ],
    ids=["burst", "zeros", "name of another rank"],
)
def test_what_is_no_frame_is_refused_after_one(by_hand, data, error, message):
    listener, end = by_hand
    end.sendall(wire(header(1), torch.ones(1, 4)))
    assert listener.get().header.num_rows == 1
    end.sendall(data)
    with pytest.raises(error, match=message):
        listener.get()


@pytest.mark.parametrize(
    ("order", "good"),
    [([0, 0], 1), ([1, 0], 1), ([0, 1, 0], 2), ([0, 2, 1], 2)],
    ids=["twice", "reordered", "late", "late between"],
)
def test_a_frame_twice_late_or_out_of_turn_is_none(by_hand, order, good):
    listener, end = by_hand
    made = [wire(header(1, layer=number), torch.ones(1, 4)) for number in range(3)]
    other = wire(header(1, micro_batch=1), torch.ones(1, 4))
    for number in order:
        end.sendall(made[number])
    for _ in range(good):
        listener.get()
    with pytest.raises(ProtocolError, match="each frame of a micro-batch once, in turn"):
        listener.get()
    end.sendall(other)
    assert listener.get().header.micro_batch == 1


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES, HEADER_BYTES + 14])
def test_a_torn_stream_is_a_lost_peer(by_hand, length):
    listener, end = by_hand
    end.sendall(wire(header(5), torch.ones(5, 4))[:length])
    end.close()
    with pytest.raises(PeerLost, match="rank 0 is lost: closed its connection") as error:
        listener.get()
    assert list(error.value.per_rank) == [0]
    with pytest.raises(PeerLost, match="rank 0 is lost"):
        listener.send(header(0, source=1, target=0), None, torch.zeros(0, 4))


def test_who_closes_is_lost_to_its_peers_and_the_others_go_on():
    ranks = connected(2, 1)
    ranks[0].close()
    ranks[0].close()
    with pytest.raises(PeerLost, match="rank 0 is lost") as error:
        ranks[2].get()
    assert list(error.value.per_rank) == [0]
    with pytest.raises(PeerLost, match="rank 0 is lost"):
        ranks[2].send(header(1, source=2, target=0), None, torch.ones(1, 4))
    ranks[1].send(header(1, source=1, target=2), counts_of(1), torch.ones(1, 4))
    assert ranks[2].get().header.source == 1
    with pytest.raises(PeerLost, match="this transport is closed"):
        ranks[0].send(header(1, target=2), counts_of(1), torch.ones(1, 4))
    for rank in ranks:
        rank.close()


def test_rows_that_the_kernel_does_not_take_leave_once_the_peer_reads(by_hand):
    listener, end = by_hand
    rows = torch.randn(512, 4096)
    listener.send(header(512, source=1, target=0, row_bytes=16384), counts_of(512), rows)
    assert listener.peers[0].outbox
    left = HEADER_BYTES + 8 + 12 + rows.nbytes
    end.settimeout(120)
    while left:
        left -= len(end.recv(min(left, 1 << 20)))
    wait_for(lambda: not listener.peers[0].outbox, 120.0)


def test_what_is_kept_leaves_before_the_transport_closes(monkeypatch):
    monkeypatch.setattr(sockets, "CLOSE_S", 120)
    a, b = connected(limits=LARGE)
    rows = torch.randn(4096, 1024)
    a.send(header(4096, row_bytes=4096), counts_of(4096), rows)
    a.close()
    assert torch.equal(b.get().rows, rows)
    b.close()


# Who may connect.


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\nHost: a-service-of-someone-else\r\n\r\n", b"short", b""]
)
def test_strangers_are_refused_and_the_real_peer_still_comes(words):
    a, b = Rank(0), Rank(1)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(b.join, {0: ("", 0)})
        with socket.create_connection(b.address, 120) as stranger:
            stranger.sendall(words)
            # It may have been refused by now.
            with contextlib.suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
            a.join({1: b.address})
        call.result(120)
    a.send(header(1), counts_of(1), torch.ones(1, 4))
    assert b.get().header.source == 0
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(b.address, 120)
    a.close()
    b.close()


def test_another_secret_is_told_to_both():
    a, b = Rank(0, secret="of another start"), Rank(1, connect_s=1.0)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(b.join, {0: ("", 0)})
        with pytest.raises(PeerLost, match=r"rank 1 must answer .*digest sent was rejected"):
            a.join({1: b.address})
        with pytest.raises(PeerLost, match=r"\[0\] must call rank 1.*digest received was wrong"):
            call.result(120)
    a.close()
    b.close()


def test_a_peer_that_never_comes_is_named():
    transport = Rank(1, connect_s=0.3)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(PeerLost, match="refused") as error:
            transport.join({5: nobody.getsockname()})
    assert list(error.value.per_rank) == [5]
    transport = Rank(1, connect_s=0.3)
    with pytest.raises(PeerLost, match="did not call in time; refused callers: nobody") as error:
        transport.join({0: ("", 0)})
    assert list(error.value.per_rank) == [0]
