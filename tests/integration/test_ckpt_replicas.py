"""Replicas that differ are refused on every rank when the caller asks for the comparison."""

import pytest
import torch

from planish.base.errors import LayoutMismatch
from planish.checkpoint import api
from planish.checkpoint.save.engine import close_engines
from planish.store import open_store
from tests.integration.ckpt_forks import run_ranks

NAME = "tests.integration.test_ckpt_replicas"


def three_saves(rank, size, folder, root):
    state = {"model": {"a": torch.ones(5), "b": torch.zeros(7)}}
    api.save(f"{root}/equal", state, "ddp", async_=False, check_replicas=True)
    if rank == 1:
        state["model"]["b"][3] = 1e-30
    found = ""
    try:
        api.save(f"{root}/unequal", state, "ddp", async_=False, check_replicas=True)
    except LayoutMismatch as error:
        found = str(error)
    api.save(f"{root}/unasked", state, "ddp", async_=False)
    close_engines()
    return found


@pytest.mark.parametrize("size", [3])
def test_unequal_replicas_are_refused_by_all_and_only_when_asked_for(size, file_root, tmp_path):
    found = run_ranks(f"{NAME}:three_saves", size, tmp_path / "ranks", root=file_root)
    assert len(set(found)) == 1
    assert "`b` (main.model): ranks [0, 2] against [1]" in found[0]
    assert "`a`" not in found[0]
    storage, path = open_store(file_root)
    keys = [stat.key.removeprefix(path).strip("/") for stat in storage.list(path)]
    assert not [key for key in keys if key.startswith("unequal/")]
    assert {key.split("/")[0] for key in keys if key.endswith("COMMIT")} == {"equal", "unasked"}
