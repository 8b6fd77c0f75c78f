"""Verification of a committed checkpoint: its objects, their blocks, their headers.

It needs no torch. Its memory is a few buffers of 16 MiB, for a checkpoint of any size.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from planish.base.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete
from planish.checkpoint.format.geometry import box_of
from planish.checkpoint.format.metafile import BLOCK
from planish.checkpoint.format.safetensors_file import entry_name, read_header
from planish.checkpoint.loading.reader import BlockReader, Progress, check_objects, open_state

Level = Literal["meta", "size", "crc"]
LEVELS: tuple[Level, ...] = ("meta", "size", "crc")
"""Levels of verification; each includes those before it. `meta`: COMMIT and metadata; `size`: the
size of every object; `crc`: the checksum of every block."""
REQUEST_BYTES = 16 << 20


class Fault(NamedTuple):
    """One damaged or missing object or block."""

    file: str
    block: int
    """Number of the damaged block of 1 MiB; -1 for the object as a whole."""
    text: str


@dataclass
class Report:
    """The result of a verification."""

    uri: str
    level: Level
    faults: list[Fault] = field(default_factory=list)
    """All faults."""
    num_objects: int = 0
    """Number of objects checked, the metadata included."""
    num_tensors: int = 0
    num_bytes: int = 0

    @property
    def is_intact(self) -> bool:
        """Return whether there are no faults."""
        return not self.faults


def verify(
    place: str,
    level: Level = "crc",
    *,
    progress: Progress | None = None,
) -> Report:
    """Check a committed checkpoint; its faults are in the report and do not raise.

    `level` is one of `LEVELS`; `progress` gets the bytes checked so far and the bytes in all.

    Raises:
        ValueError: the level is unknown.
        CheckpointNotFound: nothing is committed there.
        StoreUnavailable: the store does not answer.
    """
    if level not in LEVELS:
        raise ValueError(f"`level` must be one of {LEVELS}, got {level!r}")
    report = Report(place.partition("#")[0], level, num_objects=1)
    try:
        opened = open_state(place)
    except (CheckpointCorrupt, CheckpointIncomplete) as error:
        file = getattr(error, "file", "") or "meta/global.bin"
        report.faults.append(Fault(file, -1, str(error)))
        return report
    table = opened.metadata.files
    report.num_tensors = len(opened.metadata.tensors)
    if level == "meta":
        return report
    report.num_objects += len(table)
    missing = check_objects(opened)
    report.faults += [Fault(text.split("`")[1], -1, text) for text in missing]
    if level == "size":
        return report
    files = sorted(set(range(len(table))) - {table.keys.index(f.file) for f in report.faults})
    reader = BlockReader(opened)
    ranges = [
        (file, start, min(start + REQUEST_BYTES, table.sizes[file]))
        for file in files
        for start in range(0, table.sizes[file], REQUEST_BYTES)
    ]
    total = sum(table.sizes[file] for file in files)
    with ThreadPoolExecutor(min(4, 2 * (os.cpu_count() or 1))) as pool:
        checked = pool.map(lambda place: _check_range(reader, *place), ranges)
        for (_, start, stop), faults in zip(ranges, checked, strict=True):
            report.faults += faults
            report.num_bytes += stop - start
            if progress is not None:
                progress(report.num_bytes, total)
    damaged = {fault.file for fault in report.faults}
    for file in files:
        if table.keys[file] not in damaged and table.keys[file].endswith(".safetensors"):
            report.faults += _check_header(reader, file)
    return report


def _check_range(reader: BlockReader, file: int, start: int, stop: int) -> list[Fault]:
    name = reader.opened.metadata.files.keys[file]
    data = np.empty(stop - start, np.uint8)
    faults = []
    try:
        reader.fetch(file, start, data.data)
        # Check each block alone, to list all that are damaged.
        for offset in range(0, len(data), BLOCK):
            try:
                reader.check(file, start + offset, data[offset : offset + BLOCK].data)
            except CheckpointCorrupt as error:
                faults.append(Fault(error.file, error.block, str(error)))
    except CheckpointError as error:
        faults.append(Fault(name, -1, str(error)))
    return faults


def _check_header(reader: BlockReader, file: int) -> list[Fault]:
    """Compare the entries in the header of a data file with the metadata."""
    meta = reader.opened.metadata
    name, size = meta.files.keys[file], meta.files.sizes[file]
    try:
        entries = read_header(lambda end: bytes(reader.read(file, 0, end)), size, file=name)
    except CheckpointError as error:
        return [Fault(name, 0, str(error))]
    seen = {key: (entry.start, entry.stop) for key, entry in entries.items()}
    shards, faults = meta.shards, []
    rows = np.flatnonzero(shards.file == file).tolist()
    for row in rows:
        spec = meta.tensors.spec(int(shards.tensor[row]))
        box = box_of(shards.offsets[row], shards.lengths[row], len(spec.shape))
        key, start = entry_name(spec.fqn, box), int(shards.start[row])
        wanted = start, start + int(shards.nbytes[row])
        if seen.get(key) != wanted:
            faults.append(f"`{key}` must lie at {wanted} of `{name}`, got {seen.get(key)}")
    if len(rows) != len(entries):
        faults.append(f"`{name}` must hold {len(rows)} entries, got {len(entries)}")
    return [Fault(name, -1, text) for text in faults]
