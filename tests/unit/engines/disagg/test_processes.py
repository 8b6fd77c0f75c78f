"""Ranks as their coordinator sees them."""

from __future__ import annotations

import socket
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from planish.base.errors import ConfigError
from planish.engines.config import EngineConfig
from planish.engines.disagg.control import Channel
from planish.engines.disagg.engine import DisaggEngine
from planish.engines.disagg.processes import Processes, beside, launch
from planish.engines.requests import ModelRef
from tests.contract.engines.conftest import FAMILIES
from tests.unit.engines.tiny import qwen3_policy


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


@pytest.mark.parametrize(
    ("device", "visible", "seen"),
    [
        ("cuda:0", "", ["0", "1", "2"]),
        ("cuda:0", "GPU-8f,GPU-2c,GPU-51", ["GPU-8f", "GPU-2c", "GPU-51"]),
        ("cpu", "4,5", ["4,5"] * 3),
    ],
)
def test_each_rank_sees_an_accelerator_of_its_own(device, visible, seen, monkeypatch, tmp_path):
    """A program in place of the rank tells what it sees."""
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nprintf "%s" "$CUDA_VISIBLE_DEVICES" >&0\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    opener = beside(partial(launch, device=device))
    found = []
    for number in range(3):
        process, end = opener(number)
        assert process.wait(60.0) == 0
        found.append(end.recv(100).decode())
        end.close()
    assert found == seen


def test_more_ranks_than_accelerators_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EngineConfig(name="disagg", expert_ranks=2)
    engine = DisaggEngine(max_rows=4, device="cuda:0", config=config)
    with pytest.raises(ConfigError, match=r"of this pod or machine \(2\), got 3"):
        engine.start(ModelRef(policy=qwen3_policy(**FAMILIES["experts"])))
    assert engine.pids == {}
