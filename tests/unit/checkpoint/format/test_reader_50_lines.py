"""A program of fifty lines that knows only the format reads what ours has written."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from planish.checkpoint.format import metafile
from planish.checkpoint.format.items import TensorSpec, TensorTable
from planish.checkpoint.format.metafile import FileTable, Metadata, Shards, block_crcs
from planish.checkpoint.format.safetensors_file import NewEntry, entry_name, plan_header
from tests.unit.checkpoint.format import reader_50_lines
from tests.unit.checkpoint.tilings import random_tiling

READER = Path(reader_50_lines.__file__)


def written(folder, tensors):
    """Write a checkpoint of two files; `tensors` maps (kind, fqn) to arrays of float32."""
    rng = random.Random(0)
    specs = [TensorSpec("main", *name, "F32", array.shape) for name, array in tensors.items()]
    table, _ = TensorTable.from_specs(specs)
    files, rows = FileTable(), []
    parts = [[], []]
    for owner, (spec, array) in enumerate(zip(specs, tensors.values(), strict=True)):
        for piece in random_tiling(rng, spec.shape):
            for box in piece:
                sides = zip(box.offsets, box.lengths, strict=True)
                part = array[(..., *(slice(o, o + n) for o, n in sides))]
                parts[rng.randrange(2)].append((owner, spec, box, part.tobytes()))
    for number, part in enumerate(parts):
        entries = [NewEntry(entry_name(s.fqn, b), "F32", b.lengths) for _, s, b, _ in part]
        header, starts = plan_header(entries)
        data = header + b"".join(blob for *_, blob in part)
        key = f"data/main.model/{number:05d}-0.safetensors"
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
        files.add(key, len(data), algorithm="crc32", crcs=block_crcs(data, "crc32"))
        for (owner, _, box, blob), start in zip(part, starts.tolist(), strict=True):
            rows.append((owner, number, start, len(blob), box))
    columns = [np.array([row[n] for row in rows], np.int64) for n in range(4)]
    offsets = table.pad([row[4].offsets for row in rows], columns[0], 0)
    lengths = table.pad([row[4].lengths for row in rows], columns[0], 1)
    meta = Metadata({"step": 1}, table, files, Shards(*columns, offsets, lengths))
    (folder / "meta").mkdir()
    (folder / metafile.NAME).write_bytes(metafile.encode(meta))


def test_fifty_lines_without_our_package_read_a_checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    names = {
        ("model", "embed.weight"): (300, 5, 250),
        ("model", "step"): (),
        ("optim", "embed.weight"): (7,),
        ("optim", "a|b/ é"): (3, 4, 2, 5),
    }
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in names.items()}
    written(tmp_path, tensors)
    for (kind, fqn), array in tensors.items():
        read = reader_50_lines.tensor(tmp_path, "main", kind, fqn)
        assert read.dtype == np.float32
        assert read.shape == array.shape
        assert read.tobytes() == array.tobytes()
    assert reader_50_lines.check_crc32(tmp_path) >= 2
