"""Ranks as real processes over gloo."""

from __future__ import annotations

import signal

import pytest
import torch
from torch.distributed import FileStore

from planish.base.errors import PeerLost
from planish.engines.disagg.m2n.gloo import GlooTransport
from planish.engines.disagg.m2n.peers import Timeouts
from tests.integration.ckpt_forks import run_ranks, shared_forks
from tests.unit.engines.disagg.m2n.ranks import LIMITS, PATIENT, counts_of, header


def walk(rank, size, folder, *, layers):
    """Be one of two attention ranks that send to two expert ranks."""
    store = FileStore(f"{folder}/store", size)
    transport = GlooTransport(rank, size, LIMITS, store=store, timeouts=PATIENT)
    transport.connect(dict.fromkeys([2, 3] if rank < 2 else [0, 1], ("", 0)))
    told = attend(transport, layers) if rank < 2 else serve(transport, 2 * layers)
    transport.close()
    return told


def attend(transport, layers):
    """Send each layer to both expert ranks and check what comes back."""
    for layer in range(layers):
        num_rows = (layer + transport.rank) % 9
        rows = torch.full((num_rows, 4), float(layer))
        for target in (2, 3):
            one = header(num_rows, layer=layer, source=transport.rank, target=target)
            transport.send(one, counts_of(num_rows), rows)
        replies = {}
        while len(replies) < 2:
            for frame in transport.poll(120):
                assert frame.header.layer == layer
                replies[frame.source] = frame.rows.clone()
                transport.post_receive(frame.source, frame.slot)
        for source, got in replies.items():
            assert torch.equal(got, rows * source), (layer, source, got)
    return "equal"


def serve(transport, left):
    """Answer that many frames; return whose end was seen."""
    lost = set()
    while left or lost != {0, 1}:  # the first attention rank may end while the other works
        try:
            frames = transport.poll(120)
        except PeerLost as error:
            lost |= error.per_rank.keys()
            continue
        for frame in frames:
            assert int(frame.counts.sum()) == len(frame.rows)
            outputs = frame.rows * transport.rank
            transport.post_receive(frame.source, frame.slot)
            transport.send(frame.header.reply(), None, outputs)
            left -= 1
    return sorted(lost)


@pytest.mark.slow
def test_processes_exchange_frames_over_gloo(tmp_path):
    """Two attention ranks walk through 30 layers with two expert ranks."""
    told = run_ranks(f"{__name__}:walk", 4, tmp_path, layers=30)
    assert told == ["equal", "equal", [0, 1], [0, 1]]


def speak(rank, size, folder, *, path):
    """Send one frame to rank 1, and nothing after it but signs of life."""
    transport = GlooTransport(0, 2, LIMITS, store=FileStore(path, 2))
    transport.connect({1: ("", 0)})
    transport.send(header(1), counts_of(1), torch.ones(1, 4))
    transport.poll(600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "words"), [(signal.SIGKILL, "its connection ended"), (signal.SIGSTOP, "silent")]
)
def test_a_process_that_dies_or_hangs_is_lost(tmp_path, kill, words):
    path = str(tmp_path / "store")
    child = shared_forks().start(f"{__name__}:speak", 1, tmp_path, path=path)
    transport = GlooTransport(1, 2, LIMITS, store=FileStore(path, 2), timeouts=PATIENT)
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
