"""T-PPO runs whose responses go on from one iteration to the next."""

import random
import time
from pathlib import Path

import pytest

from planish.checkpoint.train_state import read_state_info
from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.rollouts import FinishReason, RolloutSet
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


def test_every_token_is_in_one_window_and_every_sample_finishes_once_or_goes_on(three: str) -> None:
    tokens: dict[tuple[int, int], list[int]] = {}
    finished: list[tuple[int, int]] = []
    consumed: list[int] = []
    for number in range(1, 4):
        for shard in range(SHARDS):
            uri = layout.rollouts(three, number, shard)
            rollouts, attributes = read_set(RolloutSet, uri), read_manifest(uri).attributes
            assert attributes["metrics"]["num_live_slots"] == SLOTS / SHARDS
            consumed += attributes["consumed"]
            for row in range(rollouts.num_rows):
                ordinal = attributes["ordinals"][rollouts.group_index[row]]
                key = (ordinal, int(rollouts.sample_index[row]))
                start = int(rollouts.window_start[row])
                found = rollouts.response_tokens.row(row).tolist()
                assert found[:start] == tokens.get(key, [])
                assert len(found) - start <= WINDOW
                # the policy of an iteration is one version behind its number
                assert set(rollouts.policy_version.row(row)[start:].tolist()) <= {number - 1}
                tokens[key] = found
                finished += [key] if rollouts.finish[row] != FinishReason.WINDOW else []
    assert len(consumed) == len(set(consumed))
    assert len(finished) == len(set(finished)) > 8
    carried = set()
    for shard in range(SHARDS):
        uri = layout.carry(three, 3, shard)
        carry, ordinals = read_set(RolloutSet, uri), read_manifest(uri).attributes["ordinals"]
        for row in range(carry.num_rows):
            key = (ordinals[carry.group_index[row]], int(carry.sample_index[row]))
            carried.add(key)
            assert carry.response_tokens.row(row).tolist() == tokens.get(key, [])
    assert carried | set(finished) == {(k, s) for k in consumed for s in range(4)}
    assert not carried & set(finished)
