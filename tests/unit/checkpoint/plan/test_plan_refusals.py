"""Layouts that no save may write: every offender is named."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import Box, flat_boxes, whole
from planish.checkpoint.format.items import Columns, LocalItem, TensorSpec
from planish.checkpoint.plan.coverage import cover_faults, untiled
from planish.checkpoint.plan.save import plan_save
from tests.unit.checkpoint.planned import random_shards


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


def refusal(ranks):
    with pytest.raises(LayoutMismatch) as caught:
        plan_save(ranks)
    return str(caught.value)


def test_overlap_names_the_tensor_and_both_boxes():
    told = refusal(columns([("w", (4, 2), (0, 0), (3, 2))], [("w", (4, 2), (2, 0), (2, 2))]))
    assert "`w` (main model): the boxes [0:3, 0:2] and [2:4, 0:2] of shape (4, 2) overlap" in told


def test_overlap_from_one_corner_names_the_ranks():
    told = refusal(
        columns(
            [("w", (4,), (0,), (4,)), ("v", (4,), (0,), (4,))],
            [("w", (4,), (0,), (2,))],
            [("v", (4,), (0,), (1,))],
        )
    )
    assert "`w`: [0:4] on rank 0 and [0:2] on rank 1 overlap without being equal" in told
    assert "`v`: [0:4] on rank 0 and [0:1] on rank 2 overlap without being equal" in told


def test_replicas_must_have_all_their_boxes_in_common():
    one = spec("w", (4, 4))
    first, second = tuple(flat_boxes((4, 4), 2, 11)), tuple(flat_boxes((4, 4), 2, 12))
    rest = tuple(flat_boxes((4, 4), 0, 2)) + tuple(flat_boxes((4, 4), 12, 16))
    told = refusal(columns([(one, first), (one, rest)], [(one, second)]))
    both = "[0:1, 2:4], [1:2, 0:4], [2:3, 0:3] on rank 0 and [0:1, 2:4], [1:3, 0:4] on rank 1"
    assert f"`w`: {both} overlap without being equal" in told


def test_one_rank_may_not_hold_a_box_twice():
    item = ("w", (4,), (0,), (4,))
    assert "`w`: [0:4] on rank 0 comes twice" in refusal(columns([item, item]))


def test_every_hole_is_listed():
    told = refusal(
        columns(
            [("a", (4,), (0,), (2,)), ("b", (2, 2), (0, 0), (1, 2)), ("c", (3,), (0,), (3,))],
            [("b", (2, 2), (1, 1), (1, 1))],
        )
    )
    assert "`a` (main model): no box holds [2:4] of shape (4,): 2 of 4 elements" in told
    assert "`b` (main model): no box holds [1:2, 0:1] of shape (2, 2): 3 of 4" in told
    assert "`c`" not in told


def test_a_tensor_that_nobody_holds_is_a_hole():
    told = refusal([Columns.from_items([LocalItem(spec("w", (4,)), ())])])
    assert "`w` (main model): no box holds [0:4] of shape (4,): 0 of 4 elements in 0 boxes" in told


def test_boxes_outside_are_listed_with_their_ranks():
    told = refusal(
        columns([("w", (4,), (0,), (5,))], [("w", (4,), (3,), (2,)), ("v", (2,), (-1,), (1,))])
    )
    assert "`w` of shape (4,): [0:5] on rank 0" in told
    assert "`w` of shape (4,): [3:5] on rank 1" in told
    assert "`v` of shape (2,): [-1:0] on rank 1" in told


def test_disagreement_about_types_and_shapes_is_listed_in_full():
    told = refusal(
        columns(
            [(spec("w", (4,)), (whole((4,)),)), (spec("v", (2, 3)), (whole((2, 3)),))],
            [(spec("w", (4,), "BF16"), (whole((4,)),)), (spec("v", (3, 2)), (whole((3, 2)),))],
            [(spec("w", (4,)), (whole((4,)),)), (spec("u", (1,)), (whole((1,)),))],
        )
    )
    assert "`w` (main model): F32 of shape (4,) on ranks 0, 2, BF16 of shape (4,) on rank 1" in told
    assert "`v` (main model): F32 of shape (2, 3) on rank 0, F32 of shape (3, 2) on rank 1" in told
    assert "`u`" not in told


def test_a_scalar_is_no_vector_of_one():
    told = refusal(columns([(spec("s", ()), (whole(()),))], [(spec("s", (1,)), (whole((1,)),))]))
    assert "F32 of shape () on rank 0, F32 of shape (1,) on rank 1" in told


def test_thousands_of_ranks_are_told_in_short():
    good, bad = (columns([(spec("w", (4,), t), (whole((4,)),))])[0] for t in ("F32", "F16"))
    told = refusal([good] * 20 + [bad])
    assert "on ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all), F16 of shape (4,) on rank 20" in told


def test_the_quick_checks_miss_no_fault_and_rarely_ask_for_the_thorough_one():
    rng = random.Random(3)
    asked = faulty = 0
    for _ in range(400):
        dims, tensors = rng.randint(0, 4), rng.randint(1, 4)
        shapes = np.array(
            [[rng.randint(1, 6) for _ in range(dims)] for _ in range(tensors)], np.int64
        ).reshape(tensors, dims)
        rows = [
            (tensor, box)
            for tensor in range(tensors)
            for boxes in set(random_shards(rng, tuple(shapes[tensor].tolist()), 4))
            for box in boxes
            if box.volume
        ]
        rng.shuffle(rows)
        if rng.random() < 0.4 and rows:
            rows.pop()
        if rng.random() < 0.4 and rows:
            rows.append(rows[0])
        owners = np.array([tensor for tensor, _ in rows], np.int64)
        offsets = np.array([box.offsets for _, box in rows], np.int64).reshape(len(rows), dims)
        lengths = np.array([box.lengths for _, box in rows], np.int64).reshape(len(rows), dims)
        suspects = set(untiled(shapes, owners, offsets, lengths).tolist())
        faults = set(cover_faults(shapes, owners, offsets, lengths))
        assert faults <= suspects
        faulty += len(faults)
        asked += len(suspects - faults)
    assert faulty > 200
    assert asked < 20
