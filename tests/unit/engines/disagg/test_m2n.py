"""Frames over TCP: what is sent arrives, strangers are refused, and lost peers are noticed."""

from __future__ import annotations

import queue
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import EngineError, PeerLost
from planish.engines.disagg.m2n import sockets
from planish.engines.disagg.m2n.frames import HEADER_BYTES, FrameHeader, FrameKind, FrameLimits
from planish.engines.disagg.m2n.sockets import SocketTransport
from tests.integration.ckpt_forks import shared_forks
from tests.integration.waiting import wait_for

LIMITS = FrameLimits(num_micro_batches=4, num_rows=32, row_bytes=32, num_local_experts=3)
LARGE = FrameLimits(1, 4096, 4096, 3)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)
SECRET = "the secret of this start"


class Rank(SocketTransport):
    """A transport with what has arrived over it."""

    def __init__(self, rank, limits=LIMITS, secret=SECRET, **options):
        super().__init__(rank, limits, secret, **{"connect_s": 120, "dead_s": 120, **options})
        self.inbox = queue.SimpleQueue()

    def join(self, addresses):
        self.connect(addresses, self.inbox.put)

    def get(self):
        item = self.inbox.get(timeout=120)
        if isinstance(item, Exception):
            raise item
        return item


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


def header(num_rows, *, layer=0, micro_batch=0, **changes):
    """Return a header from rank 0 to rank 1 of rows of 4 float32 for 3 experts."""
    numbers = {"source": 0, "target": 1, "weight_version": 7, "iteration": 40, "row_bytes": 16}
    numbers |= {"num_rows": num_rows, "num_local_experts": 3, "dtype": torch.float32}
    return FrameHeader(
        **{"kind": FrameKind.DISPATCH, "layer": layer, "micro_batch": micro_batch}
        | numbers
        | changes
    )


def counts_of(num_rows):
    return torch.tensor([num_rows // 2, 0, num_rows - num_rows // 2], dtype=torch.int32)


def unsigned(bits):
    return st.integers(0, 2**bits - 1)


@given(
    st.builds(
        FrameHeader,
        kind=st.sampled_from(FrameKind),
        source=unsigned(16),
        target=unsigned(16),
        weight_version=unsigned(32),
        iteration=unsigned(64),
        layer=unsigned(32),
        micro_batch=unsigned(16),
        num_rows=unsigned(32),
        row_bytes=unsigned(32),
        dtype=st.sampled_from(DTYPES),
        num_local_experts=unsigned(16),
        placement_version=unsigned(32),
        is_prefill=st.booleans(),
    )
)
def test_a_header_comes_back_as_it_was_with_the_time(one):
    data = one.encode()
    assert len(data) == HEADER_BYTES
    again = FrameHeader.decode(data)
    assert again == one._replace(sent_ns=again.sent_ns)
    assert 0 < again.sent_ns <= time.monotonic_ns()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frame_arrives_as_it_was_sent_and_so_does_its_answer(pair, dtype):
    a, b = pair
    rows = torch.arange(20).view(5, 4).to(dtype)
    one = header(5, layer=3, micro_batch=2, dtype=dtype, row_bytes=4 * dtype.itemsize)
    a.send(one._replace(is_prefill=True, placement_version=4), counts_of(5), rows)
    frame = b.get()
    assert torch.equal(frame.rows, rows)
    assert frame.rows.dtype == dtype
    assert frame.counts.tolist() == [2, 0, 3]
    b.send(frame.header.reply(), None, frame.rows + frame.rows)
    reply = a.get()
    assert torch.equal(reply.rows, rows + rows)
    assert reply.header.kind is FrameKind.REPLY
    assert (reply.source, reply.header.layer, reply.header.iteration) == (1, 3, 40)
    assert (reply.header.weight_version, reply.header.is_prefill) == (7, True)
    assert reply.counts.tolist() == []


def test_a_frame_without_rows_arrives(pair):
    a, b = pair
    a.send(header(0), counts_of(0), torch.zeros(0, 4))
    frame = b.get()
    assert frame.rows.shape == (0, 4)
    assert frame.counts.tolist() == [0, 0, 0]


def test_a_frame_may_come_byte_by_byte(by_hand):
    listener, end = by_hand
    counts, rows = counts_of(2), torch.ones(2, 4)
    for number in header(2).encode() + counts.numpy().tobytes() + rows.numpy().tobytes():
        end.sendall(bytes([number]))
    assert torch.equal(listener.get().rows, rows)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES, HEADER_BYTES + 6])
def test_a_torn_stream_is_a_lost_peer(by_hand, length):
    listener, end = by_hand
    end.sendall((header(5).encode() + bytes(92))[:length])
    end.close()
    with pytest.raises(PeerLost, match="rank 0 is lost: closed its connection") as error:
        listener.get()
    assert list(error.value.per_rank) == [0]
    with pytest.raises(PeerLost, match="rank 0 is lost"):
        listener.send(header(0, source=1, target=0), None, torch.zeros(0, 4))


def test_a_frame_that_exceeds_the_buffers_is_told(by_hand, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    listener, end = by_hand
    end.sendall(header(4096).encode())
    with pytest.raises(EngineError, match="receiving on rank 1 ended: RuntimeError"):
        listener.get()


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
    assert ranks[2].get().source == 1
    with pytest.raises(PeerLost, match="this transport is closed"):
        ranks[0].send(header(1, target=2), counts_of(1), torch.ones(1, 4))
    for rank in ranks:
        rank.close()


LAYERS = 15


def rows_of(source, target, layer, micro_batch):
    """Return what one attention rank sends to one expert rank."""
    seed = ((source * 8 + target) * LAYERS + layer) * 2 + micro_batch
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(seed % 40, 16, generator=generator)


def attend(transport):
    """Walk through the layers of two micro-batches and check what comes back."""

    def dispatch(layer, micro_batch):
        for target in transport.peers:
            rows = rows_of(transport.rank, target, layer, micro_batch)
            names = {"target": target, "layer": layer, "micro_batch": micro_batch}
            one = header(len(rows), source=transport.rank, row_bytes=64, **names)
            transport.send(one, counts_of(len(rows)), rows)

    missing, layer = {0: 4, 1: 4}, {0: 0, 1: 0}
    for micro_batch in missing:
        dispatch(0, micro_batch)
    while any(missing.values()):
        frame = transport.get()
        one = frame.header
        assert one.layer == layer[one.micro_batch]
        sent = rows_of(transport.rank, one.source, one.layer, one.micro_batch)
        assert torch.equal(frame.rows, sent * one.source)
        missing[one.micro_batch] -= 1
        if not missing[one.micro_batch] and one.layer + 1 < LAYERS:
            missing[one.micro_batch] = 4
            layer[one.micro_batch] += 1
            dispatch(one.layer + 1, one.micro_batch)


def answer(transport):
    """Answer four attention ranks, whose layers must come in order."""
    last = {}
    for _ in range(4 * LAYERS * 2):
        frame = transport.get()
        key = (frame.source, frame.header.micro_batch)
        assert frame.header.layer == last.get(key, -1) + 1
        last[key] = frame.header.layer
        transport.send(frame.header.reply(), None, frame.rows * transport.rank)


@pytest.mark.slow
def test_frames_of_four_by_four_ranks_keep_order_and_content():
    ranks = connected(4, 4, FrameLimits(2, 40, 64, 3))
    with ThreadPoolExecutor(8) as pool:
        for call in [pool.submit(attend if r.rank < 4 else answer, r) for r in ranks]:
            call.result(300)
    for rank in ranks:
        rank.close()


def test_rows_that_the_kernel_does_not_take_leave_once_the_peer_reads(by_hand):
    listener, end = by_hand
    rows = torch.randn(512, 4096)
    listener.send(header(512, source=1, target=0, row_bytes=16384), counts_of(512), rows)
    assert listener.peers[0].outbox
    left = HEADER_BYTES + 12 + rows.nbytes
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


def test_idle_peers_live_by_their_heartbeats(monkeypatch):
    monkeypatch.setattr(sockets, "HEARTBEAT_S", 0.05)
    ranks = connected()
    heard = {0: set(), 1: set()}

    def hear():
        for rank, times in heard.items():
            times.add(ranks[rank].peers[1 - rank].heard_s)
        return min(map(len, heard.values())) > 3

    wait_for(hear, 120.0)
    assert all(rank.inbox.empty() for rank in ranks)
    for rank in ranks:
        rank.close()


def test_a_rank_that_was_stopped_itself_holds_no_peer_for_dead(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: now[0]))
    told = []
    watcher, peer = Rank(0, dead_s=4), SimpleNamespace(rank=1, lost="", heard_s=0, outbox=[])
    peer.told_s, watcher.peers = 1e9, {1: peer}
    monkeypatch.setattr(watcher, "_lose", lambda peer, reason: told.append(reason))
    now[0] = watched_s = watcher._watch(0.0) + 100
    watched_s = watcher._watch(0.0)
    for _ in range(5):
        assert told == []
        now[0] += 1
        watched_s = watcher._watch(watched_s)
    assert told == ["was silent for 5.0 s"]
    watcher.close()


def speak(rank, size, folder, *, address):
    """Send one frame to rank 1, and nothing after it but signs of life."""
    transport = Rank(0)
    transport.join({1: tuple(address)})
    transport.send(header(1), counts_of(1), torch.ones(1, 4))
    transport.get()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "words"), [(signal.SIGKILL, "closed its connection"), (signal.SIGSTOP, "silent")]
)
def test_a_process_that_dies_or_hangs_is_lost(tmp_path, kill, words, monkeypatch):
    monkeypatch.setattr(sockets, "HEARTBEAT_S", 0.2)
    transport = Rank(1)
    child = shared_forks().start(f"{__name__}:speak", 1, tmp_path, address=transport.address)
    try:
        transport.join({0: ("", 0)})
        assert transport.get().source == 0
        child.kill(0, kill)
        transport.dead_s = 1.0 if kill is signal.SIGSTOP else 120
        with pytest.raises(PeerLost, match=words):
            transport.get()
    finally:
        child.kill()
        child.wait()
        transport.close()


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
            stranger.shutdown(socket.SHUT_WR)
            a.join({1: b.address})
        call.result(120)
    a.send(header(1), counts_of(1), torch.ones(1, 4))
    assert b.get().source == 0
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


def test_ranks_find_each_other_by_the_address_of_the_machine():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only asks which address a route begins at.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network but itself")
        host = probe.getsockname()[0]
    a, b = Rank(0), Rank(1, host="0.0.0.0")
    with ThreadPoolExecutor() as pool:
        call = pool.submit(b.join, {0: ("", 0)})
        a.join({1: (host, b.address[1])})
        call.result(120)
    a.send(header(1), counts_of(1), torch.ones(1, 4))
    assert b.get().source == 0
    a.close()
    b.close()
