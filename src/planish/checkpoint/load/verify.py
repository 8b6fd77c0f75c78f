"""Whether a committed checkpoint is all there: its objects, their blocks, their headers.

Needs no torch; memory is a few buffers of 16 MiB, whatever the size of the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from planish.base.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete
from planish.checkpoint.format.geometry import Box
from planish.checkpoint.format.integrity import BLOCK
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.format.safetensors_file import (
    Header,
    entry_name,
    header_bytes,
    parse_header,
)
from planish.checkpoint.load.reader import BlockReader, Opened, check_objects, open_state
from planish.store import Store

Level = Literal["meta", "size", "crc"]
LEVELS: tuple[Level, ...] = ("meta", "size", "crc")
"""COMMIT and metadata; also that every object is there with its size; also every block."""
REQUEST_BYTES = 16 << 20


class Fault(NamedTuple):
    """One thing that is wrong.

    Example:
        >>> Fault("data/main.model/00000-0.safetensors", 3, "differs").block
        3
    """

    file: str
    """Key relative to the attempt."""
    block: int
    """Number of the damaged block of 1 MiB; -1 for the object as a whole."""
    text: str


@dataclass
class Report:
    """What a check has found.

    Example:
        >>> Report("file:///r/step-1", "crc").is_intact
        True
    """

    uri: str
    level: Level
    faults: list[Fault] = field(default_factory=list)
    """In the order of the file table, all of them."""
    num_objects: int = 0
    """Looked at, the metadata included."""
    num_tensors: int = 0
    num_bytes: int = 0
    """Of the objects that were read."""

    @property
    def is_intact(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.faults


def verify(
    place: str,
    level: Level = "crc",
    *,
    storage: Store | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check a committed checkpoint; faults are told, not raised.

    Args:
        place: URI of the checkpoint, or its pin.
        level: one of `LEVELS`; each includes those before it.
        storage: in place of the one that the URI names.
        progress: called with bytes checked and bytes in all.

    Raises:
        ValueError: an unknown level.
        CheckpointNotFound: nothing is committed there.
        StoreUnavailable: the store does not answer.
    """
    if level not in LEVELS:
        raise ValueError(f"`level` must be one of {LEVELS}, got {level!r}")
    report = Report(place.partition("#")[0], level, num_objects=1)
    try:
        opened = open_state(place, storage)
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
    if level == "crc":
        sound = set(range(len(table))) - {table.keys.index(f.file) for f in report.faults}
        _check_bytes(opened, sorted(sound), report, progress)
    return report


def _check_bytes(
    opened: Opened,
    files: list[int],
    report: Report,
    progress: Callable[[int, int], None] | None,
) -> None:
    reader = BlockReader(opened)
    sizes = opened.metadata.files.sizes
    jobs = [
        (file, start, min(start + REQUEST_BYTES, sizes[file]))
        for file in files
        for start in range(0, sizes[file], REQUEST_BYTES)
    ]
    total = sum(sizes[file] for file in files)
    with ThreadPoolExecutor(min(4, 2 * (os.cpu_count() or 1))) as pool:
        for faults, size in pool.map(lambda job: _check_range(reader, *job), jobs):
            report.faults += faults
            report.num_bytes += size
            if progress is not None:
                progress(report.num_bytes, total)
    bad = {fault.file for fault in report.faults}
    for file in files:
        if opened.metadata.files.keys[file] not in bad:
            report.faults += _check_header(reader, file)


def _check_range(reader: BlockReader, file: int, start: int, stop: int) -> tuple[list[Fault], int]:
    name = reader.opened.metadata.files.keys[file]
    data = np.empty(stop - start, np.uint8)
    try:
        reader.fill(file, start, data.data)
        return [], stop - start
    except CheckpointCorrupt:
        # Which blocks: every one of them alone.
        return list(_bad_blocks(reader, file, start, data)), stop - start
    except CheckpointError as error:
        return [Fault(name, -1, str(error))], stop - start


def _bad_blocks(
    reader: BlockReader, file: int, start: int, data: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> Iterator[Fault]:
    for offset in range(0, len(data), BLOCK):
        try:
            reader.check(file, start + offset, data[offset : offset + BLOCK].data)
        except CheckpointCorrupt as error:
            yield Fault(error.file, error.block, str(error))


def _check_header(reader: BlockReader, file: int) -> list[Fault]:
    """Compare the header of a data file with what the metadata says of it."""
    table = reader.opened.metadata.files
    name, size = table.keys[file], table.sizes[file]
    if not name.endswith(".safetensors"):
        return []
    try:
        length = header_bytes(bytes(reader.read(file, 0, min(8, size))), size, file=name)
        header = parse_header(bytes(reader.read(file, 0, length)), size, file=name)
    except CheckpointError as error:
        return [Fault(name, 0, str(error))]
    return _compare_header(reader.opened, file, header)


def _compare_header(opened: Opened, file: int, header: Header) -> list[Fault]:
    meta, name = opened.metadata, opened.metadata.files.keys[file]
    faults = []
    rows = np.flatnonzero(meta.shards.file == file)
    for row in rows.tolist():
        told = _entry_of(meta, row)
        entry = header.entries.get(told)
        start, size = int(meta.shards.start[row]), int(meta.shards.nbytes[row])
        if entry is None or (entry.start, entry.stop) != (start, start + size):
            seen = None if entry is None else (entry.start, entry.stop)
            text = f"`{told}` must lie at {(start, start + size)} of `{name}`, got {seen}"
            faults.append(Fault(name, -1, text))
    if len(rows) != len(header.entries):
        text = f"`{name}` must hold {len(rows)} entries, got {len(header.entries)}"
        faults.append(Fault(name, -1, text))
    return faults


def _entry_of(meta: Metadata, shard: int) -> str:
    """Return the name of a stored box in its file."""
    tensor = int(meta.shards.tensor[shard])
    dims = int(meta.tensors.dims[tensor])
    sides = [side[shard, :dims].tolist() for side in (meta.shards.offsets, meta.shards.lengths)]
    return entry_name(meta.tensors.fqns[tensor], Box(tuple(sides[0]), tuple(sides[1])))
