"""A shard of rollouts that is killed again and again loses nothing and doubles nothing."""

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.kill_rollout import sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLS = {"transformers": 2, "vllm": 1}
"""In a round; each start of vLLM takes half a minute of a core."""
ENGINES = [
    pytest.param(engine, marks=[pytest.mark.full] * (engine == "vllm"))
    for engine in KILLS
    if find_spec(engine)
]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_shard_killed_at_random_moments_ends_as_it_must(engine: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    told = sweep(engine, 1, seed, tmp_path, kills=KILLS[engine], rows=12)
    assert not told["failures"], told
