"""Layouts that no save may write."""

import pytest

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import Box, flat_boxes, whole
from planish.checkpoint.format.items import Columns, LocalItem, TensorSpec
from planish.checkpoint.plan.save import plan_save


def spec(fqn, shape, dtype="F32"):
    return TensorSpec("main", "model", fqn, dtype, shape)


def columns(*ranks):
    """Each rank is a list of (fqn, shape, offsets, lengths), or of (spec, boxes)."""
    return [
        Columns.from_items(
            [
                LocalItem(*item) if len(item) == 2
                else LocalItem(spec(*item[:2]), (Box(*item[2:]),))
                for item in items
            ]
        )
        for items in ranks
    ]  # fmt: skip


FIRST, SECOND = tuple(flat_boxes((4, 4), 2, 11)), tuple(flat_boxes((4, 4), 2, 12))
REST = tuple(flat_boxes((4, 4), 0, 2)) + tuple(flat_boxes((4, 4), 12, 16))
ONE = spec("w", (4, 4))


def held(fqn, shape, dtype="F32"):
    return (spec(fqn, shape, dtype), (whole(shape),))


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (
            [[("w", (4, 2), (0, 0), (3, 2))], [("w", (4, 2), (2, 0), (2, 2))]],
            "`model.w`: the boxes [0:3, 0:2] and [2:4, 0:2] of shape (4, 2) overlap",
        ),
        (
            [[("w", (4,), (0,), (4,))], [("w", (4,), (0,), (2,))]],
            "`model.w` [0:4] on rank 0 and `model.w` [0:2] on rank 1",
        ),
        (
            [[(ONE, FIRST), (ONE, REST)], [(ONE, SECOND)]],
            "`model.w` [0:1, 2:4], [1:2, 0:4], [2:3, 0:3] on rank 0 and `model.w` [0:1, 2:4], "
            "[1:3, 0:4] on rank 1",
        ),
        (
            [[("w", (4,), (0,), (4,)), ("w", (4,), (0,), (4,))]],
            "`model.w` [0:4] on rank 0 and `model.w` [0:4] on rank 0",
        ),
        (
            [
                [("a", (4,), (0,), (4,)), ("b", (2, 2), (0, 0), (1, 2))],
                [("b", (2, 2), (1, 1), (1, 1))],
            ],
            "got `model.b`: no box holds [1:2, 0:1] of shape (2, 2);",
        ),
        ([[(spec("w", (4,)), ())]], "`model.w`: no box holds [0:4] of shape (4,)"),
        ([[("w", (4,), (0,), (5,))]], "`model.w` [0:5] on rank 0 of shape (4,)"),
        ([[("v", (2,), (-1,), (1,))]], "`model.v` [-1:0] on rank 0 of shape (2,)"),
        (
            [[held("w", (4,))], [held("w", (4,))], [held("w", (4,), "BF16")]],
            "`model.w` one type and one global shape, got F32 of shape (4,) on rank 0 and BF16 of "
            "shape (4,) on rank 2",
        ),
        (
            [[held("s", ())], [held("s", (1,))]],
            "F32 of shape () on rank 0 and F32 of shape (1,) on rank 1",
        ),
    ],
)
def test_the_first_offender_is_named_with_its_boxes_and_ranks(ranks, told):
    with pytest.raises(LayoutMismatch) as caught:
        plan_save(columns(*ranks))
    assert told in str(caught.value)
