import dataclasses
import json
import math
import random
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import CheckpointCorrupt, LayoutMismatch
from planish.checkpoint.format import metafile
from planish.checkpoint.format.geometry import Box, flat_boxes, intersect, whole
from planish.checkpoint.format.items import Columns, LocalItem, TensorSpec, TensorTable
from planish.checkpoint.format.metafile import (
    ALGORITHMS,
    BLOCK,
    DEFAULT_CHECKSUM,
    FileTable,
    Metadata,
    Shards,
    block_crcs,
    check_blocks,
    joined_crc,
    widen,
)
from tests.thin import examples
from tests.unit.checkpoint.format import reader_50_lines
from tests.unit.checkpoint.format.metadata_samples import ODD_NAMES, forged, large, row_of, small
from tests.unit.checkpoint.planned import random_shape, random_tiling
from tests.unit.checkpoint.written import write_checkpoint


@pytest.mark.parametrize("seed", range(20))
def test_metadata_come_back_equal(seed):
    meta = small(seed)
    read = metafile.decode(metafile.encode(meta))
    assert metafile.encode(read) == metafile.encode(small(seed)) != metafile.encode(small(seed + 1))
    assert [read.tensors.spec(n) for n in range(12)] == [meta.tensors.spec(n) for n in range(12)]
    assert set(ODD_NAMES) < set(read.tensors.fqns)
    assert (read.header, read.objects) == (meta.header, meta.objects)
    assert (read.files.keys, read.files.sizes) == (meta.files.keys, meta.files.sizes)
    assert read.files.algorithms == ["crc32c"] * 3
    for row in range(3):
        assert read.files.crcs[row].tolist() == meta.files.crcs[row].tolist()
    for name in ("tensor", "file", "start", "nbytes", "offsets", "lengths"):
        seen, wanted = getattr(read.shards, name), getattr(meta.shards, name)
        assert seen.tolist() == wanted.tolist(), name
        assert seen.dtype == np.int64


def test_a_shard_of_a_matrix_takes_few_bytes():
    assert len(metafile.encode(large(100_000))) / 99_840 < 16


@pytest.mark.slow
def test_a_million_shards_are_read_in_little_memory():
    data = metafile.encode(large(1_000_000))
    assert len(data) < 16 << 20
    tracemalloc.start()
    metafile.decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 << 20


@pytest.mark.parametrize("kept", [0, 7, 8, 15, 16, 47, 48, 500, 2000])
def test_a_truncated_file_is_refused(kept):
    data = metafile.encode(small())
    with pytest.raises(CheckpointCorrupt) as caught:
        metafile.decode(data[:kept], file="a-1/meta/global.bin")
    assert caught.value.file == "a-1/meta/global.bin"


def change(*path):
    """Return a change of the row: the last of `path` is the new value of what the rest leads to."""

    def act(row):
        *inner, last, value = path
        for step in inner:
            row = row[step]
        row[last] = value

    return act


def facts(text):
    return lambda row: row.update(facts=text)


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (facts(None), "without nulls"),
        (change("tensors", 0, None), "without nulls"),
        (change("tensors", 0, "shape", [None]), "without nulls"),
        (change("files", 0, "crcs", [None]), "without nulls"),
        (change("offset", 0, None), "without nulls"),
        (facts("[]"), "its facts must be"),
        (facts('{"header":{}}'), "its facts must be"),
        (facts('{"header":[],"objects":{}}'), "must be objects"),
        (facts('{"header":{},"objects":null}'), "must be objects"),
        (facts('{"header":{},"header":{},"objects":{}}'), "appears twice"),
        (facts("[" * 100_000), "must be JSON"),
        (facts('{"header":{"a":NaN},"objects":{}}'), "must be JSON"),
        (change("tensors", 0, "kind", "weights"), "unknown kinds"),
        (change("tensors", 0, "dtype", "F7"), "unknown kinds or types"),
        (lambda row: row["tensors"].append(row["tensors"][0]), "appears twice"),
        (
            lambda row: row["tensors"].append({**row["tensors"][0], "fqn": "q", "shape": [-1]}),
            "less than 2",
        ),
        (change("files", 0, "size", -1), "a checksum for each MiB"),
        (change("files", 0, "size", 2**62), "a checksum for each MiB"),
        (change("files", 0, "crcs", []), "a checksum for each MiB"),
        (lambda row: row["files"].append(row["files"][0]), "must differ"),
        (change("shards", 0, "tensor", 99), "a shard of tensor 99"),
        (change("shards", 0, "tensor", -1), "a shard of tensor"),
        (change("shards", 0, "file", 3), "a shard of tensor or file 3 of 3"),
        (change("shards", 0, "file", -1), "a shard of tensor or file"),
        (change("shards", 0, "start", -1), "lies outside"),
        (change("shards", 0, "start", 2**63 - 1), "lies outside"),
        (lambda row: row["offset"].pop(), "dimensions of its tensor"),
        (lambda row: row["length"].append(1), "dimensions of its tensor"),
        (change("offset", 0, -1), "lies outside"),
        (change("length", 0, 0), "lies outside"),
        (change("length", 0, 2**63 - 1), "lies outside"),
    ],
)
def test_a_row_that_lies_is_refused(act, told):
    row = row_of(metafile.encode(small()))
    act(row)
    with pytest.raises(CheckpointCorrupt, match=told):
        metafile.decode(forged([row]))


def test_other_arrow_files_are_refused():
    data = metafile.encode(small())
    assert metafile.encode(metafile.decode(forged([row_of(data)]))) == data
    for rows in ([], [row_of(data)] * 2):
        with pytest.raises(CheckpointCorrupt, match="one row"):
            metafile.decode(forged(rows))
    other = pa.table({"facts": ["{}"]})
    with pytest.raises(CheckpointCorrupt, match="other columns"):
        metafile.decode(forged([{"facts": "{}"}], other.schema))


def one(key="data/a.safetensors", dims=(2,), box=((0,), (2,)), start=128, size=136):
    """Return metadata of one shard, for a single thing to be wrong."""
    table, owners = TensorTable.from_specs([TensorSpec("main", "model", "w", "F32", dims)])
    files = FileTable([key], [size], ["crc32"], [np.zeros(-(-size // (1 << 20)), np.uint32)])
    sides = [np.array([side], np.int64).reshape(1, len(dims)) for side in box]
    places = [np.array([value], np.int64) for value in (0, start, 8)]
    return Metadata({}, table, files, Shards(owners, *places, *sides))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        *(
            ({"key": key}, "stay in their folder")
            for key in ("../a", "/a", "a//b", "a/./b", "a/..", "", "a\\b", "a\x00b")
        ),
        ({"start": 129}, "outside of its tensor or file"),
        ({"box": ((1,), (2,))}, "outside of its tensor or file"),
        ({"dims": (2**40, 2**40), "box": ((0, 0), (1, 2))}, "less than 2\\*\\*62 bytes"),
        ({"dims": (1,) * 65, "box": ((0,) * 65, (1,) * 65)}, "65 dimensions"),
    ],
)
def test_tables_that_lie_are_refused(wrong, told):
    assert metafile.decode(metafile.encode(one())).shards.nbytes.tolist() == [8]
    with pytest.raises(CheckpointCorrupt, match=told):
        metafile.decode(metafile.encode(one(**wrong)))


def test_a_file_that_unpacks_to_more_than_the_bound_is_refused_before_it_is_unpacked():
    row = row_of(metafile.encode(small()))
    row["facts"] = json.dumps({"header": {"a": " " * (256 << 20)}, "objects": {}})
    data = forged([row])
    assert len(data) < 1 << 20
    del row
    before = pa.total_allocated_bytes()
    pool = pa.default_memory_pool()
    with pytest.raises(CheckpointCorrupt, match="more than 67108864"):
        metafile.decode(data, max_bytes=64 << 20)
    assert pa.total_allocated_bytes() == before
    assert pool.bytes_allocated() < 1 << 20
    tracemalloc.start()
    with pytest.raises(CheckpointCorrupt, match="199936 shards and 781 tensors may need"):
        metafile.decode(metafile.encode(large(200_000)), max_bytes=50_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000


DATA = np.random.default_rng(0).integers(0, 256, 3 * BLOCK + 17, np.uint8)


@pytest.mark.parametrize("algorithm", ["crc32c", "crc32"])
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 12345])
def test_the_checksum_of_the_whole_follows_from_those_of_its_blocks(algorithm, size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    whole = ALGORITHMS[algorithm](0, data) if size else 0
    assert joined_crc(block_crcs(data, algorithm), data, algorithm) == whole


def test_the_checksums_are_those_of_the_standards():
    # iSCSI (RFC 3720, B.4): 32 zeros and 32 ones.
    assert block_crcs(bytes(32), "crc32c").tolist() == [0x8A9136AA]
    assert block_crcs(b"\xff" * 32, "crc32c").tolist() == [0x62A8AB43]
    assert DEFAULT_CHECKSUM == "crc32c"


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 16])
def test_a_flipped_bit_is_found_in_its_block(place):
    crcs = block_crcs(DATA)
    damaged = DATA.copy()
    damaged[place] ^= 1
    with pytest.raises(CheckpointCorrupt, match=rf"block {place // BLOCK} of 4") as caught:
        check_blocks(damaged, crcs, file="data/a", algorithm=DEFAULT_CHECKSUM)
    assert (caught.value.file, caught.value.block) == ("data/a", place // BLOCK)
    check_blocks(DATA, crcs, file="data/a", algorithm=DEFAULT_CHECKSUM)


def test_a_part_of_a_file_is_checked_alone():
    crcs = block_crcs(DATA)
    start, stop = widen(BLOCK + 5, 2 * BLOCK + 1, len(DATA))
    assert (start, stop) == (BLOCK, 3 * BLOCK)
    check_blocks(DATA[start:stop], crcs, file="a", algorithm=DEFAULT_CHECKSUM, first=1)
    with pytest.raises(CheckpointCorrupt) as caught:
        check_blocks(DATA[start:stop], crcs, file="a", algorithm=DEFAULT_CHECKSUM, first=2)
    assert caught.value.block == 2


def test_bytes_without_a_checksum_and_unknown_checksums_are_refused():
    with pytest.raises(CheckpointCorrupt) as caught:
        check_blocks(DATA, block_crcs(DATA)[:2], file="a", algorithm=DEFAULT_CHECKSUM)
    assert caught.value.block == 2
    with pytest.raises(CheckpointCorrupt, match="`md5`"):
        check_blocks(DATA, block_crcs(DATA), file="a", algorithm="md5")


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
    assert [item.volume for item in items()] == [3, 1, 0, 0]


@pytest.mark.parametrize("change", [{"dtype": "F16"}, {"shape": (2, 3)}])
def test_one_name_with_two_forms_is_refused(change):
    other = dataclasses.replace(W, **change)
    with pytest.raises(LayoutMismatch, match=r"one type and one shape.*model\.w"):
        Columns.from_items([LocalItem(W, ()), LocalItem(other, ())])


def boxes(spec, rank):
    """Return what one of two ranks holds under a random tiling."""
    pieces = random_tiling(random.Random(spec.fqn), spec.shape)
    return [box for piece in pieces[rank::2] for box in piece]


def test_fifty_lines_without_our_package_read_a_checkpoint(tmp_path):
    shapes = {"embed.weight": (300, 5, 250), "step": (), "lone": (7,), "a|b/ é": (3, 4, 2, 5)}
    rng = np.random.default_rng(0)
    tensors = {
        TensorSpec("main", "optim", name, "F32", shape): rng.integers(0, 1 << 32, shape, np.uint32)
        for name, shape in shapes.items()
    }
    write_checkpoint(f"file://{tmp_path}/x", tensors, boxes, num_ranks=2)
    (folder,) = (tmp_path / "x").glob("a-*")
    for spec, array in tensors.items():
        read = reader_50_lines.tensor(folder, "main", "optim", spec.fqn)
        assert (read.dtype, read.shape) == (np.float32, spec.shape)
        assert read.tobytes() == array.tobytes()
