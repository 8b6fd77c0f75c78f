from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.format import metafile
from planish.checkpoint.format.items import TensorSpec, TensorTable
from planish.checkpoint.format.metafile import FileTable, Metadata, Shards
from tests.unit.checkpoint.format.metadata_samples import ODD_NAMES, large, small


def sealed(body):
    """Return a file with the right SHA-256 at its end."""
    return bytes(body) + hashlib.sha256(body).digest()


def rewritten(data, change):
    """Return the file with another head: `change` gets the head's JSON and edits it."""
    size = struct.unpack_from("<I", data, 12)[0]
    head = json.loads(data[16 : 16 + size])
    change(head)
    text = json.dumps(head).encode()
    return sealed(data[:12] + struct.pack("<I", len(text)) + text + data[16 + size : -32])


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


def test_the_shards_of_a_tensor_are_found():
    meta = metafile.decode(metafile.encode(large(1024)))
    spec = meta.tensors.spec(2)
    rows = meta.shards_of(meta.tensor_ids[spec.role, spec.kind, spec.fqn])
    assert rows.tolist() == list(range(512, 768))


def test_a_shard_of_a_matrix_takes_less_than_64_bytes():
    data = metafile.encode(large(100_000))
    assert len(data) / 99_840 < 48
    assert len(zlib.compress(data, 1)) / 99_840 < 32


@pytest.mark.slow
def test_a_million_shards_are_read_in_little_memory():
    data = metafile.encode(large(1_000_000))
    assert len(data) < 64 << 20
    tracemalloc.start()
    metafile.decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 << 20


@pytest.mark.parametrize("place", [0, 9, 13, 20, 200, -1, -33])
def test_a_flipped_bit_is_found(place):
    data = bytearray(metafile.encode(small()))
    data[place] ^= 4
    with pytest.raises(CheckpointCorrupt) as caught:
        metafile.decode(bytes(data), file="a-1/meta/global.bin")
    assert caught.value.file == "a-1/meta/global.bin"


@pytest.mark.parametrize("kept", [0, 7, 15, 16, 47, 48, 500, -1])
def test_a_truncated_file_is_refused(kept):
    data = metafile.encode(small())
    with pytest.raises(CheckpointCorrupt):
        metafile.decode(data[:kept])


def test_a_newer_version_is_told_apart_from_damage():
    data = bytearray(metafile.encode(small())[:-32])
    data[8] = 2
    with pytest.raises(CheckpointCorrupt, match=r"written by a newer version.*upgrade"):
        metafile.decode(sealed(data))


def lie(index, value):
    def change(head):
        head["columns"][index][2] = value

    return change


@pytest.mark.parametrize("value", [0, 10**6, 2**62, 2**80, -1, 1.5, "9", None, True])
@pytest.mark.parametrize("index", [0, 5, -1])
def test_counts_that_lie_are_refused(index, value):
    data = rewritten(metafile.encode(small()), lie(index, value))
    with pytest.raises(CheckpointCorrupt):
        metafile.decode(data)


def set_head(name, value):
    def change(head):
        head["head"][name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_head("roles", []),
        set_head("roles", [1, 2]),
        set_head("kinds", ["model", "optim", "weights"]),
        set_head("dtypes", ["F32"] * 5 + ["F7"]),
        set_head("algorithms", []),
        set_head("header", []),
        set_head("objects", None),
        lambda head: head["columns"].reverse(),
        lambda head: head["columns"].append(["x", 3, 0]),
        lambda head: head["columns"].append(head["columns"][0]),
        lambda head: head["columns"].pop(),
        lambda head: head.pop("columns"),
        lambda head: head["columns"].append("x"),
    ],
)
def test_a_head_of_another_form_is_refused(change):
    with pytest.raises(CheckpointCorrupt):
        metafile.decode(rewritten(metafile.encode(small()), change))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"[]" + b" " * 1000,
        b"1" * 5000,
        b"NaN",
        b"\xff\xfe",
        b'{"columns":[],"columns":[],"head":{}}',
        b"{}",
    ],
)
def test_json_that_hurts_parsers_is_refused(text):
    body = b"PLNSHCKP" + struct.pack("<II", 1, len(text)) + text
    with pytest.raises(CheckpointCorrupt):
        metafile.decode(sealed(body))


def one(key="data/a.safetensors", dims=(2,), box=((0,), (2,)), start=128, nbytes=8, size=136):
    """Return metadata of one shard, for a single thing to be wrong."""
    table, owners = TensorTable.from_specs([TensorSpec("main", "model", "w", "F32", dims)])
    files = FileTable([key], [size], ["crc32"], [np.zeros(-(-size // (1 << 20)), np.uint32)])
    sides = [np.array([side], np.int64).reshape(1, len(dims)) for side in box]
    places = [np.array([value], np.int64) for value in (0, start, nbytes)]
    return Metadata({}, table, files, Shards(owners, *places, *sides))


def test_one_shard_that_is_right_is_read():
    assert metafile.decode(metafile.encode(one())).shards.nbytes.tolist() == [8]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"key": "../a"}, "stay in their folder"),
        ({"key": "/a"}, "stay in their folder"),
        ({"key": "a//b"}, "stay in their folder"),
        ({"key": "a/./b"}, "stay in their folder"),
        ({"key": "a/.."}, "stay in their folder"),
        ({"key": ""}, "stay in their folder"),
        ({"key": "a\\b"}, "stay in their folder"),
        ({"key": "a\x00b"}, "stay in their folder"),
        ({"start": 129}, "outside of its tensor or file"),
        ({"start": 2**63 - 1}, "outside of its tensor or file"),
        ({"box": ((1,), (2,))}, "outside of its tensor or file"),
        ({"box": ((0,), (0,)), "nbytes": 0}, "outside of its tensor or file"),
        ({"box": ((2**63 - 1,), (2**63 - 1,))}, "outside of its tensor or file"),
        ({"nbytes": 4}, "another size than its box"),
        ({"dims": (2**40, 2**40), "box": ((0, 0), (1, 2))}, "less than 2\\*\\*62 bytes"),
        ({"dims": (1,) * 65, "box": ((0,) * 65, (1,) * 65), "nbytes": 4}, "at most 64 dim"),
    ],
)
def test_a_table_that_lies_is_refused(wrong, told):
    with pytest.raises(CheckpointCorrupt, match=told):
        metafile.decode(metafile.encode(one(**wrong)))


def test_files_without_all_checksums_are_not_encoded():
    meta = small()
    meta.files.crcs[1] = np.zeros(0, np.uint32)
    with pytest.raises(ValueError, match="must have a checksum for each MiB, 1 do not"):
        metafile.encode(meta)


@pytest.mark.slow
def test_nothing_is_allocated_beyond_the_bound():
    data = metafile.encode(large(100_000))
    with pytest.raises(CheckpointCorrupt, match="more than the bound of 1000000"):
        metafile.decode(data, max_bytes=1_000_000)
    wide = [TensorSpec("main", "model", "w", "F32", (1,) * 64)]
    meta = large(100_000)
    specs = [meta.tensors.spec(n) for n in range(len(meta.tensors))]
    table, _ = TensorTable.from_specs(specs + wide)
    pad = np.zeros((meta.shards.num_shards, 62), np.int64)
    sides = np.hstack([meta.shards.offsets, pad]), np.hstack([meta.shards.lengths, pad + 1])
    kept = meta.shards.tensor, meta.shards.file, meta.shards.start, meta.shards.nbytes
    data = metafile.encode(Metadata({}, table, meta.files, Shards(*kept, *sides)))
    assert len(data) < 5 << 20
    tracemalloc.start()
    with pytest.raises(CheckpointCorrupt, match="99840 shards"):
        metafile.decode(data, max_bytes=128 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
