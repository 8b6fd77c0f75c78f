"""What only the transport over TCP does: it refuses strangers and notices peers that break."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from planish.base.errors import PeerLost, ProtocolError
from planish.engines.disagg.m2n import handshake as handshakes
from planish.engines.disagg.m2n.buffers import payload_crc, payload_views
from planish.engines.disagg.m2n.frames import FrameHeader, FrameKind, FrameLimits
from planish.engines.disagg.m2n.handshake import Handshake, Lane
from planish.engines.disagg.m2n.peers import Timeouts
from planish.engines.disagg.m2n.sockets import SocketTransport
from tests.integration.ckpt_forks import shared_forks
from tests.integration.waiting import wait_for
from tests.unit.engines.disagg.m2n.ranks import (
    LIMITS,
    PATIENT,
    close_all,
    connect,
    counts_of,
    header,
    make,
)


@pytest.fixture
def rank_1():
    """A transport of rank 1 and connections of a rank 0 that the test speaks for by hand."""
    transport = SocketTransport(1, LIMITS, token="t", timeouts=PATIENT)
    thread = threading.Thread(target=transport.connect, args=({0: ("", 0)},))
    thread.start()
    handshake = Handshake(0, LIMITS, "t", 120)
    lanes = {lane: handshake.dial(1, lane, transport.address) for lane in Lane}
    thread.join(120)
    yield transport, lanes
    transport.close()
    for lane in lanes.values():
        lane.close()


def bytes_of(one: FrameHeader, rows: torch.Tensor) -> bytes:
    views = payload_views(one, counts_of(len(rows)), rows)
    one = replace(one, payload_crc=payload_crc(views))
    return one.encode() + b"".join(views)


def test_a_frame_spoken_by_hand_arrives(rank_1):
    transport, lanes = rank_1
    lanes[Lane.DATA].sendall(bytes_of(header(5), torch.ones(5, 4)))
    (frame,) = transport.poll(120)
    assert torch.equal(frame.rows, torch.ones(5, 4))


def test_a_frame_may_come_byte_by_byte(rank_1):
    transport, lanes = rank_1
    for number in bytes_of(header(2), torch.ones(2, 4)):
        lanes[Lane.DATA].sendall(bytes([number]))
    (frame,) = transport.poll(120)
    assert torch.equal(frame.rows, torch.ones(2, 4))


@pytest.mark.parametrize("length", [0, 1, 63, 64, 70, 100])
def test_a_torn_stream_is_a_lost_peer(rank_1, length):
    transport, lanes = rank_1
    lanes[Lane.DATA].sendall(bytes_of(header(5), torch.ones(5, 4))[:length])
    lanes[Lane.DATA].close()
    if not length:
        lanes[Lane.URGENT].close()
    words = "closed its connection" + " within a frame" * (length > 0)
    with pytest.raises(PeerLost, match=f"rank 0 is lost: {words}$"):
        transport.poll(120)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda data: b"HTTP" + data[4:], "magic b'M2NF', got b'HTTP'"),
        (
            lambda data: data[:4] + b"\x09" + data[5:],
            "protocol version of a frame must be 1, got 9",
        ),
        (lambda data: data[:40] + b"\x07" + data[41:], "CRC of a header"),
        (lambda data: data[:-1] + b"\x07", "CRC of the payload"),
        (
            lambda data: bytes_of(header(5, source=3), torch.ones(5, 4)),
            "must say so, got 3 to 1",
        ),
        (
            lambda data: bytes_of(header(5, target=0), torch.ones(5, 4)),
            "must say so, got 0 to 0",
        ),
        (
            lambda data: bytes_of(header(5, released=1), torch.ones(5, 4)),
            "must release the frames that it got",
        ),
        (lambda data: data + data, "must fill a free buffer"),
        (lambda data: header(33).encode(), "num_rows=33 exceeds the capacity 32"),
        (lambda data: header(5, micro_batch=4).encode(), "micro_batch=4 of 4"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_refused_by_name(rank_1, spoil, what):
    transport, lanes = rank_1
    lanes[Lane.DATA].sendall(spoil(bytes_of(header(5), torch.ones(5, 4))))
    if "free buffer" in what:
        assert len(transport.poll(120)) == 1
    with pytest.raises(ProtocolError, match=what) as error:
        transport.poll(120)
    assert list(error.value.per_rank) == [0]
    with pytest.raises(PeerLost):
        transport.send(header(0, source=1, target=0, kind=FrameKind.REPLY), counts_of(0), [])


def test_a_frame_for_a_peer_that_has_closed_says_so_and_not_what_the_descriptor_is(
    rank_1, monkeypatch
):
    transport, _ = rank_1

    def gone(*_):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(transport, "carry", gone)
    reply = header(1, source=1, target=0, kind=FrameKind.REPLY)
    with pytest.raises(PeerLost, match=r"^rank 0 is lost: closed its connection$"):
        transport.send(reply, counts_of(1), torch.ones(1, 4))


def test_a_peer_that_closes_one_lane_of_two_is_lost_in_time(rank_1):
    transport, lanes = rank_1
    begin = time.monotonic()
    lanes[Lane.DATA].close()
    wait_for(lambda: transport._receiver.connections[0, Lane.DATA].has_failed, 120.0)
    transport.timeouts = replace(PATIENT, heartbeat_s=0.2, dead_after_s=0.5)
    credit = replace(FrameHeader.control(0, 1, 0, 0), kind=FrameKind.CREDIT)

    def hear() -> None:
        while time.monotonic() < begin + 120:
            with contextlib.suppress(OSError):  # it may be lost by now
                lanes[Lane.URGENT].sendall(credit.encode())
            assert transport.poll(0.1) == []

    with pytest.raises(PeerLost, match="rank 0 is lost: it was silent"):
        hear()
    assert time.monotonic() > begin + 0.5


def test_a_reply_passes_rows_that_are_stuck(rank_1):
    """The peer reads nothing on the lane of rows, so that they fill the kernel and wait."""
    transport, lanes = rank_1
    transport.close()
    limits = FrameLimits(1, 4096, 4096, 3)
    sender = SocketTransport(1, limits, token="t", timeouts=PATIENT)
    thread = threading.Thread(target=sender.connect, args=({0: ("", 0)},))
    thread.start()
    handshake = Handshake(0, limits, "t", 120)
    lanes = {lane: handshake.dial(1, lane, sender.address) for lane in Lane}
    thread.join(120)
    rows = torch.randn(4096, 1024)
    names = {"source": 1, "target": 0, "row_bytes": 4096}
    stuck = sender.send(header(4096, **names), counts_of(4096), rows)
    assert not stuck.is_done
    with pytest.raises(PeerLost, match="did not take it within"):
        stuck.wait(0.05)
    reply = header(1, kind=FrameKind.REPLY, layer=1, **names)
    assert sender.send(reply, counts_of(1), rows[:1]).is_done
    lanes[Lane.URGENT].settimeout(120)
    got = lanes[Lane.URGENT].recv(64, socket.MSG_WAITALL)
    assert FrameHeader.decode(got, limits).kind is FrameKind.REPLY
    assert not stuck.is_done
    left = 64 + 12 + rows.nbytes
    while left:
        left -= len(lanes[Lane.DATA].recv(min(left, 1 << 20)))
    stuck.wait(120)
    assert stuck.is_done
    sender.close()
    for lane in lanes.values():
        lane.close()


def test_what_is_kept_leaves_before_the_transport_closes():
    limits = FrameLimits(1, 4096, 4096, 3)
    transports = make("sockets", 2, limits, replace(PATIENT, close_s=120))
    connect(transports, lambda rank: [1 - rank])
    rows = torch.randn(4096, 1024)
    transports[0].send(header(4096, row_bytes=4096), counts_of(4096), rows)
    closing = threading.Thread(target=transports[0].close)
    closing.start()
    (frame,) = transports[1].poll(120)
    assert torch.equal(frame.rows, rows)
    closing.join(120)
    transports[1].close()


def test_idle_peers_live_by_their_heartbeats():
    transports = make("sockets", 2, LIMITS, replace(PATIENT, heartbeat_s=0.05))
    connect(transports, lambda rank: [1 - rank])
    heard = {0: set(), 1: set()}

    def hear():
        for rank, times in heard.items():
            times.add(transports[rank].peers[1 - rank].heard_at)
        return min(map(len, heard.values())) > 3

    wait_for(hear, 120.0)
    assert transports[0].poll(0) == []
    transports[0].send(header(1), counts_of(1), torch.ones(1, 4))
    assert len(transports[1].poll(120)) == 1
    close_all(transports)


def hello_of(rank, token="t", target=1):
    """Return the first bytes that a rank sends, taken from the wire."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        handshake = Handshake(rank, LIMITS, token, 120)

        def dial():
            with contextlib.suppress(ProtocolError):
                handshake.dial(target, Lane.DATA, listener.getsockname())

        thread = threading.Thread(target=dial)
        thread.start()
        connection, _ = listener.accept()
        with connection:
            data = connection.recv(4096)
            connection.sendall(b"nobody")
            thread.join(120)
    return data


@pytest.mark.parametrize(
    "stranger",
    [
        lambda: b"GET / HTTP/1.1\r\nHost: a-service-that-someone-else-runs-on-this-port\r\n\r\n",
        lambda: b"short",
        lambda: hello_of(0, token="another instance"),
        lambda: hello_of(0, target=3),
        lambda: hello_of(5),
        lambda: hello_of(0)[:4] + b"\x09" + hello_of(0)[5:],
    ],
)
def test_strangers_are_refused_and_the_real_peer_still_comes(stranger):
    transports = make("sockets", 2, LIMITS, PATIENT)
    told = stranger()
    waiting = threading.Thread(target=transports[1].connect, args=({0: ("", 0)},))
    waiting.start()
    with socket.create_connection(transports[1].address, 120) as caller:
        answer = b""
        with contextlib.suppress(OSError):  # it may have hung up already
            caller.sendall(told)
            caller.shutdown(socket.SHUT_WR)
            answer = caller.recv(64)
        assert answer == b"" or answer[5] > 0
    transports[0].connect({1: transports[1].address})
    waiting.join(120)
    transports[0].send(header(1), counts_of(1), torch.ones(1, 4))
    assert len(transports[1].poll(120)) == 1
    close_all(transports)


def test_a_wrong_token_is_told_to_who_calls(monkeypatch):
    away = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + away[0], sleep=time.sleep)
    monkeypatch.setattr(handshakes, "time", clock)
    a = SocketTransport(0, LIMITS, token="old", timeouts=PATIENT)
    b = SocketTransport(1, LIMITS, token="new", timeouts=PATIENT)
    lost = []

    def wait():
        try:
            b.connect({0: ("", 0)})
        except PeerLost as error:
            lost.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(ProtocolError, match="refuses rank 0: its token differs"):
        a.connect({1: b.address})
    away[0] += 1000
    socket.create_connection(b.address).close()  # who waits for calls looks at the clock
    thread.join(120)
    assert "its token differs" in lost[0]
    close_all({0: a, 1: b})


def test_an_address_of_something_else_is_named():
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    a = SocketTransport(0, LIMITS, token="t", timeouts=PATIENT)
    with pytest.raises(ProtocolError, match="what answers is no rank, it says b'HTTP/1'"):
        a.connect({1: listener.getsockname()})
    thread.join(120)
    listener.close()
    a.close()


def test_after_connecting_nobody_else_gets_in():
    transports = make("sockets", 2)
    connect(transports, lambda rank: [1 - rank])
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(transports[1].address, 120)
    close_all(transports)


def speak(rank, size, folder, *, address):
    """Send one frame to rank 1, and nothing after it but signs of life."""
    transport = SocketTransport(0, LIMITS, token="t")
    transport.connect({1: tuple(address)})
    transport.send(header(1), counts_of(1), torch.ones(1, 4))
    transport.poll(600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "words"), [(signal.SIGKILL, "closed its connection|reset"), (signal.SIGSTOP, "silent")]
)
def test_a_process_that_dies_or_hangs_is_lost(tmp_path, kill, words):
    transport = SocketTransport(1, LIMITS, token="t", timeouts=PATIENT)
    child = shared_forks().start(f"{__name__}:speak", 1, tmp_path, address=transport.address)
    try:
        transport.connect({0: ("", 0)})
        assert len(transport.poll(120)) == 1
        child.kill(0, kill)
        if kill is signal.SIGSTOP:
            transport.timeouts = Timeouts(heartbeat_s=0.2, dead_after_s=0.5)
        with pytest.raises(PeerLost, match=words):
            transport.poll(120)
        with pytest.raises(PeerLost):
            transport.send(header(0, source=1, target=0), counts_of(0), [])
    finally:
        child.kill()
        child.wait()
        transport.close()


def test_ranks_find_each_other_by_the_address_of_the_machine():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only asks which address a route begins at.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network but itself")
        host = probe.getsockname()[0]
    a = SocketTransport(0, LIMITS, token="t", timeouts=PATIENT)
    b = SocketTransport(1, LIMITS, token="t", timeouts=PATIENT, host="0.0.0.0")
    waiting = threading.Thread(target=b.connect, args=({0: ("", 0)},))
    waiting.start()
    a.connect({1: (host, b.address[1])})
    waiting.join(120)
    a.send(header(1), counts_of(1), torch.ones(1, 4))
    assert len(b.poll(120)) == 1
    close_all({0: a, 1: b})
