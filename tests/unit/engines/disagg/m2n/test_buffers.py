from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from planish.base.errors import ConfigError, PeerLost, ProtocolError
from planish.engines.disagg.m2n.buffers import ReceiveBuffers, payload_crc, payload_views
from planish.engines.disagg.m2n.frames import FrameHeader, Slot
from planish.engines.disagg.m2n.peers import Credits, Timeouts
from tests.unit.engines.disagg.m2n.ranks import LIMITS, counts_of, header


def fill(buffers, one, counts, rows):
    views = payload_views(one, counts, rows)
    one = replace(one, payload_crc=payload_crc(views))
    for part, view in zip(buffers.begin(one), views, strict=True):
        part[:] = view
    return buffers.finish(one)


def test_a_buffer_holds_one_frame_until_it_is_posted():
    buffers = ReceiveBuffers(0, LIMITS)
    rows = torch.arange(20.0).view(5, 4)
    frame = fill(buffers, header(5), counts_of(5), rows)
    assert torch.equal(frame.rows, rows)
    assert frame.counts.tolist() == [2, 0, 3]
    with pytest.raises(ProtocolError, match="free buffer"):
        buffers.begin(header(5, layer=2))
    fill(buffers, header(5, layer=1), counts_of(5), rows)
    assert buffers.release(frame.slot) == 1
    assert torch.equal(fill(buffers, header(5, layer=2), counts_of(5), 2 * rows).rows, 2 * rows)


def test_only_what_was_handed_out_can_be_posted():
    buffers = ReceiveBuffers(0, LIMITS)
    for slot in (Slot(0, 0), Slot(9, 0)):
        with pytest.raises(ProtocolError, match="only a buffer that holds a frame"):
            buffers.release(slot)
    buffers.begin(header(5))
    with pytest.raises(ProtocolError, match="only a buffer that holds a frame"):
        buffers.release(Slot(0, 0))


@pytest.mark.parametrize("counts", [[2, 0, 2], [-1, 0, 6]])
def test_counts_must_be_those_of_the_rows(counts):
    with pytest.raises(ProtocolError, match="counts of local experts"):
        fill(
            ReceiveBuffers(0, LIMITS),
            header(5),
            torch.tensor(counts, dtype=torch.int32),
            torch.zeros(5, 4),
        )


def test_a_changed_payload_is_seen():
    buffers = ReceiveBuffers(0, LIMITS)
    views = payload_views(header(5), counts_of(5), torch.ones(5, 4))
    one = replace(header(5), payload_crc=payload_crc(views))
    for part, view in zip(buffers.begin(one), views, strict=True):
        part[:] = view
    part[-1] ^= 1
    with pytest.raises(ProtocolError, match="CRC of the payload from rank 0"):
        buffers.finish(one)


@pytest.mark.parametrize(
    ("counts", "rows"),
    [
        (None, torch.zeros(5, 4)),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(5, 4)),
        (counts_of(5), torch.zeros(4, 4)),
        (counts_of(5), torch.zeros(5, 4, dtype=torch.int32)),
        (counts_of(5), torch.zeros(4, 5).t()),
    ],
)
def test_tensors_that_differ_from_their_header_are_refused(counts, rows):
    with pytest.raises(ProtocolError, match="as their header says"):
        payload_views(header(5), counts, rows)


@pytest.mark.slow
def test_released_counts_reach_the_sender_and_wrap():
    buffers, credits = ReceiveBuffers(0, LIMITS), Credits(1)
    empty = header(0)
    # As after 65,000 frames of one slot; the other parity is empty.
    for counts in (buffers._released, credits._sent, credits._free):
        counts[empty.slot] = 65_000
    for number in range(1_000):
        layer = 2 * (number % 2)
        credits.take(empty.slot, 0)
        fill(buffers, replace(empty, layer=layer), counts_of(0), [])
        buffers.release(empty.slot)
        credits.learn(replace(empty, released=buffers.announce(0)))
    assert buffers.announce(0) == 66_000 % 65_536
    assert buffers.unannounced() == []


def test_a_sender_waits_for_a_free_buffer_and_no_longer_than_told():
    credits = Credits(1)
    credits.take(Slot(0, 0), 0)
    credits.take(Slot(0, 1), 0)
    with pytest.raises(PeerLost, match=r"did not free the buffer .* within 0.05 s") as error:
        credits.take(Slot(0, 0), 0.05)
    assert list(error.value.per_rank) == [1]
    waiting = threading.Thread(target=credits.take, args=(Slot(0, 0), 120))
    waiting.start()
    credits.learn(header(0, released=1))
    waiting.join(120)
    assert not waiting.is_alive()


def test_older_counts_that_come_later_change_nothing():
    credits = Credits(1)
    for _ in range(2):
        credits.take(Slot(0, 0), 0)
        credits.learn(header(0, released=credits._sent[Slot(0, 0)]))
    credits.learn(header(0, released=1))
    credits.take(Slot(0, 0), 0)


def test_releases_of_what_was_never_sent_are_refused():
    with pytest.raises(ProtocolError, match="must release the frames that it got"):
        Credits(1).learn(header(0, released=1))


def test_a_lost_peer_wakes_who_waits():
    credits = Credits(1)
    credits.take(Slot(0, 0), 0)
    threading.Timer(0.05, credits.lose, ("it burnt",)).start()
    with pytest.raises(PeerLost, match="it burnt"):
        credits.take(Slot(0, 0), 120)


def test_timeouts_leave_room_for_two_heartbeats():
    with pytest.raises(ConfigError, match="two heartbeats"):
        Timeouts(heartbeat_s=3, dead_after_s=5)


def test_an_empty_frame_has_empty_tensors():
    frame = fill(ReceiveBuffers(0, LIMITS), header(0), counts_of(0), [])
    assert frame.rows.shape == (0, 4)
    assert frame.rows.dtype == torch.float32
    control = FrameHeader.control(0, 1, 5, 3)
    told = torch.tensor([[1], [2], [3]], dtype=torch.uint8)
    assert torch.equal(fill(ReceiveBuffers(0, LIMITS), control, None, told).rows, told)
