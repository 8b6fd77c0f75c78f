"""Loader state prepared one step ahead by several ranks, some of which foresee it wrongly."""

from __future__ import annotations

import threading

import torch

from planish.checkpoint import api
from planish.checkpoint.adapters.loader_ahead import Foreseen
from planish.checkpoint.adapters.loader_state import CONSUMED, LoaderShard
from planish.checkpoint.checkpoint_manager import CheckpointManager, Schedule
from tests.integration.ckpt_forks import run_ranks


class Reader:
    """One of `dp_size` readers that take turns at a source; a step is foreseen to take two."""

    num_readers = 1

    def __init__(self, rank, size, *, is_owner=True):
        self.dp_rank, self.dp_size, self.is_owner = rank, size, is_owner
        self.taken, self.asked = 0, 0
        self.looked = threading.Semaphore(0)

    def shards_at(self, taken):
        first = self.dp_rank + taken * self.dp_size
        return [LoaderShard(self.dp_rank, 0, buffer=[], cursor={"web": first})]

    def ckpt_common(self):
        return {"seed": 3, CONSUMED: {}}

    def ckpt_shards(self):
        self.asked += 1
        return self.shards_at(self.taken)

    def ckpt_restore(self, common, shards):
        self.cursor = shards[0].cursor["web"]

    def ckpt_prepare(self, step):
        taken = self.taken + 2
        self.looked.release()
        return Foreseen(taken, self.ckpt_common(), self.shards_at(taken))

    def ckpt_mark(self):
        return self.taken


def scenario(rank, size, folder, root):
    """Two data-parallel readers on four ranks; in step 4 rank 1 takes one sample more."""
    owner = rank < 2
    manager = CheckpointManager(root, Schedule(2, keep_last=9))
    loader = Reader(rank % 2, 2, is_owner=owner)
    for step in range(1, 7):
        loader.taken += 3 if (rank % 2, step) == (1, 4) else 2
        manager.step(step, {"model": {"w": torch.zeros(8)}, "dataloader": loader})
        if manager.will_save_at(step + 1):
            loader.looked.acquire(timeout=60.0)
        torch.distributed.barrier()
    manager.wait()
    positions = []
    for step in (2, 4, 6):
        found = Reader(rank % 2, 2, is_owner=owner)
        api.load(manager.place(step), {"model": {"w": torch.zeros(8)}, "dataloader": found})
        positions.append(found.cursor)
    manager.close()
    return {
        "used": manager.ahead.used,
        "stale": manager.ahead.stale,
        "asked": loader.asked,
        "positions": positions,
    }


def test_ranks_that_foresee_wrongly_save_what_they_have_and_the_others_what_is_ready(tmp_path):
    found = run_ranks(
        "tests.integration.test_ckpt_loader_ahead:scenario", 4, tmp_path / "ranks", timeout=300.0,
        root=f"file://{tmp_path}/run",
    )  # fmt: skip
    for rank, one in enumerate(found):
        wrong = rank % 2 == 1
        assert (one["used"], one["stale"]) == ((2, 1) if wrong else (3, 0))
        assert one["asked"] == (wrong and rank < 2)
        taken = [4, 9, 13] if wrong else [4, 8, 12]
        assert one["positions"] == [rank % 2 + 2 * number for number in taken]
