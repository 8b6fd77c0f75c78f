"""Samples of the programs that kill ranks and shards, break machines and change grids.

An environment for engines has what the first two import; the others import theirs when they run.
"""

import random
from importlib.util import find_spec

import pytest

from tests.integration import kill_ranks, kill_rollout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

KILLS = {"transformers": 2, "vllm": 1}
"""In a round; each start of vLLM takes half a minute of a core."""


@pytest.fixture
def seed():
    """A seed that the message of a failure tells."""
    return random.SystemRandom().randrange(1 << 32)


@pytest.mark.parametrize("engine", ["disagg", *(["vllm_disagg"] if find_spec("vllm") else [])])
def test_requests_are_right_or_end_with_an_error_when_a_rank_is_hit(engine, tmp_path, seed):
    transport = random.Random(seed).choice(kill_ranks.TRANSPORTS)
    assert kill_ranks.sweep(engine, transport, 1, seed, tmp_path, rehearse=False) == []


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(engine, marks=[pytest.mark.full] * (engine == "vllm"))
        for engine in KILLS
        if find_spec(engine)
    ],
)
def test_a_shard_killed_at_random_moments_ends_as_it_must(engine, tmp_path, seed):
    assert kill_rollout.sweep(engine, 1, seed, tmp_path, kills=KILLS[engine], rows=12) == []


@pytest.mark.server
# Clients of the package `kubernetes` keep a connection until they are collected.
@pytest.mark.filterwarnings("ignore:.*ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
def test_a_run_goes_on_without_the_machine_on_another_grid(tmp_path):
    from tests.integration.recovery import main
    from tests.servers.run_control_plane import require_kubernetes
    from tests.servers.run_minio import require_minio
    from tests.servers.run_prometheus import require_prometheus

    require_kubernetes()
    require_minio()
    require_prometheus()
    assert main(["--times", "1", "--seed", "1", "--keep", str(tmp_path)]) == 0
    assert "Faults and recovery" in (tmp_path / "trial-0.html").read_text()


def test_a_training_goes_from_grid_to_grid_and_what_is_damaged_is_found(tmp_path, capsys):
    from tests.integration.reshard_training import HOPS, play

    faults = play(tmp_path, 3, hops=[HOPS[0], HOPS[1], HOPS[3]], with_vllm=False)
    assert faults == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *("FSDP2 on 2 ranks", "Megatron tp 2", "control 'ulp'", "control 'swap'"),
        *("FSDP2 on 3 ranks", "Hugging Face export"),
    ]
