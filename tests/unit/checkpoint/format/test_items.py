import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import Box, flat_boxes
from planish.checkpoint.format.items import ITEM_BYTES, Columns, LocalItem, TensorSpec
from tests.thin import examples

W = TensorSpec("main", "model", "model.w", "F32", (3, 2))
STEP = TensorSpec("main", "optim", "optim.w.step", "F32", ())


def items():
    """Return a flat slice of two boxes, a scalar, and a shard without elements."""
    return [
        LocalItem(W, tuple(flat_boxes((3, 2), 0, 3))),
        LocalItem(STEP, (Box((), ()),)),
        LocalItem(TensorSpec("main", "model", "model.b", "BF16", (4,)), (Box((4,), (0,)),)),
        LocalItem(TensorSpec("main", "model", "model.c", "BF16", (4,)), ()),
    ]


def test_items_become_rows_and_boxes_without_elements_vanish():
    columns = Columns.from_items(items())
    assert columns.tensors.fqns == ("model.w", "optim.w.step", "model.b", "model.c")
    assert columns.item_tensor.tolist() == [0, 1, 2, 3]
    assert columns.item_starts.tolist() == [0, 2, 3, 3, 3]
    assert columns.offsets.tolist() == [[0, 0], [1, 0], [0, 0]]
    assert columns.lengths.tolist() == [[1, 2], [1, 1], [1, 1]]
    assert columns.box_item.tolist() == [0, 0, 1]
    assert columns.box_tensor.tolist() == [0, 0, 1]
    assert columns.boxes(0) == items()[0].boxes
    assert columns.boxes(1) == (Box((), ()),)
    assert columns.boxes(2) == ()
    assert [item.volume for item in items()] == [3, 1, 0, 0]


@pytest.mark.parametrize("change", [{"dtype": "F16"}, {"shape": (2, 3)}])
def test_one_name_with_two_forms_is_refused(change):
    other = dataclasses.replace(W, **change)
    with pytest.raises(LayoutMismatch, match=r"one type and one shape.*model\.w"):
        Columns.from_items([LocalItem(W, ()), LocalItem(other, ())])


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
specs = st.builds(
    TensorSpec,
    st.sampled_from(["main", "critic", "é|"]),
    st.sampled_from(["model", "optim"]),
    names,
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
)


@pytest.mark.slow
@given(st.lists(specs, max_size=8, unique_by=lambda s: (s.role, s.kind, s.fqn)), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_columns_come_back_equal_from_bytes(tensors, data):
    held = []
    for spec in tensors:
        side = st.tuples(*(st.integers(0, 2**62) for _ in spec.shape))
        length = st.tuples(*(st.integers(1, 2**40) for _ in spec.shape))
        boxes = data.draw(st.lists(st.builds(Box, side, length), max_size=3))
        held.append(LocalItem(spec, tuple(boxes)))
    columns = Columns.from_items(held)
    read = Columns.decode(columns.encode())
    assert [read.tensors.spec(n) for n in range(len(tensors))] == tensors
    assert [read.boxes(n) for n in range(len(held))] == [item.boxes for item in held]
    assert read.encode() == columns.encode()
    assert read.signature() == columns.signature()
