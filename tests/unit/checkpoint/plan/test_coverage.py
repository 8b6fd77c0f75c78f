import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.checkpoint.format.geometry import Box
from planish.checkpoint.plan import coverage
from planish.checkpoint.plan.coverage import cover_faults
from tests.thin import examples
from tests.unit.checkpoint.format.test_geometry import arrays, view
from tests.unit.checkpoint.tilings import random_shape, random_tiling


def fault(shape, *boxes):
    return fault_of(shape, *arrays(boxes, len(shape)))


def fault_of(shape, offsets, lengths):
    shapes = np.array([shape], np.int64).reshape(1, len(shape))
    return cover_faults(shapes, np.zeros(len(offsets), np.int64), offsets, lengths).get(0, "")


def counts(shape, boxes):
    """Return how often each element is held."""
    held = np.zeros(shape, np.int64)
    for box in boxes:
        view(held, box, (0,) * len(shape))[...] += 1
    return held


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((4,), [((0,), (2,)), ((2,), (2,))], ""),
        ((4,), [((0,), (3,)), ((2,), (2,))], "the boxes [0:3] and [2:4] of shape (4,) overlap"),
        ((4,), [((0,), (4,)), ((0,), (4,))], "the boxes [0:4] and [0:4] of shape (4,) overlap"),
        ((), [((), ())], ""),
        ((), [((), ()), ((), ())], "the boxes [] and [] of shape () overlap"),
        ((), [], "no box holds [] of shape ()"),
        ((0, 3), [], ""),
        (
            (2, 3),
            [((0, 0), (1, 3)), ((1, 0), (1, 1)), ((1, 2), (1, 1))],
            "no box holds [1:2, 1:2] of shape (2, 3)",
        ),
    ],
)
def test_the_fault_names_the_boxes(shape, boxes, expected):
    assert fault(shape, *boxes) == expected


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(500), deadline=None)
def test_every_damage_of_a_tiling_is_found_and_told_right(seed):
    rng = random.Random(seed)
    shape = random_shape(rng)
    boxes = [box for piece in random_tiling(rng, shape) for box in piece]
    row = rng.randrange(len(boxes))
    damage = rng.choice(["drop", "twice", "grow", "shrink", "move"])
    if damage == "drop":
        del boxes[row]
    elif damage == "twice":
        boxes.append(boxes[row])
    elif shape:
        dim = rng.randrange(len(shape))
        offsets, lengths = map(list, boxes[row])
        if damage == "move":
            offsets[dim] += rng.choice([-1, 1])
        else:
            lengths[dim] += 1 if damage == "grow" else -1
        sides = zip(offsets, lengths, shape, strict=True)
        if all(o >= 0 and n > 0 and o + n <= side for o, n, side in sides):
            boxes[row] = Box(tuple(offsets), tuple(lengths))
    told, held = fault(shape, *boxes), counts(shape, boxes)
    if (held > 1).any():
        assert "overlap" in told
    elif (held == 0).any():
        assert (held[hole_of(told)] == 0).all()
    else:
        assert told == ""


def hole_of(told):
    """Return as an index the box of a message `no box holds [0:1, 2:3] of ...`."""
    sides = told.removeprefix("no box holds [").partition("]")[0].split(", ")
    return (..., *(slice(*map(int, side.split(":"))) for side in sides if side))


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(200), deadline=None)
def test_many_tensors_at_once_give_the_faults_of_each(seed):
    rng = random.Random(seed)
    shapes, owners, boxes, expected = [], [], [], {}
    for tensor in range(rng.randint(1, 6)):
        shape = random_shape(rng)
        mine = [box for piece in random_tiling(rng, shape) for box in piece]
        if rng.random() < 0.4:
            mine = mine[1:]
        if rng.random() < 0.2:
            mine = [*mine, *mine[:1]]
        shapes.append(shape)
        owners += [tensor] * len(mine)
        boxes += mine
        if told := fault(shape, *mine):
            expected[tensor] = told
    width = max(map(len, shapes))
    padded = [
        np.array([(*side, *[fill] * (width - len(side))) for side in sides], np.int64)
        for sides, fill in (
            (shapes, 1),
            ([b.offsets for b in boxes], 0),
            ([b.lengths for b in boxes], 1),
        )
    ]
    found = cover_faults(
        padded[0],
        np.array(owners, np.int64),
        padded[1].reshape(len(boxes), width),
        padded[2].reshape(len(boxes), width),
        dims=np.array([len(shape) for shape in shapes]),
    )
    assert found == expected


@pytest.mark.slow
def test_one_fault_among_a_million_shards_of_a_thousand_tensors_is_found():
    places = np.stack(
        np.meshgrid(np.arange(1024), np.arange(32), np.arange(32), indexing="ij"), -1
    ).reshape(-1, 3)
    offsets = places[:, 1:] * np.array([8, 4])
    lengths = np.tile(np.array([8, 4]), (len(places), 1))
    shapes = np.tile(np.array([[256, 128]]), (1024, 1))
    assert cover_faults(shapes, places[:, 0], offsets, lengths) == {}
    lengths[777_777, 1] = 5
    assert list(cover_faults(shapes, places[:, 0], offsets, lengths)) == [777_777 // 1024]


def test_pieces_that_no_plane_separates_are_swept_in_less_than_quadratic_time(monkeypatch):
    compared = []
    append = np.append
    monkeypatch.setattr(np, "append", lambda a, b: compared.append(len(a)) or append(a, b))
    boxes = []
    for row in range(0, 150, 3):
        for column in range(0, 150, 3):
            boxes += [
                Box((row, column), (1, 2)), Box((row, column + 2), (2, 1)),
                Box((row + 2, column + 1), (1, 2)), Box((row + 1, column), (2, 1)),
                Box((row + 1, column + 1), (1, 1)),
            ]  # fmt: skip
    assert len(boxes) == 12_500
    assert fault((150, 150), *boxes) == ""
    assert len(compared) == len(boxes)
    assert sum(compared) < len(boxes) ** 2 / 40


def test_a_spiral_that_falls_apart_one_by_one_is_checked_in_few_passes(monkeypatch):
    passes = []
    separate = coverage._separate
    monkeypatch.setattr(coverage, "_separate", lambda *a: passes.append(1) or separate(*a))
    boxes, (top, left, bottom, right) = [], (0, 0, 2000, 2000)
    while bottom - top > 2:
        boxes += [
            Box((top, left), (1, right - left)),
            Box((top + 1, right - 1), (bottom - top - 1, 1)),
            Box((bottom - 1, left), (1, right - left - 1)),
            Box((top + 1, left), (bottom - top - 2, 1)),
        ]
        top, left, bottom, right = top + 1, left + 1, bottom - 1, right - 1
    boxes.append(Box((top, left), (2, 2)))
    assert len(boxes) == 3997
    assert fault((2000, 2000), *boxes) == ""
    assert 0 < len(passes) <= 2 * coverage._MAX_PASSES
    assert fault((2000, 2000), *boxes, Box((3, 1000), (1, 1))).endswith("overlap")
