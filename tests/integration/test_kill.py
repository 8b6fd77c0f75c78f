"""A run that was killed without warning ends like an undisturbed one when it is started again."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from planish.store.file import TEMPORARY
from tests.integration import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STAGES = [
    ("prepare", 0),
    ("curate", 0),
    ("sft", 0),
    ("rollout", 1),
    ("reward", 1),
    ("train", 1),
    ("checkpoint", 1),
    ("evaluate", 0),
    ("report", 0),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    root = (folder / "run").as_uri()
    runs.run(root, folder / "log.txt")
    found = runs.digests(root)
    assert len(found) >= 10
    return found


@pytest.mark.parametrize(("stage", "iteration"), STAGES)
def test_kill_in_a_stage_then_the_same_command_gives_equal_digests(
    stage: str, iteration: int, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    root = (tmp_path / "run").as_uri()
    log = tmp_path / "log.txt"
    process = runs.start(root, log)
    try:
        if stage != "prepare":
            runs.wait_for_stage(root, stage, iteration)
        pause = random.SystemRandom().uniform(0, 1.5)
        time.sleep(pause)
    finally:
        runs.kill(process)
    runs.run(root, log)
    assert runs.digests(root) == undisturbed, f"killed {pause:.3f} s into {stage}"
    assert not list(tmp_path.rglob(f"{TEMPORARY}*")), f"killed {pause:.3f} s into {stage}"


def test_the_next_attempt_of_a_train_task_that_got_lost_goes_on(
    undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """Stopped first: a process that cannot finish in its grace time, as on a node that is gone."""
    root = (tmp_path / "run").as_uri()
    log = tmp_path / "log.txt"
    process = runs.start(root, log)
    runs.wait_for_stage(root, "train", 1)
    runs.signal_task(process, "train", signal.SIGSTOP, signal.SIGKILL)
    # The same run ends well: its retry made up for the attempt that got lost.
    runs.finish(process, log)
    assert runs.digests(root) == undisturbed
