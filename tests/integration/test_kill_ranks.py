"""Ranks that are killed or stopped at random moments: a sample of `kill_ranks`."""

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.kill_ranks import sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


ENGINES = ["disagg", *(["vllm_disagg"] if find_spec("vllm") else [])]


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_are_right_or_end_with_an_error_when_a_rank_is_hit(
    engine: str, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    told = sweep(engine, 1, seed, tmp_path, rehearse=False)
    assert not told["failures"], told
