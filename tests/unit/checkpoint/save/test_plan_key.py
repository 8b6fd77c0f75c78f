"""When a plan of an earlier save is used again."""

from __future__ import annotations

import pytest
import torch

from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import Collected, Columns, LocalItem, TensorSpec
from planish.checkpoint.save.agree import MOST_PLANS, SaveOptions, plan_key


def signatures(**changes):
    """Return the signatures of four ranks, those of rank 3 with changes."""
    one = {"role": "main", "kind": "model", "fqn": "w", "dtype": "F32", "shape": (8, 2)}
    found = []
    for rank in range(4):
        mine = one | (changes if rank == 3 else {})
        box = Box((2 * rank, 0), (2, 2))
        item = LocalItem(TensorSpec(**mine), (changes.get("box", box),) if rank == 3 else (box,))
        found.append(Columns.from_items([item]).signature())
    return found


def key(found, **more):
    return plan_key(found, **({"split_bytes": 64, "hosts": [0, 0, 1, 1]} | more))


def test_equal_ranks_have_one_key_and_every_change_another():
    first = key(signatures())
    assert first == key(signatures())
    more = LocalItem(TensorSpec("main", "model", "w2", "F32", (1,)), (whole((1,)),))
    changed = [
        key(signatures(fqn="v")),
        key(signatures(dtype="BF16")),
        key(signatures(shape=(8, 3))),
        key(signatures(kind="optim")),
        key(signatures(role="critic")),
        key([*signatures()[:3], Columns.from_items([more]).signature()]),
        key([*signatures()[:3], Columns.from_items([], context="a").signature()]),
        key([*signatures()[:3], Columns.from_items([], context="b").signature()]),
        key(signatures()[:3]),
        key(signatures()[::-1]),
        key(signatures(), split_bytes=65),
        key(signatures(), hosts=[0, 1, 0, 1]),
        key(signatures(), hosts=None),
    ]
    assert len({first, *changed}) == 14


def test_signatures_of_another_length_are_refused():
    with pytest.raises(ValueError, match="32 bytes"):
        plan_key([b"a" * 31, b"b" * 33], split_bytes=1)


def state_of(size):
    """Return a state with one tensor of `size` elements: its own plan for each size."""
    spec = TensorSpec("main", "model", "w", "F32", (size,))
    return {"main": Collected([LocalItem(spec, (whole((size,)),), torch.zeros(size))])}


def test_the_plan_that_was_not_used_for_longest_is_made_anew(engine, root):
    def is_hit(size):
        before = engine.planner.hits
        options = SaveOptions(root, overwrite=True, is_async=False)
        engine.save(state_of(size), options)
        return engine.planner.hits > before

    assert [is_hit(size) for size in range(1, MOST_PLANS + 1)] == [False] * MOST_PLANS
    assert is_hit(1)
    assert not is_hit(MOST_PLANS + 1)
    assert not is_hit(2)
    assert is_hit(1)
    assert is_hit(MOST_PLANS)
