"""Real stages that are asked to stop, as Kubernetes does it: SIGTERM to the stage, then a retry."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from planish.store.processes import process_start
from tests.integration import runs
from tests.integration.waiting import wait_for
from tests.processes import below, marked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STAGES = {"sft": 0.0, "rollout": 0.1, "train": 2.0, "checkpoint": 0.0, "evaluate": 0.1}
"""Stage to the seconds that it has been at work when it is stopped."""


def process_of(folder: Path, stage: str) -> int:
    """Return the process of a stage, which is not the shell that has started it."""

    def found() -> int | None:
        for pid in marked(folder):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == stage:
                    return pid
        return None

    return wait_for(found, 60.0, f"a process of stage {stage}")


def test_a_run_goes_on_after_each_of_its_stages_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    root, log = (tmp_path / "run").as_uri(), tmp_path / "log.txt"
    # With so much to do no stage ends before its time has come.
    work = "rollout.prompts_per_iteration=48 evaluate.num_samples=8"
    run = runs.start(root, log, overrides=f"train.num_processes=2 {work}")
    for stage, seconds in STAGES.items():
        runs.wait_for_stage(root, stage, 0 if stage in ("sft", "evaluate") else 1)
        pid = process_of(tmp_path, stage)
        while stage == "train" and len(below(pid)) < 3:  # torchrun and two ranks
            time.sleep(0.1)
        time.sleep(seconds)
        # A checkpoint takes a tenth of a second: it must not end while we look at its processes.
        os.kill(pid, signal.SIGSTOP)
        family = {member: process_start(member) for member in [pid, *below(pid)]}
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 120.0
        while any(start and process_start(member) == start for member, start in family.items()):
            assert time.monotonic() < deadline, f"{stage}: {family}"
            time.sleep(0.05)
    runs.finish(run, log)
    text = log.read_text(errors="replace")
    assert [s for s in STAGES if f"stopped stage={s} " not in text] == []
