"""Ranks as real processes over gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed import FileStore

from planish.base.errors import PeerLost
from planish.engines.disagg.m2n.gloo import GlooTransport
from planish.engines.disagg.m2n.peers import Timeouts
from tests.unit.engines.disagg.m2n.ranks import LIMITS, counts_of, header

PROGRAM = """
import sys
import torch
from torch.distributed import FileStore
from planish.base.errors import PeerLost
from planish.engines.disagg.m2n.gloo import GlooTransport
from tests.unit.engines.disagg.m2n.ranks import LIMITS, counts_of, header

rank, path, layers = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
transport = GlooTransport(rank, 4, LIMITS, store=FileStore(path, 4))
experts = [2, 3]
transport.connect({peer: ("", 0) for peer in (experts if rank < 2 else [0, 1])})
if rank < 2:
    for layer in range(layers):
        num_rows = (layer + rank) % 9
        rows = torch.full((num_rows, 4), float(layer))
        for target in experts:
            one = header(num_rows, layer=layer, source=rank, target=target)
            transport.send(one, counts_of(num_rows), rows)
        replies = {}
        while len(replies) < 2:
            for frame in transport.poll(30):
                assert frame.header.layer == layer
                replies[frame.source] = frame.rows.clone()
                transport.post_receive(frame.source, frame.slot)
        for source, got in replies.items():
            assert torch.equal(got, rows * source), (layer, source, got)
    print("equal", flush=True)
else:
    left = 2 * layers
    lost = set()
    while left or lost != {0, 1}:  # the first attention rank may end while the other works
        try:
            frames = transport.poll(30)
        except PeerLost as error:
            lost |= error.per_rank.keys()
            continue
        for frame in frames:
            assert int(frame.counts.sum()) == len(frame.rows)
            outputs = frame.rows * rank
            transport.post_receive(frame.source, frame.slot)
            transport.send(frame.header.reply(), None, outputs)
            left -= 1
    print("lost", *sorted(lost), flush=True)
transport.close()
"""

CHILD = """
import sys
import torch
from torch.distributed import FileStore
from planish.engines.disagg.m2n.gloo import GlooTransport
from tests.unit.engines.disagg.m2n.ranks import LIMITS, counts_of, header

transport = GlooTransport(0, 2, LIMITS, store=FileStore(sys.argv[1], 2))
transport.connect({1: ("", 0)})
transport.send(header(1), counts_of(1), torch.ones(1, 4))
transport.poll(60)
"""


@pytest.mark.slow
def test_processes_exchange_frames_over_gloo(tmp_path):
    """Two attention ranks walk through 30 layers with two expert ranks."""
    command = [sys.executable, "-c", PROGRAM]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), "30"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        told = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * 4, told
    assert [out.strip() for out, _ in told] == ["equal", "equal", "lost 0 1", "lost 0 1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "words"), [(signal.SIGKILL, "its connection ended"), (signal.SIGSTOP, "silent")]
)
def test_a_process_that_dies_or_hangs_is_lost_in_bounded_time(tmp_path, kill, words):
    path = str(tmp_path / "store")
    child = subprocess.Popen([sys.executable, "-c", CHILD, path])
    timeouts = Timeouts(heartbeat_s=1, dead_after_s=3)
    transport = GlooTransport(1, 2, LIMITS, store=FileStore(path, 2), timeouts=timeouts)
    try:
        transport.connect({0: ("", 0)})
        assert len(transport.poll(60)) == 1
        begin = time.monotonic()
        os.kill(child.pid, kill)
        with pytest.raises(PeerLost, match=words):
            transport.poll(20)
        assert time.monotonic() - begin < (2 if kill is signal.SIGKILL else 6)
        with pytest.raises(PeerLost):
            transport.send(header(0, source=1, target=0), counts_of(0), [])
    finally:
        child.kill()
        child.wait()
        transport.close()
