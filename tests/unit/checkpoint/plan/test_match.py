"""Which stored pieces a rank's boxes consist of."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import Box, intersect, whole
from planish.checkpoint.format.items import Columns, LocalItem, TensorSpec
from planish.checkpoint.plan import match as matching
from planish.checkpoint.plan.match import ShardIndex, match
from planish.checkpoint.plan.save import plan_save
from tests.thin import examples
from tests.unit.checkpoint.planned import random_tensors, random_world


def spec(fqn, shape, dtype="F32"):
    return TensorSpec("main", "model", fqn, dtype, shape)


def saved(*ranks):
    """Return the metadata of ranks that are lists of (spec, boxes)."""
    columns = [Columns.from_items([LocalItem(*item) for item in items]) for items in ranks]
    return plan_save(columns).metadata({})


def by_rows(one, ranks):
    """Return ranks that hold a tensor by rows."""
    rows = one.shape[0] // ranks
    rest = one.shape[1:]
    return [
        [(one, (Box((rank * rows, *(0 for _ in rest)), (rows, *rest)),))] for rank in range(ranks)
    ]


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), chunk=st.sampled_from([1, 7, 1 << 20]))
def test_pieces_are_all_intersections_and_fill_the_boxes(seed, chunk):
    rng = random.Random(seed)
    specs = random_tensors(rng, rng.randint(0, 5))
    source = random_world(rng, rng.randint(1, 5), specs)
    metadata = plan_save(source.columns, split_bytes=100).metadata({})
    target = random_world(rng, rng.randint(1, 5), specs, source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_CHUNK", chunk)
        index = ShardIndex(metadata)
        for items in target.items:
            reads = match(metadata, items, index=index)
            assert rows_of(reads) == expected(metadata, items)


def rows_of(reads):
    columns = zip(reads.item, reads.box, reads.shard, reads.offsets, reads.lengths, strict=True)
    return [
        (int(item), int(box), int(shard), tuple(offsets.tolist()), tuple(lengths.tolist()))
        for item, box, shard, offsets, lengths in columns
    ]


def expected(metadata, items):
    """Intersect every wanted box with every shard of its tensor."""
    found = []
    width = max(1, metadata.tensors.max_dims)
    for item, held in enumerate(items):
        row = metadata.tensor_ids[held.tensor.role, held.tensor.kind, held.tensor.fqn]
        dims = len(held.tensor.shape)
        full = [box for box in held.boxes if box.volume]
        for number, box in enumerate(full):
            for shard in metadata.shards_of(row).tolist():
                stored = Box(
                    tuple(metadata.shards.offsets[shard, :dims].tolist()),
                    tuple(metadata.shards.lengths[shard, :dims].tolist()),
                )
                both = intersect(box, stored)
                if both:
                    pad = (width - dims) * (0,), (width - dims) * (1,)
                    found.append(
                        (item, number, shard, both.offsets + pad[0], both.lengths + pad[1])
                    )
    return found


def test_boxes_outside_are_refused():
    one = spec("a", (4,))
    metadata = saved([(one, (whole((4,)),))])
    with pytest.raises(LayoutMismatch, match=r"`model.a` \[3:5\]"):
        match(metadata, [LocalItem(one, (Box((3,), (2,)),))])


def without_shards(metadata, rows):
    """Return metadata that lacks shards, or has some twice."""
    columns = {name: column[rows] for name, column in vars(metadata.shards).items()}
    return dataclasses.replace(metadata, shards=type(metadata.shards)(**columns))


def test_a_gap_is_told_with_tensor_box_and_place():
    one = spec("w", (6, 2))
    metadata = without_shards(saved(*by_rows(one, 3)), [0, 2])
    with pytest.raises(LayoutMismatch) as caught:
        match(metadata, [LocalItem(one, (Box((1, 0), (4, 2)),))])
    told = "`model.w` [1:5, 0:2], counted from its corner: no box holds [1:3, 0:2] of shape (4, 2)"
    assert told in str(caught.value)
    reads = match(metadata, [LocalItem(one, (Box((4, 0), (2, 2)),))])
    assert reads.shard.tolist() == [1]


def test_a_hole_hidden_by_a_double_is_found():
    one = spec("w", (4, 2))
    metadata = without_shards(saved(*by_rows(one, 2)), [0, 0])
    with pytest.raises(LayoutMismatch, match=r"the boxes .* of shape \(4, 2\) overlap"):
        match(metadata, [LocalItem(one, (whole((4, 2)),))])
