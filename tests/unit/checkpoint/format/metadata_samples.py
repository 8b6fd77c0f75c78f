"""Metadata of made-up checkpoints, small and large."""

import random

import numpy as np
import pyarrow as pa

from planish.checkpoint.format import version_2
from planish.checkpoint.format.geometry import volumes
from planish.checkpoint.format.items import TensorSpec, TensorTable
from planish.checkpoint.format.metafile import FileTable, Metadata, Shards
from tests.unit.checkpoint.planned import random_shape, random_tiling

ODD_NAMES = ["0", "a/b", "..", "a|b", "a b", "é中\U0001f600", '"\\%', "x" * 1000, "", "\n"]
"""Names of tensors that must survive."""


def small(seed=0, *, plain=False):
    """Return metadata of 12 tensors of any type and 0 to 4 dimensions, tiled at random.

    With `plain`, names are short and there are 7 of them.
    """
    rng = random.Random(seed)
    specs, rows = [], []
    names = [f"w{n}" for n in range(7)] if plain else [*ODD_NAMES, "w", "model.w"]
    for number, name in enumerate(names):
        dtype = rng.choice(["F32", "BF16", "BOOL", "I64", "F8_E4M3", "C128"])
        shape = (0, 3) if number == 5 else () if number == 6 else random_shape(rng)
        kind = rng.choice(["model", "optim", "extra"])
        specs.append(TensorSpec(rng.choice(["main", "critic"]), kind, name, dtype, shape))
        pieces = [] if number == 5 else random_tiling(rng, shape)
        rows += [(number, box) for piece in pieces for box in piece]
    table, _ = TensorTable.from_specs(specs)
    owners = np.array([number for number, _ in rows], np.int64)
    offsets = table.pad([box.offsets for _, box in rows], owners, 0)
    lengths = table.pad([box.lengths for _, box in rows], owners, 1)
    return of_boxes(table, owners, offsets, lengths, num_files=3)


def of_boxes(table, owners, offsets, lengths, *, num_files):
    """Return metadata with the boxes in files in turn, and checksums that stand for real ones."""
    nbytes = volumes(lengths) * table.item_bytes[owners]
    file = np.arange(len(owners)) % num_files
    start = np.zeros(len(owners), np.int64)
    files = FileTable()
    rng = np.random.default_rng(0)
    for number in range(num_files):
        mine = file == number
        ends = np.cumsum(nbytes[mine]) + 128
        start[mine] = ends - nbytes[mine]
        size = int(ends[-1]) if mine.any() else 128
        crcs = rng.integers(0, 1 << 32, -(-size // (1 << 20)), np.uint32)
        key = f"data/main.model/{number:05d}-0.safetensors"
        files.add(key, size, algorithm="crc32c", crcs=crcs)
    header = {"step": 7, "roles": ["critic", "main"], "parents": {}, "attributes": {"a": "é"}}
    shards = Shards(owners, file, start, nbytes, offsets, lengths)
    return Metadata(header, table, files, shards, {"main": {"shared": "data/main.extra/0.bin"}})


def large(num_shards):
    """Return metadata of matrices in random-looking rows: `num_shards` boxes of 256 a tensor."""
    per = 256
    count = num_shards // per
    rng = np.random.default_rng(1)
    widths = rng.integers(64, 16384, count)
    heights = rng.integers(1, 64, (count, per))
    shapes = zip(heights.sum(axis=1).tolist(), widths.tolist(), strict=True)
    kinds = ("exp_avg", "exp_avg_sq", "weight")
    table, _ = TensorTable.from_specs(
        [
            TensorSpec("main", "optim", f"layers.{n}.{kinds[n % 3]}", "F32", shape)
            for n, shape in enumerate(shapes)
        ]
    )
    owners = np.repeat(np.arange(count), per)
    offsets = np.zeros((count * per, 2), np.int64)
    offsets[:, 0] = (np.cumsum(heights, axis=1) - heights).reshape(-1)
    lengths = np.stack([heights.reshape(-1), np.repeat(widths, per)], axis=1)
    return of_boxes(table, owners, offsets, lengths, num_files=1000)


def row_of(data):
    """Return the only row of a file of format 2 as plain Python."""
    return pa.ipc.open_file(data).read_all().to_pylist()[0]


def forged(rows, schema=version_2._SCHEMA):
    """Return such a file with any rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=version_2._OPTIONS) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    return bytes(sink.getvalue())
