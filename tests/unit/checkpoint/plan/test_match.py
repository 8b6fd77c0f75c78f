"""Which stored pieces a rank's boxes consist of."""

import dataclasses

import pytest

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import Columns, LocalItem, TensorSpec
from planish.checkpoint.plan.match import match
from planish.checkpoint.plan.save import plan_save


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
