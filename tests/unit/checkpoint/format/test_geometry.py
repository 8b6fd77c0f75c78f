import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.checkpoint.format.geometry import Box, flat_boxes, intersect, whole
from tests.thin import examples
from tests.unit.checkpoint.tilings import random_shape, random_tiling

SHAPES = st.lists(st.integers(0, 6), max_size=5).map(tuple)


def arrays(boxes, dims):
    return tuple(
        np.array([box[side] for box in boxes], np.int64).reshape(len(boxes), dims)
        for side in (0, 1)
    )


def view(array, box, origin):
    """Return the part of `array`, which begins at `origin` of its tensor, that `box` covers."""
    sides = zip(box.offsets, box.lengths, origin, strict=True)
    return array[(..., *(slice(o - a, o - a + n) for o, n, a in sides))]


def test_a_scalar_has_one_element_and_one_box():
    assert flat_boxes((), 0, 1) == [Box((), ())]
    assert flat_boxes((), 0, 0) == []
    assert whole(()).volume == 1
    assert intersect(Box((), ()), Box((), ())) == Box((), ())


@pytest.mark.slow
@given(SHAPES, st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=examples(600), deadline=None)
def test_a_flat_range_becomes_few_consecutive_boxes(shape, a, b):
    volume = math.prod(shape)
    start, stop = sorted((int(a * volume), int(b * volume)))
    boxes = flat_boxes(shape, start, stop)
    numbers = np.arange(volume).reshape(shape)
    parts = [view(numbers, box, (0,) * len(shape)).reshape(-1) for box in boxes]
    assert np.concatenate([*parts, np.zeros(0, int)]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(min(box.lengths, default=1) > 0 for box in boxes)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(300), deadline=None)
def test_an_intersection_holds_what_both_hold(seed):
    rng = random.Random(seed)
    shape = random_shape(rng)
    a, b = (rng.choice(rng.choice(random_tiling(rng, shape))) for _ in range(2))
    marks = np.zeros(shape, np.int64)
    for box in (a, b):
        view(marks, box, (0,) * len(shape))[...] += 1
    both = intersect(a, b)
    assert intersect(b, a) == both
    assert int((marks == 2).sum()) == (both.volume if both else 0)
    if both:
        assert (view(marks, both, (0,) * len(shape)) == 2).all()
        assert intersect(both, a) == both
