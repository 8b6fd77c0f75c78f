"""Who writes which bytes where."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import Box, flat_boxes, whole
from planish.checkpoint.format.items import Columns, LocalItem, TensorSpec
from planish.checkpoint.plan import coverage, save
from planish.checkpoint.plan.coverage import cover_faults
from planish.checkpoint.plan.files import RankPlan
from planish.checkpoint.plan.match import match
from planish.checkpoint.plan.save import plan_save
from tests.thin import examples
from tests.unit.checkpoint.format.test_metafile import arrays, view
from tests.unit.checkpoint.planned import (
    World,
    box_bytes,
    random_shape,
    random_tensors,
    random_tiling,
    random_world,
    write,
)


def spec(fqn, shape, dtype="U8", kind="model", role="main"):
    return TensorSpec(role, kind, fqn, dtype, shape)


def replicated(specs, ranks):
    """Return the columns of ranks that all hold whole tensors."""
    return [Columns.from_items([LocalItem(one, (whole(one.shape),)) for one in specs])] * ranks


def entries(plan, rank):
    """Return the entries of a rank's files: item, first byte, one past the last."""
    first, last = plan.file_entries[plan.rank_files[rank : rank + 2]]
    columns = plan.items, plan.starts, plan.stops
    return list(zip(*(column[first:last].tolist() for column in columns), strict=True))


def data_loads(plan):
    """Return the bytes of tensors that each rank writes."""
    return [
        sum(stop - start for _, start, stop in entries(plan, rank)) for rank in range(plan.ranks)
    ]


def writers(plan):
    """Return {item: [(rank, start, stop)]} of a plan whose ranks hold equal items."""
    found = {}
    for rank in range(plan.ranks):
        for item, *span in entries(plan, rank):
            found.setdefault(item, []).append((rank, *span))
    return {item: sorted(rows, key=lambda row: row[1]) for item, rows in sorted(found.items())}


def test_the_largest_item_is_placed_first_and_ties_go_to_the_lowest_rank():
    plan = plan_save(replicated([spec("a", (10,)), spec("b", (30,)), spec("c", (20,))], 2))
    # b -> rank 0 (30); c -> rank 1 (20); a -> rank 1 (30).
    assert writers(plan) == {0: [(1, 0, 10)], 1: [(0, 0, 30)], 2: [(1, 0, 20)]}


def test_ties_go_to_the_host_with_fewer_bytes():
    columns = replicated([spec(f"t{n}", (100,)) for n in range(4)], 8)
    same = plan_save(columns, hosts=[0] * 8)
    assert [rows[0][0] for rows in writers(same).values()] == [0, 1, 2, 3]
    spread = plan_save(columns, hosts=[0, 0, 0, 0, 7, 7, 7, 7])
    assert [rows[0][0] for rows in writers(spread).values()] == [0, 4, 1, 5]


def test_kinds_are_balanced_each_by_itself():
    specs = [spec(f"m{n}", (50,)) for n in range(2)]
    specs += [spec(f"o{n}", (10,), kind="optim") for n in range(4)]
    columns = replicated(specs, 2)
    plan = plan_save(columns)
    sizes = {
        file.key: int((file.stops - file.starts).sum())
        for rank in range(2)
        for file in RankPlan.decode(plan.wire(rank), columns[rank]).files
    }
    assert sizes == {
        "data/main.model/00000-0.safetensors": 50,
        "data/main.optim/00000-0.safetensors": 20,
        "data/main.model/00001-0.safetensors": 50,
        "data/main.optim/00001-0.safetensors": 20,
    }


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=40),
    ranks=st.integers(1, 40),
    split=st.integers(10, 500),
)
def test_no_rank_writes_more_than_the_mean_and_the_largest_part(sizes, ranks, split):
    specs = [spec(f"t{n}", (size,)) for n, size in enumerate(sizes)]
    plan = plan_save(replicated(specs, ranks), split_bytes=split)
    loads = data_loads(plan)
    assert sum(loads) == sum(sizes)
    largest = min(max(sizes), split) if ranks > 1 else max(sizes)
    assert max(loads) <= sum(sizes) / ranks + largest


def test_a_large_replica_is_cut_along_its_first_real_dimension_and_shared():
    plan = plan_save(replicated([spec("w", (1, 10, 3), "F32")], 4), split_bytes=50)
    parts = writers(plan)[0]
    # 120 bytes in three parts of 3, 3 and 4 rows of 12 bytes.
    assert [row[1:] for row in parts] == [(0, 36), (36, 72), (72, 120)]
    assert len({row[0] for row in parts}) == 3
    shards = plan.metadata({}).shards
    assert shards.offsets.tolist() == [[0, 0, 0], [0, 3, 0], [0, 6, 0]]
    assert shards.lengths.tolist() == [[1, 3, 3], [1, 3, 3], [1, 4, 3]]


def test_a_replicated_flat_slice_over_the_limit_is_cut_into_its_boxes():
    boxes = tuple(flat_boxes((4, 4), 2, 14))
    rest = [tuple(flat_boxes((4, 4), *pair)) for pair in ((0, 2), (14, 16))]
    one = spec("w", (4, 4))
    items = [[LocalItem(one, boxes), LocalItem(one, ends)] for ends in rest]
    plan = plan_save([Columns.from_items(held) for held in items], split_bytes=4)
    shared = writers(plan)[0]
    assert [row[1:] for row in shared] == [(0, 2), (2, 6), (6, 10), (10, 12)]


def test_entries_are_sorted_by_the_size_of_their_elements_and_files_by_role_and_kind():
    specs = [
        spec("a", (3,), "U8"), spec("b", (3,), "F16"), spec("c", (3,), "F64"),
        spec("d", (3,), "F32"), spec("e", (3,), "C128"), spec("f", (3,), kind="optim"),
        spec("g", (3,), role="critic"),
    ]  # fmt: skip
    columns = replicated(specs, 1)
    files = RankPlan.decode(plan_save(columns).wire(0), columns[0]).files
    assert [file.key for file in files] == [
        "data/critic.model/00000-0.safetensors",
        "data/main.model/00000-0.safetensors",
        "data/main.optim/00000-0.safetensors",
    ]
    assert files[1].items.tolist() == [4, 2, 3, 1, 0]
    assert (files[1].offsets - len(files[1].header)).tolist() == [0, 48, 72, 84, 90]
    assert len(files[1].header) % 64 == 0


def test_roles_cannot_leave_the_folder():
    plan = plan_save(replicated([spec("w", (1,), role="../../etc/x y")], 1))
    assert plan.keys == ("data/..%2F..%2Fetc%2Fx%20y.model/00000-0.safetensors",)


def test_files_begin_anew_when_they_are_full(monkeypatch):
    monkeypatch.setattr(save, "FILE_BYTES", 100)
    specs = [spec(f"t{n}", (60,)) for n in range(5)] + [spec("big", (500,)), spec("z", (1,))]
    columns = replicated(specs, 1)
    files = RankPlan.decode(plan_save(columns).wire(0), columns[0]).files
    assert [file.items.tolist() for file in files] == [[0, 1], [2, 3], [4], [5], [6]]
    assert [file.key for file in files] == [
        f"data/main.model/00000-{number}.safetensors" for number in range(5)
    ]


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_element_is_stored_once_where_the_metadata_says(seed):
    rng = random.Random(seed)
    ranks = rng.randint(1, 6)
    world = random_world(rng, ranks, random_tensors(rng, rng.randint(0, 6)))
    hosts = [rng.randrange(3) for _ in range(ranks)]
    plan = plan_save(world.columns, split_bytes=rng.choice([40, 1000, 1 << 20]), hosts=hosts)
    files = write(world, plan)
    metadata = plan.metadata({})
    held = 0
    for row in range(metadata.shards.num_shards):
        one = metadata.tensors.spec(int(metadata.shards.tensor[row]))
        dims = len(one.shape)
        box = Box(
            tuple(metadata.shards.offsets[row, :dims].tolist()),
            tuple(metadata.shards.lengths[row, :dims].tolist()),
        )
        start, size = int(metadata.shards.start[row]), int(metadata.shards.nbytes[row])
        stored = files[metadata.files.keys[metadata.shards.file[row]]][start : start + size]
        assert stored == box_bytes(world.truth[one.role, one.kind, one.fqn], box)
        held += size
    assert held == sum(value.size for value in world.truth.values())
    for data in files.values():
        deserialize(data)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_files_of_the_ranks_are_those_of_the_whole_plan(seed):
    rng = random.Random(seed)
    world = random_world(rng, 3, random_tensors(rng, 5))
    plan = plan_save(world.columns, split_bytes=64)
    files = [
        file
        for rank, columns in enumerate(world.columns)
        for file in RankPlan.decode(plan.wire(rank), Columns.decode(columns.encode())).files
    ]
    assert tuple(file.key for file in files) == plan.keys
    assert [file.size for file in files] == plan.sizes.tolist()
    assert [len(file.header) for file in files] == plan.headers.tolist()


def test_plans_are_equal_byte_by_byte_whatever_came_before():
    world = random_world(random.Random(5), 4, random_tensors(random.Random(6), 12))

    def all_bytes(held: World):
        plan = plan_save(iter(held.columns), split_bytes=64)
        shards = plan.metadata({}).shards
        return [plan.wire(rank) for rank in range(4)] + [
            column.tobytes() for column in vars(shards).values()
        ]

    first = all_bytes(world)
    assert first == all_bytes(world)
    decoded = [Columns.decode(one.encode()) for one in world.columns]
    plan = plan_save(decoded, split_bytes=64)
    assert [plan.wire(rank) for rank in range(4)] == first[:4]


def floats(fqn, shape, dtype="F32"):
    return TensorSpec("main", "model", fqn, dtype, shape)


def columns(*ranks):
    """Each rank is a list of (fqn, shape, offsets, lengths), or of (spec, boxes)."""
    return [
        Columns.from_items(
            [
                LocalItem(*item) if len(item) == 2
                else LocalItem(floats(*item[:2]), (Box(*item[2:]),))
                for item in items
            ]
        )
        for items in ranks
    ]  # fmt: skip


FIRST, SECOND = tuple(flat_boxes((4, 4), 2, 11)), tuple(flat_boxes((4, 4), 2, 12))
REST = tuple(flat_boxes((4, 4), 0, 2)) + tuple(flat_boxes((4, 4), 12, 16))
ONE = floats("w", (4, 4))


def held(fqn, shape, dtype="F32"):
    return (floats(fqn, shape, dtype), (whole(shape),))


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
        ([[(floats("w", (4,)), ())]], "`model.w`: no box holds [0:4] of shape (4,)"),
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


def without_shards(metadata, rows):
    """Return metadata that lacks shards, or has some twice."""
    columns = {name: column[rows] for name, column in vars(metadata.shards).items()}
    return dataclasses.replace(metadata, shards=type(metadata.shards)(**columns))


@pytest.mark.parametrize(
    ("shards", "box", "told"),
    [
        ([0, 1, 2], Box((4, 0), (3, 2)), "`model.w` [4:7, 0:2]"),
        (
            [0, 2],
            Box((1, 0), (4, 2)),
            "`model.w` [1:5, 0:2], counted from its corner: no box holds [1:3, 0:2] of shape "
            "(4, 2)",
        ),
        ([0, 0, 2], whole((6, 2)), "the boxes [0:2, 0:2] and [0:2, 0:2] of shape (6, 2) overlap"),
    ],
    ids=["outside", "a gap", "a gap hidden by a double"],
)
def test_what_shards_do_not_hold_is_told_with_tensor_box_and_place(shards, box, told):
    one = floats("w", (6, 2))
    metadata = without_shards(saved(*by_rows(one, 3)), shards)
    with pytest.raises(LayoutMismatch) as caught:
        match(metadata, [LocalItem(one, (box,))])
    assert told in str(caught.value)
    reads = match(metadata, [LocalItem(one, (Box((4, 0), (2, 2)),))])
    assert metadata.shards.offsets[reads.shard].tolist() == [[4, 0]]


def fault(shape, *boxes):
    return fault_of(shape, *arrays(boxes, len(shape)))


def fault_of(shape, offsets, lengths):
    shapes = np.array([shape], np.int64).reshape(1, len(shape))
    owners, dims = np.zeros(len(offsets), np.int64), np.array([shapes.shape[1]])
    return cover_faults(shapes, owners, offsets, lengths, dims).get(0, "")


def counts(shape, boxes):
    """Return how often each element is held."""
    held = np.zeros(shape, np.int64)
    for box in boxes:
        view(held, box, (0,) * len(shape))[...] += 1
    return held


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
