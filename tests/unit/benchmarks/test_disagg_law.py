"""The emulated link, behind which ranks are paced."""

import queue
import time
from types import SimpleNamespace

import pytest
import torch

from planish.base.errors import PeerLost
from planish.engines.disagg.m2n.frames import HEADER_BYTES, Frame, FrameHeader, FrameKind
from tests.benchmarks.disagg.link import EmulatedLink


def sent_at(seconds, source=0):
    """Return a frame of 80 bytes and a header."""
    header = FrameHeader(
        FrameKind.DISPATCH, source, 9, 0, 0, 0, 0, 5, 16, torch.float32, 0
    )._replace(sent_ns=round(seconds * 1e9))
    return Frame(header, torch.zeros(0), torch.zeros(5, 4))


def test_a_link_carries_one_frame_of_a_source_after_another():
    wire = EmulatedLink(SimpleNamespace(address=("", 0)), 0.5, bytes_per_s=1000.0)
    took = (HEADER_BYTES + 80) / 1000 + 0.5
    times = [wire.arrival(sent_at(t).header) for t in (10.0, 10.1, 20.0)]
    assert times == pytest.approx([10 + took, 10 + 2 * took, 20 + took], abs=1e-9)
    assert wire.arrival(sent_at(10.0, source=1).header) == pytest.approx(10 + took, abs=1e-9)


def test_frames_are_held_until_the_link_has_brought_them_and_a_loss_comes_after_them():
    closed = SimpleNamespace(address=("", 0), connect=lambda *_: None, close=lambda: None)
    wire, arrived = EmulatedLink(closed, 0.2), queue.SimpleQueue()
    wire.connect({}, arrived.put)
    frame, lost = sent_at(time.monotonic()), PeerLost("rank 0 is lost")
    wire.take(frame)
    wire.take(lost)
    assert [arrived.get(timeout=60), arrived.get(timeout=60)] == [frame, lost]
    assert time.monotonic_ns() >= frame.header.sent_ns + 200_000_000
    wire.close()
