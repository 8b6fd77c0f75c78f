"""Plans of earlier saves."""

from __future__ import annotations

import time

import pytest

from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.records import Columns, LocalItem
from planish.checkpoint.format.tables import TensorSpec
from planish.checkpoint.plan.cache import PlanCache, plan_key


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


def test_the_plan_that_was_not_used_for_longest_goes_first():
    cache = PlanCache()
    for number in range(8):
        cache.put(bytes([number]), number)
    assert cache.get(b"\x00") == 0
    cache.put(b"new", 8)
    assert len(cache) == 8
    assert cache.get(b"\x01") is None
    assert [cache.get(bytes([number])) for number in (0, *range(2, 8))] == [0, *range(2, 8)]
    assert (cache.hits, cache.misses) == (8, 1)
    cache.clear()
    assert len(cache) == 0


def test_a_plan_put_again_takes_the_place_of_the_old_one():
    cache = PlanCache(2)
    cache.put(b"a", 1)
    cache.put(b"b", 2)
    cache.put(b"a", 3)
    cache.put(b"c", 4)
    assert (cache.get(b"a"), cache.get(b"b"), cache.get(b"c")) == (3, None, 4)


def test_a_cache_without_room_is_refused():
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        PlanCache(0)


def test_finding_a_plan_takes_less_than_five_milliseconds_for_four_ranks():
    cache = PlanCache()
    cache.put(key(signatures()), "plan")
    found = signatures()
    best = min(_seconds(lambda: cache.get(key(found))) for _ in range(5))
    assert best < 5e-3


def _seconds(call):
    began = time.perf_counter()
    assert call() == "plan"
    return time.perf_counter() - began
