"""Who writes which bytes where."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from planish.checkpoint.format.geometry import Box, flat_boxes, whole
from planish.checkpoint.format.items import Columns, LocalItem, TensorSpec
from planish.checkpoint.plan import save
from planish.checkpoint.plan.files import RankPlan
from planish.checkpoint.plan.save import plan_save
from tests.thin import examples
from tests.unit.checkpoint.planned import World, box_bytes, random_tensors, random_world, write


def spec(fqn, shape, dtype="U8", kind="model", role="main"):
    return TensorSpec(role, kind, fqn, dtype, shape)


def replicated(specs, ranks):
    """Return the columns of ranks that all hold whole tensors."""
    return [Columns.from_items([LocalItem(one, (whole(one.shape),)) for one in specs])] * ranks


def data_loads(plan):
    """Return the bytes of tensors that each rank writes."""
    return [
        sum(int((file.stops - file.starts).sum()) for file in plan.rank(rank).files)
        for rank in range(plan.ranks)
    ]


def writers(plan):
    """Return {item: [(rank, start, stop)]} of a plan whose ranks hold equal items."""
    found = {}
    for rank in range(plan.ranks):
        for file in plan.rank(rank).files:
            for item, *span in zip(file.items, file.starts, file.stops, strict=True):
                found.setdefault(int(item), []).append((rank, *map(int, span)))
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
    plan = plan_save(replicated(specs, 2))
    sizes = {
        file.key: int(file.stops[-1] and (file.stops - file.starts).sum())
        for rank in range(2)
        for file in plan.rank(rank).files
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
    plan = plan_save(replicated(specs, 1))
    files = plan.rank(0).files
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
    files = plan_save(replicated(specs, 1)).rank(0).files
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
def test_what_is_sent_to_a_rank_is_its_plan(seed):
    rng = random.Random(seed)
    world = random_world(rng, 3, random_tensors(rng, 5))
    plan = plan_save(world.columns, split_bytes=64)
    for rank, columns in enumerate(world.columns):
        mine = plan.rank(rank)
        again = RankPlan.decode(plan.wire(rank), Columns.decode(columns.encode()))
        assert sum(file.size for file in mine.files) == plan.loads()[rank]
        for one, other in zip(mine.files, again.files, strict=True):
            assert (one.key, one.header, one.size) == (other.key, other.header, other.size)
            for name in ("items", "starts", "stops", "offsets"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


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
