"""vLLM with two ranks: who reads new weights, and what becomes of requests when a rank is lost."""

import os
import secrets
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from planish.base.errors import EngineError
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef
from planish.engines.vllm.engine import VllmEngine
from planish.models.policy import save_policy
from tests.contract.engines.test_control import weights
from tests.processes import below
from tests.servers.http_proxy import HttpProxy
from tests.unit.engines.pinned import PinnedWeights
from tests.unit.engines.tiny import qwen3_policy, reference_greedy, request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM: `make test-engines`"),
]

CONFIG = EngineConfig(name="vllm", tensor_parallel=2, cache_bytes=16 << 20)
REQUESTS = [request(row, 12, temperature=0.0) for row in range(3)]
WORDS = b"VLLM::Worker"
"""What vLLM calls its ranks in the table of processes."""


def ranks() -> list[int]:
    """Ids of the processes of the ranks that this process has started."""
    return [pid for pid in below(os.getpid()) if WORDS in Path(f"/proc/{pid}/cmdline").read_bytes()]


def expect_greedy(engine, policy):
    for one, output in zip(REQUESTS, engine.generate(REQUESTS), strict=True):
        assert output.token_ids == reference_greedy(policy, one.prompt_ids, 12)


def lose_a_rank(engine, how):
    """Signal a rank in the middle of requests: the engine must fail in bounded time."""
    engine.submit(REQUESTS)
    assert engine.poll(0.0) == []
    os.kill(ranks()[1], how)
    with pytest.raises(EngineError, match="the engine failed"):
        # The rest of the responses takes no second.
        engine.poll(60.0)
    assert engine.state == "failed"


@pytest.mark.server
def test_one_rank_reads_new_weights_from_a_bucket_and_a_lost_one_fails_the_engine(
    minio, monkeypatch
):
    first, second = qwen3_policy(0), qwen3_policy(1)
    # No earlier run has left these files on the machine.
    marked = {"run": secrets.token_hex(8)}
    # A folder beside a server's others is a bucket; this environment has no other client.
    bucket = f"weights-{marked['run']}"
    (minio.data / bucket).mkdir()
    ref = save_policy(f"s3://{bucket}/p", second, version=1, parents={}, attributes=marked)
    proxy = HttpProxy(minio.endpoint)
    monkeypatch.setenv("MINIO_ENDPOINT", proxy.endpoint)
    with VllmEngine(max_rows=4, config=CONFIG) as engine:
        engine.start(ModelRef(policy=first))
        assert len(ranks()) == 2
        expect_greedy(engine, first)
        report = engine.update_weights(PinnedWeights(ref.pin()), 1)
        # They leave the bucket once for all processes of this machine.
        assert report.num_bytes < proxy.answered_bytes < 1.3 * report.num_bytes
        expect_greedy(engine, second)
        for version, policy in ((2, first), (3, second)):
            engine.update_weights(weights(policy), version)
            expect_greedy(engine, policy)
        lose_a_rank(engine, signal.SIGKILL)
    assert ranks() == []
    proxy.close()


@pytest.mark.full
def test_a_rank_that_is_stopped_fails_the_engine_in_bounded_time_and_leaves_no_process(
    monkeypatch,
):
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "20")
    with VllmEngine(max_rows=4, config=CONFIG) as engine:
        engine.start(ModelRef(policy=qwen3_policy()))
        lose_a_rank(engine, signal.SIGSTOP)
    assert ranks() == []
