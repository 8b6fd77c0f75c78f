"""What becomes of requests when ranks die, hang, or send what they must not."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from planish.base import child
from planish.base.errors import ConfigError, EngineError
from planish.engines.disagg import attention_model, exchange, expert_rank, processes
from planish.models.policy import save_policy
from planish.records.rollouts import FinishReason
from tests.integration import programs
from tests.integration.test_disagg_equality import weights
from tests.processes import marked, marks, wait_until_none
from tests.unit.engines.disagg.instances import ThreadRank, disagg, moe_policy
from tests.unit.engines.tiny import ids_of, request, start

pytestmark = pytest.mark.slow

SECONDS = 60.0
"""Bound of every wait below; ranks that are stopped are given up after 10."""
REQUESTS = [request(i, 60) for i in range(6)]


def forked(number: int) -> child.Child:
    """Start a rank as `launch` does, but as a fork of a process that has imported torch."""
    here, there = socket.socketpair()
    module = "planish.engines.disagg.rank"
    with there:
        process = programs.start(module, log=Path(os.devnull), stdin=there.fileno())
    return child.Child(child.Channel(here), process)


def running(attention: int, expert: int, launcher=forked):
    """Return an instance of processes whose requests have a few tokens, and what they become."""
    policy = moe_policy("Qwen3Moe")
    expected = {o.request_id: o for o in start(policy).generate(REQUESTS)}
    engine = disagg(policy, attention, expert, 1, launcher=launcher)
    engine.submit(REQUESTS)
    for _ in range(5):
        assert engine.poll(0.0) == []
    return engine, expected


def collect(engine) -> dict:
    """Return the outputs of all requests."""
    outputs = {}
    deadline = time.monotonic() + SECONDS
    while len(outputs) < len(REQUESTS):
        assert time.monotonic() < deadline
        outputs.update((o.request_id, o) for o in engine.poll(1.0))
    return outputs


def is_alive(pid: int) -> bool:
    """Tell whether a process runs."""
    return Path(f"/proc/{pid}").exists()


def test_an_expert_rank_that_is_killed_ends_all_requests_with_their_tokens():
    engine, expected = running(1, 2)
    pids = engine.pids
    os.kill(pids[2], signal.SIGKILL)
    outputs = collect(engine)
    assert engine.state == "failed"
    for name, output in outputs.items():
        assert output.finish_reason is FinishReason.ABORT
        assert "rank 2" in output.error
        assert 5 <= output.num_tokens < 60
        assert output.token_ids == expected[name].token_ids[: output.num_tokens]
    with pytest.raises(EngineError, match="got failed"):
        engine.submit([request(9, 3)])
    engine.close()
    engine.close()
    assert not any(map(is_alive, pids.values()))


def test_an_attention_rank_that_is_stopped_ends_its_own_requests_only():
    engine, expected = running(2, 1)
    pids = engine.pids
    os.kill(pids[1], signal.SIGSTOP)
    outputs = collect(engine)
    failed = {name for name, output in outputs.items() if output.error}
    assert len(failed) == 3
    assert all("rank 1" in outputs[name].error for name in failed)
    for name in outputs.keys() - failed:
        assert outputs[name].token_ids == expected[name].token_ids
    assert engine.state == "ready"
    again = engine.generate([r for r in REQUESTS if r.request_id in failed])
    assert all(o.token_ids == expected[o.request_id].token_ids for o in again)
    engine.close()
    assert not any(map(is_alive, pids.values()))


def test_a_coordinator_that_was_stopped_itself_holds_no_rank_for_dead(monkeypatch):
    engine, expected = running(1, 2, launcher=ThreadRank)
    real, jumps = time.monotonic, iter([3 * processes.DEAD_S])
    away, wait = 0.0, processes.wait

    def jump(*arguments):
        nonlocal away
        away += next(jumps, 0.0)
        return wait(*arguments)

    clock = SimpleNamespace(monotonic=lambda: real() + away)
    for module in (processes, child):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(processes, "wait", jump)
    outputs = collect(engine)
    assert away == 3 * processes.DEAD_S
    assert {name: o.token_ids for name, o in outputs.items()} == {
        name: o.token_ids for name, o in expected.items()
    }
    engine.close()


def test_ranks_end_with_their_coordinator(tmp_path):
    pin = save_policy(
        f"file://{tmp_path}/p", moe_policy("Qwen3Moe"), version=1, parents={}, attributes={}
    ).pin()
    code = (
        "import os, signal\n"
        "from planish.engines import open_engine\n"
        "from planish.engines.config import EngineConfig\n"
        "from planish.engines.requests import ModelRef\n"
        "config = EngineConfig(name='disagg', expert_ranks=1)\n"
        f"engine = open_engine(config, ModelRef(pin={pin!r}), max_rows=4)\n"
        "print(len(engine.pids), engine.version(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=marks(tmp_path), capture_output=True, text=True
    )
    assert ended.stdout.split() == ["2", "1"], ended.stderr[-2000:]
    wait_until_none(tmp_path, 60.0)
    assert marked(tmp_path) == []


def test_no_rank_reads_what_another_role_computes():
    policy = moe_policy("DeepseekV3")
    sizes = {name: tensor.nbytes for name, tensor in policy.model.state_dict().items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    with disagg(policy, 2, 2, 1) as engine:
        read = [rank["num_bytes"] for rank in engine.stats()["ranks"]]
    assert read == [sum(sizes.values()) - experts] * 2 + [experts // 2] * 2


# What ranks must not send; ranks are threads here.


def failed(**options):
    """Return the outputs of an instance that cannot go on."""
    engine = disagg(moe_policy("Qwen3Moe"), 2, 2, 2, **options)
    engine.submit(REQUESTS)
    outputs = collect(engine)
    assert engine.state == "failed"
    engine.close()
    return outputs


def test_a_frame_of_other_weights_fails_the_instance(monkeypatch):
    header = exchange.FrameHeader
    monkeypatch.setattr(
        exchange, "FrameHeader", lambda *a, **k: header(*a, **{**k, "weight_version": 3})
    )
    outputs = failed().values()
    assert all("weights and the placement (0, 0)" in output.error for output in outputs)


def test_a_reply_of_another_layer_fails_the_instance(monkeypatch):
    answer = expert_rank.ExpertRank._answer

    def stale(self, frames):
        frames = [replace(f, header=f.header._replace(layer=f.header.layer ^ 1)) for f in frames]
        answer(self, frames)

    monkeypatch.setattr(expert_rank.ExpertRank, "_answer", stale)
    assert all(output.error and not output.num_tokens for output in failed().values())


def test_experts_that_do_not_answer_fail_the_instance_in_time(monkeypatch):
    monkeypatch.setattr(expert_rank.ExpertRank, "serve", lambda self: time.sleep(0.05))
    outputs = failed(timeout_s=5.0).values()
    assert all("did not answer in time" in output.error for output in outputs)


def test_weights_that_one_rank_cannot_read_change_nothing(monkeypatch):
    policy = moe_policy("Qwen3Moe")
    with disagg(policy, 2, 2, 1) as engine:
        before = ids_of(engine.generate(REQUESTS))
        read = attention_model.AttentionModel.read
        calls = []

        def failing(self, folder):
            calls.append(1)
            if len(calls) == 2:
                raise EngineError("the disk is gone")
            return read(self, folder)

        monkeypatch.setattr(attention_model.AttentionModel, "read", failing)
        with pytest.raises(EngineError, match="the disk is gone; the old ones stay in use"):
            engine.update_weights(weights(moe_policy("Qwen3Moe", 1)), 1)
        assert (engine.version(), engine.state) == (0, "ready")
        assert ids_of(engine.generate(REQUESTS)) == before
        report = engine.update_weights(weights(moe_policy("Qwen3Moe", 1)), 2)
        assert report.version == 2
        outputs = engine.generate(REQUESTS)
    assert ids_of(outputs) == ids_of(start(moe_policy("Qwen3Moe", 1)).generate(REQUESTS))
    assert {v for output in outputs for v in output.versions} == {2}


def test_what_cannot_be_spread_is_refused():
    with pytest.raises(EngineError, match="must divide the 8 experts of a layer, got 3"):
        disagg(moe_policy("Qwen3Moe"), 1, 3)
    with pytest.raises(EngineError, match="at most the 4 experts that a rank does not hold, got 5"):
        disagg(moe_policy("Qwen3Moe"), 1, 2, redundant_experts=5)
    with pytest.raises(ConfigError, match="each of the 8 micro-batches"):
        disagg(moe_policy("Qwen3Moe"), 2, 1, 4, max_rows=7)
