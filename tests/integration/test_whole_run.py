"""Whole runs end like an undisturbed one on a folder: on a bucket, and killed without warning."""

import random
import signal
import time
from pathlib import Path

import pytest

from planish.records import RolloutSet, layout, read_set
from planish.store.file import TEMPORARY
from tests.integration import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LEARNS = {"overrides": runs.LEARNS}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    root = (folder / "run").as_uri()
    runs.run(root, folder / "log.txt", **LEARNS)
    assert len(runs.digests(root)) >= 10
    assert read_set(RolloutSet, layout.rollouts(root, 1, 0)).num_groups >= 4
    return root


def kill_in(root: str, log: Path, stage: str, iteration: int) -> str:
    """Start the run, and kill it with all its processes some time into a stage."""
    process = runs.start(root, log, **LEARNS)
    try:
        if stage != "prepare":
            runs.wait_for_stage(root, stage, iteration)
        pause = random.SystemRandom().uniform(0, 1.5)
        time.sleep(pause)
    finally:
        runs.kill(process)
    return f"killed {pause} s into {stage}"


@pytest.mark.server
def test_a_run_on_s3_that_was_killed_once_has_the_digests_of_the_run_on_files(
    undisturbed: str, s3_root: str, tmp_path: Path
) -> None:
    """Killed in the middle: the rollouts are there, and the update is not."""
    root, log = f"{s3_root}/team/run", tmp_path / "log.txt"
    process = runs.start(root, log, **LEARNS)
    try:
        runs.wait_for_stage(root, "train", 1)
    finally:
        runs.kill(process)
    assert runs.manifests(root, "/rollouts/")
    assert not runs.manifests(root, "/evals/")
    runs.run(root, log, **LEARNS)
    assert runs.digests(root) == runs.digests(undisturbed)


def test_killed_in_stage_after_stage_the_same_command_gives_equal_digests(
    undisturbed: str, tmp_path: Path
) -> None:
    root, log = (tmp_path / "run").as_uri(), tmp_path / "log.txt"
    told = [kill_in(root, log, *at) for at in (("curate", 0), ("sft", 0), ("reward", 1))]
    # Stopped first: a task that cannot finish in its grace time, as on a node that is gone.
    process = runs.start(root, log, **LEARNS)
    runs.signal_task(process, root, "train", 1, signal.SIGSTOP, signal.SIGKILL)
    # The same run goes on: its retry made up for the attempt that got lost.
    runs.wait_for_stage(root, "evaluate", 0)
    runs.kill(process)
    runs.run(root, log, **LEARNS)
    assert runs.digests(root) == runs.digests(undisturbed), told
    assert not list(tmp_path.rglob(f"{TEMPORARY}*")), told
