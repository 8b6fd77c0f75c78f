"""Ranks as their coordinator sees them."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

from planish.engines.disagg.control import Channel
from planish.engines.disagg.processes import Processes


class Ended:
    """A process that has ended."""

    pid = 0

    def poll(self):
        return 0

    def wait(self, timeout=None):
        return 0

    def kill(self):
        pass


def test_what_a_rank_says_before_its_end_is_heard():
    here, there = socket.socketpair()
    processes = Processes(60.0, lambda rank: (Ended(), here))
    question = processes.start(SimpleNamespace(rank=3, plain=dict))
    rank = Channel(there)
    rank.send({"re": rank.receive(60.0)["id"], "fault": "no such model", "lost": {}})
    processes.watch(time.monotonic())
    processes.watch(time.monotonic())
    # The other end is still open: nobody waits for what it might send.
    assert processes.gather({3: question}).lost == {3: "no such model; ended with exit code 0"}
    assert 3 not in processes
    rank.close()
