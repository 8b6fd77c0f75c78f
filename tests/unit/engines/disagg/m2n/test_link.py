from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch

from planish.base.errors import ConfigError, PeerLost
from planish.engines.disagg.m2n import link as links_module
from planish.engines.disagg.m2n.frames import FrameHeader, FrameKind, FrameLimits
from planish.engines.disagg.m2n.link import EmulatedLink
from tests.unit.engines.disagg.m2n.local import LocalNetwork, LocalTransport
from tests.unit.engines.disagg.m2n.ranks import LIMITS, PATIENT, connect, counts_of, header, make


def link(**settings):
    return EmulatedLink(LocalTransport(1, LIMITS, LocalNetwork(), PATIENT), **settings)


def sent_at(seconds, num_rows=5, **changes):
    return replace(header(num_rows, **changes), sent_ns=round(seconds * 1e9))


def test_a_frame_takes_its_bytes_over_the_bandwidth_and_the_latency():
    one = sent_at(10.0)
    num_bytes = 64 + 4 * 3 + 5 * 16
    wire = link(latency_s=0.5, bytes_per_s=1000.0)
    assert wire.arrival(one) == pytest.approx(10.0 + num_bytes / 1000 + 0.5, abs=1e-9)


def test_a_serial_link_carries_one_frame_after_another():
    wire = link(latency_s=0.5, serial=True)
    times = [wire.arrival(sent_at(t)) for t in (10.0, 10.1, 10.2, 20.0)]
    assert times == pytest.approx([10.5, 11.0, 11.5, 20.5], abs=1e-9)


def test_pure_latency_carries_any_number_at_once():
    wire = link(latency_s=0.5, serial=False)
    assert [wire.arrival(sent_at(t)) for t in (10.0, 10.1)] == pytest.approx([10.5, 10.6])


def test_each_pair_of_ranks_and_control_have_a_link_of_their_own():
    wire = link(latency_s=0.5)
    control = replace(FrameHeader.control(0, 1, 0, 4), sent_ns=10**10)
    frames = [sent_at(10.0), sent_at(10.0, source=2), control]
    assert [wire.arrival(frame) for frame in frames] == pytest.approx([10.5] * 3)


def test_jitter_is_bounded_seeded_and_keeps_the_order():
    times = [10.0 + 0.001 * n for n in range(500)]
    for serial in (False, True):
        waits = [link(latency_s=0.1, jitter_s=0.2, serial=serial, seed=5) for _ in range(2)]
        first, again = ([wire.arrival(sent_at(t)) for t in times] for wire in waits)
        assert first == again
        assert first == sorted(first)
    alone = [link(latency_s=0.1, jitter_s=0.2, seed=n).arrival(sent_at(10.0)) for n in range(400)]
    late = [t - 10.1 for t in alone]
    assert min(late) >= -1e-9
    assert max(late) <= 0.2 + 1e-9
    assert sum(late) / len(late) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("settings", [{"latency_s": -1.0}, {"latency_s": 0.0, "bytes_per_s": 0.0}])
def test_a_link_that_can_not_be_is_refused(settings):
    with pytest.raises(ConfigError, match="a link must have"):
        link(**settings)


@dataclass
class Clock:
    """Moves when somebody sleeps, or a test says so."""

    now: float = 1.0

    def monotonic(self):
        return self.now

    def monotonic_ns(self):
        return round(self.now * 1e9)

    def sleep(self, seconds):
        self.now += seconds + 1e-6


@pytest.fixture
def clock(monkeypatch):
    """The time of the links."""
    made = Clock()
    monkeypatch.setattr(links_module, "time", made)
    return made


def test_frames_are_held_until_the_link_has_brought_them(clock):
    transports = make("local", 2)
    links = {rank: EmulatedLink(t, latency_s=0.5) for rank, t in transports.items()}
    connect(links, lambda rank: [1 - rank])
    for micro_batch in range(4):
        links[0].send(header(1, micro_batch=micro_batch), counts_of(1), torch.ones(1, 4))
    for micro_batch in range(4):
        clock.now = 1.49 + 0.5 * micro_batch
        assert links[1].poll(0) == []
        clock.now += 0.02
        (frame,) = links[1].poll(0)
        assert frame.header.micro_batch == micro_batch
    transports[0].close()
    with pytest.raises(PeerLost):
        links[1].poll(60)
    links[1].close()


def test_a_loss_is_told_after_the_frames_that_are_still_under_way(clock):
    transports = make("local", 2)
    links = {rank: EmulatedLink(t, latency_s=0.3) for rank, t in transports.items()}
    connect(links, lambda rank: [1 - rank])
    links[0].send(header(1), counts_of(1), torch.ones(1, 4))
    transports[0].close()
    assert links[1].poll(0) == []
    assert links[1].poll(0.01) == []  # the loss is known by now
    assert len(links[1].poll(20)) == 1
    with pytest.raises(PeerLost, match="rank 0"):
        links[1].poll(20)
    links[1].close()


def ping_pong(attention_s, expert_s, network_s, num_micro_batches, num_layers):
    """Return the seconds of one iteration of ranks that only sleep."""
    limits = FrameLimits(num_micro_batches, 4, 16, 3)
    transports = make("local", 2, limits)
    links = {rank: EmulatedLink(t, latency_s=network_s) for rank, t in transports.items()}
    connect(links, lambda rank: [1 - rank])

    def expert():
        for _ in range(num_layers * num_micro_batches):
            (frame,) = take(links[1], expert_queue)
            time.sleep(expert_s)
            links[1].post_receive(0, frame.slot)
            links[1].send(replace(frame.header.reply(), num_rows=0), None, [])

    def take(wire, queue):
        while not queue:
            queue += wire.poll(5)
        return [queue.pop(0)]

    expert_queue, replies = [], []
    thread = threading.Thread(target=expert)
    thread.start()
    begin = time.monotonic()
    ready = [(0, micro_batch) for micro_batch in range(num_micro_batches)]
    for _ in range(num_layers * num_micro_batches):
        if not ready:
            (frame,) = take(links[0], replies)
            links[0].post_receive(1, frame.slot)
            assert frame.header.kind is FrameKind.REPLY
            ready.append((frame.header.layer + 1, frame.header.micro_batch))
        layer, micro_batch = ready.pop(0)
        time.sleep(attention_s)
        one = header(1, layer=layer, micro_batch=micro_batch)
        links[0].send(one, counts_of(1), torch.ones(1, 4))
    for _ in range(num_micro_batches):
        (frame,) = take(links[0], replies)
    took = time.monotonic() - begin
    thread.join(120)
    for wire in links.values():
        wire.close()
    return took


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "expert", "network", "num_micro_batches"),
    [(0.04, 0.04, 0.0, 2), (0.04, 0.03, 0.02, 1), (0.04, 0.03, 0.02, 3), (0.02, 0.02, 0.04, 3)],
)
def test_paced_ranks_are_no_faster_than_the_law_of_the_pipeline(
    attention, expert, network, num_micro_batches
):
    """Closed form of serial stages and links; the machine may only add to it."""
    num_layers = 3
    trip = attention + expert + 2 * network
    slowest = max(attention, expert, network)
    rounds = max(num_micro_batches * slowest, trip) * (num_layers - 1)
    law = rounds + trip + (num_micro_batches - 1) * slowest
    took = ping_pong(attention, expert, network, num_micro_batches, num_layers)
    assert took >= 0.99 * law
