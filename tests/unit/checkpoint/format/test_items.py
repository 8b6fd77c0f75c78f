from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import Box, flat_boxes
from planish.checkpoint.format.items import ITEM_BYTES, Columns, LocalItem, TensorSpec, TensorTable
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


def test_two_items_of_one_tensor_share_a_row():
    halves = [LocalItem(W, (Box((0, 0), (1, 2)),)), LocalItem(W, (Box((2, 0), (1, 2)),))]
    columns = Columns.from_items([halves[0], items()[1], halves[1]])
    assert columns.item_tensor.tolist() == [0, 1, 0]
    assert len(columns.tensors) == 2


@pytest.mark.parametrize("change", [{"dtype": "F16"}, {"shape": (2, 3)}])
def test_one_name_with_two_forms_is_refused(change):
    other = dataclasses.replace(W, **change)
    with pytest.raises(LayoutMismatch, match=r"one type and one shape.*model\.w"):
        Columns.from_items([LocalItem(W, ()), LocalItem(other, ())])


def test_a_box_of_other_dimensions_and_an_unknown_type_are_refused():
    with pytest.raises(LayoutMismatch, match=r"`model\.w` must have the 2 dimensions"):
        Columns.from_items([LocalItem(W, (Box((0,), (6,)),))])
    with pytest.raises(LayoutMismatch, match=r"a type must be one of .* got \['float32'\]"):
        Columns.from_items([LocalItem(dataclasses.replace(W, dtype="float32"), ())])


def test_columns_of_nothing_come_back():
    columns = Columns.decode(Columns.from_items([]).encode())
    assert len(columns.tensors) == 0
    assert columns.item_starts.tolist() == [0]
    assert columns.offsets.shape == (0, 0)


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


def test_the_signature_sees_every_change_but_that_of_data():
    changes = [
        items(),
        items()[1:],
        list(reversed(items())),
        [LocalItem(dataclasses.replace(W, dtype="BF16"), items()[0].boxes), *items()[1:]],
        [LocalItem(dataclasses.replace(W, shape=(3, 3)), items()[0].boxes), *items()[1:]],
        [LocalItem(dataclasses.replace(W, fqn="model.v"), items()[0].boxes), *items()[1:]],
        [LocalItem(dataclasses.replace(W, role="critic"), items()[0].boxes), *items()[1:]],
        [LocalItem(dataclasses.replace(W, kind="optim"), items()[0].boxes), *items()[1:]],
        [LocalItem(W, items()[0].boxes[:1]), *items()[1:]],
        [LocalItem(W, (Box((1, 0), (1, 2)), Box((2, 0), (1, 1)))), *items()[1:]],
    ]
    signatures = {Columns.from_items(change).signature() for change in changes}
    assert len(signatures) == len(changes)
    assert Columns.from_items(items()).signature() in signatures
    assert {len(signature) for signature in signatures} == {32}


def test_a_table_keeps_names_and_padded_shapes():
    table, rows = TensorTable.from_specs([STEP, W, STEP])
    assert rows.tolist() == [0, 1, 0]
    assert table.shapes.tolist() == [[1, 1], [3, 2]]
    assert table.dims.tolist() == [0, 2]
    assert table.item_bytes.tolist() == [4, 4]
    assert table.ids == {("main", "optim", "optim.w.step"): 0, ("main", "model", "model.w"): 1}
    assert [table.spec(0), table.spec(1)] == [STEP, W]
