"""Chained runs, and what a chain trains on."""

from __future__ import annotations

from pathlib import Path

import pytest

from planish.checkpoint.train_state import read_state_info
from planish.records import layout
from planish.records.io import read_manifest
from tests.integration import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("four")
    root = (folder / "run").as_uri()
    runs.run(root, folder / "log.txt", iterations=4)
    return root


def test_two_iterations_twice_equal_four(four: str, tmp_path: Path) -> None:
    root = (tmp_path / "run").as_uri()
    log = tmp_path / "log.txt"
    runs.run(root, log, iterations=2)
    runs.run(root, log, iterations=2, chain_index=1)

    def learned(of: str) -> dict[str, str]:
        return {k: v for k, v in runs.digests(of).items() if not k.startswith("evals/")}

    assert learned(root) == learned(four)
    final = runs.digests(four)
    assert {k: v for k, v in runs.digests(root).items() if k in final} == final


def test_no_prompt_is_lost_or_trained_twice(four: str) -> None:
    consumed: list[int] = []
    for _, manifest in sorted(runs.manifests(four, "/rollouts/").items()):
        if manifest["schema"] == "rollouts/1" and "consumed" in manifest["attributes"]:
            consumed += manifest["attributes"]["consumed"]
    assert len(consumed) >= 4 * 8
    assert len(consumed) == len(set(consumed))
    # What lies before the last consumed prompt was consumed too, or the cursor still holds it.
    cursor = read_state_info(runs.newest_state(four))["data"]
    assert sorted([*consumed, *cursor["pending"]]) == list(range(cursor["next"]))


def test_a_run_can_start_from_the_end_of_another_root(four: str, tmp_path: Path) -> None:
    root = (tmp_path / "fork").as_uri()
    runs.run(root, tmp_path / "log.txt", iterations=1, resume_from=four)
    before = read_state_info(runs.newest_state(four))
    after = read_state_info(runs.newest_state(root))
    assert after["step"] > before["step"]
    assert after["policy_version"] == 1
    # Its prompts are those that the other run has left.
    (manifest,) = (m for p, m in runs.manifests(root, "/rollouts/").items() if "/00/" in p)
    assert manifest["attributes"]["cursor"] == {
        name: before["data"][name] for name in ("next", "pending")
    }


def test_chained_and_forked_runs_keep_the_reference_of_the_first(tmp_path: Path) -> None:
    root, fork, log = (tmp_path / "run").as_uri(), (tmp_path / "fork").as_uri(), tmp_path / "log"
    penalty = {"overrides": "algorithm.kl_coefficient=0.04"}
    runs.run(root, log, iterations=1, **penalty)
    runs.run(root, log, iterations=1, chain_index=1, **penalty)
    runs.run(fork, log, iterations=1, resume_from=root, **penalty)
    first = read_manifest(layout.policy(root, 0)).sha256
    assert read_state_info(runs.newest_state(root))["reference"] == f"policies/00000#sha256={first}"
    named = read_state_info(runs.newest_state(fork))["reference"]
    assert named == f"{layout.policy(root, 0)}#sha256={first}"
    for place, count in ((root, 2), (fork, 1)):
        states = runs.manifests(place, "/states/")
        assert [m["parents"]["reference"] for m in states.values()] == [first] * count
