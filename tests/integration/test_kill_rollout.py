"""A shard of rollouts that is killed again and again loses nothing and doubles nothing."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from planish.engines import APART
from tests.integration.kill_rollout import main, sweep

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


@pytest.mark.skipif(find_spec("vllm") is not None, reason="every engine is installed here")
def test_an_engine_that_is_not_installed_is_named_with_what_provides_it(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--engine", "vllm"])
    assert ended.value.code == 2
    assert "make engines" in capsys.readouterr().err


@pytest.mark.parametrize("engine", APART)
def test_an_engine_with_ranks_is_sent_to_the_program_that_kills_ranks(engine, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--engine", engine])
    assert ended.value.code == 2
    assert f"kill_ranks --engine {engine}`" in capsys.readouterr().err
