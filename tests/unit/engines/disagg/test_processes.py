"""Ranks as their coordinator sees them, and what the two say to each other."""

import json
import os
import socket
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from planish.base.child import Channel, Child
from planish.base.errors import ConfigError, PlanishError
from planish.engines.config import EngineConfig
from planish.engines.disagg import processes as processes_module
from planish.engines.disagg.control import (
    decode_outputs,
    decode_requests,
    encode_outputs,
    encode_request,
)
from planish.engines.disagg.engine import DisaggEngine
from planish.engines.disagg.processes import Processes, launch
from planish.engines.disagg.rank import HeldWeights
from planish.engines.requests import ModelRef, Output, Request, Sampling
from planish.models.policy import save_policy
from planish.records.rollouts import FinishReason
from tests.contract.engines.conftest import FAMILIES
from tests.unit.engines.tiny import qwen3_policy


def test_requests_and_outputs_survive_the_way():
    sampling = Sampling(max_new_tokens=3, temperature=0.7, seed=1 << 62)
    request = Request("r", (1, 2), sampling, response_prefix=(3,))
    assert decode_requests([json.loads(json.dumps(encode_request(request)))]) == [request]
    routing = np.arange(4, dtype=np.int8).reshape(2, 1, 2)
    output = Output("r", [7, 8], [-0.1, -1.5], [3, 3], FinishReason.STOP, routing=routing)
    (again,) = decode_outputs(json.loads(json.dumps(encode_outputs([output]))))
    assert np.array_equal(again.routing, routing)
    assert again.routing.dtype == np.int8
    again.routing = output.routing = None
    assert again == output


class Ended(Child):
    """A process that has ended."""

    def code(self, seconds=0.0):
        return 0


def test_what_a_rank_says_before_its_end_is_heard():
    here, there = map(Channel, socket.socketpair())
    processes = Processes(60.0, lambda rank: Ended(here))
    question = processes.start(SimpleNamespace(rank=3, plain=dict))
    there.send({"re": there.receive(60.0)["id"], "fault": "no such model", "lost": {}})
    processes.watch(time.monotonic())
    processes.watch(time.monotonic())
    # The other end is still open: nobody waits for what it might send.
    assert processes.gather({3: question}).lost == {3: "no such model; ended with exit code 0"}
    assert 3 not in processes


@pytest.mark.parametrize("is_there", [True, False])
def test_a_rank_that_stops_within_a_message_or_takes_none_is_lost(is_there, monkeypatch):
    monkeypatch.setattr(processes_module, "SEND_S", 0.1)
    monkeypatch.setattr(processes_module, "DEAD_S", 1.0)
    here, there = map(Channel, socket.socketpair())
    processes = Processes(60.0, lambda rank: Child(here))
    question = processes.start(SimpleNamespace(rank=3, plain=dict))
    there.send({"re": None, "fault": "", "lost": {"3": "of itself"} if not is_there else {}})
    os.write(there.fileno(), b'{"re": ')
    if is_there:
        assert processes.tell([3], {"text": "x" * 5_000_000}) == question + 1
    assert list(processes.gather({3: question}).lost) == [3]


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
    program.write_text('#!/bin/sh\nprintf \'{"seen": "%s"}\\n\' "$CUDA_VISIBLE_DEVICES" >&0\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = []
    for number in range(3):
        child = launch(number, device)
        found.append(child.ask(None, 60.0)["seen"])
        assert child.close(60.0) == 0
    assert found == seen


def test_more_ranks_than_accelerators_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EngineConfig(name="disagg", expert_ranks=2)
    engine = DisaggEngine(max_rows=4, device="cuda:0", config=config)
    with pytest.raises(ConfigError, match=r"of this pod or machine \(2\), got 3"):
        engine.start(ModelRef(policy=qwen3_policy(**FAMILIES["experts"])))
    assert engine.pids == {}


def test_a_rank_tells_what_it_wants_before_it_holds_it(tmp_path):
    saved = save_policy(tmp_path.as_uri(), qwen3_policy(), version=3, parents={}, attributes={})
    told = []
    held, pin = HeldWeights(SimpleNamespace(send=told.append)), saved.pin()
    local = held.want({"folder": "/elsewhere", "pin": pin, "version": 3})
    assert local == {"folder": str(tmp_path), "pin": pin, "version": 3}
    held.hold()
    other = pin.replace("#sha256=", "#sha256=0")[:-1]
    with pytest.raises(PlanishError):
        held.want({"folder": "", "pin": other, "version": 4})
    assert held.want({"weights": pin, "version": 5}) == {"weights": pin, "version": 5}
    assert told == [
        {"wanted": pin, "held": "", "version": None},
        {"wanted": pin, "held": pin, "version": 3},
        {"wanted": other, "held": pin, "version": 3},
        {"wanted": pin, "held": pin, "version": 3},
    ]
