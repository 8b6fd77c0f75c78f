"""Saves whose processes are killed, stopped or told to end."""

import contextlib
import json
import os
import signal
import time

import psutil
import pytest
import torch

from planish.checkpoint.checkpoint_manager import CheckpointManager, Schedule
from planish.checkpoint.commit import catalog
from planish.checkpoint.saving.agree import SaveOptions
from planish.checkpoint.saving.engine import default_engine
from planish.store import open_store
from tests.integration.ckpt_states import (
    assert_holds,
    attempts,
    read_back,
    state_of,
)
from tests.integration.waiting import wait_for

HERE = "tests.integration.test_ckpt_save_faults"
BIG = {"rows": 900, "cols": 1000, "tensors": 8}
"""36 MB: every one of three ranks leaves it to its uploading process."""

pytestmark = pytest.mark.slow


def tell(folder, name, value):
    partial = folder / f"{name}.partial"
    partial.write_text(json.dumps(value))
    partial.rename(folder / name)


def pids_of(folder, size):
    names = [folder / f"held-{rank}" for rank in range(size)]
    wait_for(lambda: all(path.exists() for path in names), 300, "a save that is held up")
    return [json.loads(path.read_text()) for path in names]


def gone(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def loop(rank, size, folder, root, grace_s):
    """Train until told to end; every step needs all ranks."""
    import torch.distributed as dist

    manager = CheckpointManager(
        root, Schedule(1000, grace_s=grace_s), "ddp", hear_sigterm=True, timeout_s=60
    )
    weight = torch.zeros(10)
    step = 0
    while not manager.should_stop and step < 5000:
        step += 1
        total = torch.ones(1)
        dist.all_reduce(total)
        weight += total
        manager.step(step, {"model": {"w": weight}, "extra": {"step": step}})
        if step == 20:
            tell(folder, f"held-{rank}", os.getpid())
        time.sleep(0.002)
    manager.close()
    default_engine().close()
    return step


@pytest.mark.parametrize("told", [(0,), (2,), (0, 1, 2)], ids=["rank-0", "rank-2", "all"])
def test_sigterm_to_any_rank_makes_all_save_the_same_step_and_end(forks, file_root, tmp_path, told):
    ranks = forks.start(f"{HERE}:loop", 3, tmp_path, root=file_root, grace_s=30.0)
    pids_of(ranks.folder, 3)
    for rank in told:
        ranks.kill(rank, signal.SIGTERM)
    outcomes = ranks.wait(300)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], outcomes
    (step,) = {outcome.value for outcome in outcomes}
    assert 20 <= step < 5000
    storage, path = open_store(file_root)
    (entry,) = catalog.list_checkpoints(storage, path)
    assert entry.step == step
    _, _, tensors, small = read_back(entry.uri)
    assert tensors["main", "model", "w"].tolist() == [3.0 * step] * 10
    assert small["data/main.extra/shared.bin"]["extra"]["step"] == step


def unheard(rank, size, folder, root):
    """A save under way when SIGTERM kills the trainer itself."""
    engine = default_engine()
    engine.save(state_of(rank, size, seed=1, **BIG), SaveOptions(f"{root}/1")).result(60)
    os.kill(engine.uploader.pid, signal.SIGSTOP)
    engine.save(state_of(rank, size, seed=2, **BIG), SaveOptions(f"{root}/2"))
    tell(folder, f"held-{rank}", engine.uploader.pid)
    time.sleep(60)


def test_a_trainer_that_sigterm_ends_leaves_no_uploader_and_nothing_visible(
    forks, file_root, tmp_path
):
    ranks = forks.start(f"{HERE}:unheard", 1, tmp_path, root=file_root)
    (uploader,) = pids_of(ranks.folder, 1)
    ranks.kill(0, signal.SIGTERM)
    (outcome,) = ranks.wait(20)
    assert outcome.code == -signal.SIGTERM
    os.kill(uploader, signal.SIGCONT)
    wait_for(lambda: gone(uploader), 20, "the end of the uploading process")
    assert not attempts(f"{file_root}/2")[1]
    storage, path = open_store(f"{file_root}/2")
    assert [u for stat in storage.list(path) for u in storage.open_uploads(stat.key)] == []
    assert_holds(f"{file_root}/1", seed=1, **BIG)
