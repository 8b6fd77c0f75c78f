"""Ranks that are killed or stopped at random moments: a sample of `kill_ranks`."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration import kill_ranks
from tests.integration.kill_ranks import main, sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


ENGINES = ["disagg", *(["vllm_disagg"] if find_spec("vllm") else [])]


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_are_right_or_end_with_an_error_when_a_rank_is_hit(
    engine: str, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    told = sweep(engine, 1, seed, tmp_path, parts=("requests",), rehearse=False)
    assert not told["failures"], told


@pytest.mark.parametrize(
    ("arguments", "has_vllm", "hit"),
    [
        ([], True, ["disagg", "vllm_disagg"]),
        ([], False, ["disagg"]),
        (["--engine", "vllm_disagg"], True, ["vllm_disagg"]),
    ],
)
def test_every_engine_that_is_here_is_hit_unless_some_are_named(
    arguments: list[str], has_vllm: bool, hit: list[str], monkeypatch
) -> None:
    engines = []
    monkeypatch.setattr(kill_ranks, "find_spec", lambda _: has_vllm or None)
    monkeypatch.setattr(
        kill_ranks, "sweep", lambda engine, *_: engines.append(engine) or {"failed": 0}
    )
    assert main(arguments) == 0
    assert engines == hit


@pytest.mark.skipif(find_spec("vllm") is not None, reason="every engine is installed here")
def test_vllm_that_is_not_installed_is_named_with_what_provides_it(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--engine", "vllm_disagg"])
    assert ended.value.code == 2
    assert "make engines" in capsys.readouterr().err
