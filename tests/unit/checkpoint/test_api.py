"""The calls that users know, from a save to the last checkpoint's removal."""

import pytest
import torch

from planish.base.errors import (
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    PlanishError,
    SaveFailed,
    StoreError,
)
from planish.checkpoint import api
from planish.store import open_store
from tests.stores.faulty import FaultyStore


def trained(seed):
    """A small model with an optimizer that has made two steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "extra": {"tokens": 7}}


def test_what_is_saved_later_wins_and_nothing_is_replaced_unasked(tmp_path):
    root = f"{tmp_path}/run"
    assert api.latest(root) is None
    for step in (1, 2, 3):
        api.save(f"{root}/step-{step}", trained(step), async_=False, step=step)
    assert api.latest(root).commit.step == 3
    assert [entry.commit.step for entry in api.list_checkpoints(root)] == [1, 2, 3]
    with pytest.raises(CheckpointExists):
        api.save(f"{root}/step-3", trained(8), async_=False, step=3)
    api.save(f"{root}/step-3", trained(8), async_=False, step=3, overwrite=True)
    assert api.verify(f"{root}/step-3").is_intact
    assert not api.diff(f"{root}/step-2", f"{root}/step-3").is_equal
    kept = api.retain(root, keep_last=1)
    assert [entry.commit.step for entry in api.list_checkpoints(root)] == [3]
    assert len(kept) == 3
    api.gc(root, grace_s=0)
    api.delete(f"{root}/step-3")
    with pytest.raises(CheckpointNotFound):
        api.info(f"{root}/step-3")


@pytest.mark.parametrize("async_", [True, False])
def test_a_store_that_is_down_is_a_failed_save_and_for_a_load_a_store_error(tmp_path, async_):
    place = f"{tmp_path}/run/step-1"
    down = FaultyStore(open_store(place)[0], lambda *_: "fail")
    with pytest.raises(SaveFailed, match="rank 0"):
        api.save(place, trained(0), async_=async_, storage=down).result(20)
    api.save(place, trained(0), async_=async_).result(20)
    with pytest.raises(StoreError) as caught:
        api.load(place, trained(1), storage=down)
    assert not isinstance(caught.value, CheckpointError)
    assert isinstance(caught.value, PlanishError)
    # Whoever catches one of the two must have been told.
    assert "`StoreError`" in api.__doc__
    assert "`StoreError`" in CheckpointError.__doc__


def test_any_object_may_be_a_small_value_where_both_sides_ask_for_it(tmp_path):
    place, state = f"{tmp_path}/a", {"model": {"w": torch.ones(2)}, "extra": {"seen": {1, 2}}}
    with pytest.raises(TypeError, match=r"`extra\.seen` must be plain data .*allow_pickle=True"):
        api.save(place, state, async_=False)
    api.save(place, state, async_=False, allow_pickle=True)
    target = {"model": {"w": torch.zeros(2)}, "extra": {}}
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        api.load(place, target)
    assert target["model"]["w"].tolist() == [0.0, 0.0]
    api.load(place, target, allow_pickle=True)
    assert target["extra"] == {"seen": {1, 2}}
