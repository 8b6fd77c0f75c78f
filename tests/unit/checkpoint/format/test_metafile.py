import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.format import metafile
from planish.checkpoint.format.items import TensorSpec, TensorTable
from planish.checkpoint.format.metafile import FileTable, Metadata, Shards
from tests.unit.checkpoint.format.metadata_samples import ODD_NAMES, forged, large, row_of, small


@pytest.mark.parametrize("seed", range(20))
def test_metadata_come_back_equal(seed):
    meta = small(seed)
    read = metafile.decode(metafile.encode(meta))
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


def test_equal_metadata_give_equal_bytes():
    assert metafile.encode(small(3)) == metafile.encode(small(3))
    assert metafile.encode(metafile.decode(metafile.encode(small(3)))) == metafile.encode(small(3))
    assert metafile.encode(small(3)) != metafile.encode(small(4))


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
        (facts('{"a":' * 50_000), "must be JSON"),
        (facts("1" * 5000), "must be JSON"),
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
