"""T-PPO runs whose responses go on from one iteration to the next."""

import random
import time
from pathlib import Path

import pytest

from planish.checkpoint.train_state import read_state_info
from planish.records.stream import parse_data
from tests.integration import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONFIG = runs.REPOSITORY / "tests" / "golden" / "configs" / "tiny_tppo.toml"
TPPO = {"preset": "tppo-tiny", "config": str(CONFIG)}
SLOTS, WINDOW, SHARDS = 32, 12, 2


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("three")
    root = (folder / "run").as_uri()
    runs.run(root, folder / "log.txt", iterations=3, **TPPO)
    return root


def learned(root: str) -> dict[str, str]:
    return {k: v for k, v in runs.digests(root).items() if not k.startswith("evals/")}


def test_an_iteration_killed_twice_with_responses_in_flight_equals_an_undisturbed_one(
    three: str, tmp_path: Path
) -> None:
    root = (tmp_path / "run").as_uri()
    log = tmp_path / "log.txt"
    pauses = []
    for stage in ("rollout", "train"):
        process = runs.start(root, log, iterations=2, **TPPO)
        runs.wait_for_stage(root, stage, 2)
        pauses.append(random.SystemRandom().uniform(0, 1.5))
        time.sleep(pauses[-1])
        runs.kill(process)
    runs.run(root, log, iterations=2, **TPPO)
    assert parse_data(read_state_info(runs.newest_state(root))["data"]).carry
    found = learned(root)
    assert any(path.startswith("policies/00002/") for path in found)
    assert found.items() <= learned(three).items(), f"killed {pauses} s into rollout and train"
