"""Tensors of two checkpoints compared bit by bit, whatever their layouts, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from planish.checkpoint.geometry import flat_boxes
from planish.checkpoint.reader import BlockReader, Opened
from planish.checkpoint.slices import Slice, SliceReader
from planish.checkpoint.tables import ITEM_BYTES, TensorSpec

BATCH_BYTES = 32 << 20
"""Tensors are read in runs of about this size, from both sides."""
READ_BYTES = 16 << 20
"""Files are checked in reads of this size."""


@dataclass
class Compared:
    """What a comparison has found.

    Example:
        >>> Compared(num_tensors=3).is_equal
        True
    """

    num_tensors: int = 0
    """Tensors that were compared."""
    num_bytes: int = 0
    """Bytes of one side."""
    faults: list[str] = field(default_factory=list)
    """One sentence each; empty when all is equal."""

    @property
    def is_equal(self) -> bool:
        """Nothing was found."""
        return not self.faults


def check_blocks(opened: Opened, said: Callable[[int], None] = lambda _: None) -> int:
    """Read every object of a checkpoint and check every block; return the bytes read.

    Raises:
        CheckpointCorrupt: a block differs from its checksum.
        CheckpointIncomplete: an object is missing or short.
    """
    reader, files, done = BlockReader(opened), opened.metadata.files, 0
    for row, size in enumerate(files.sizes):
        for start in range(0, size, READ_BYTES):
            done += len(reader.read(row, start, min(size, start + READ_BYTES)))
            said(done)
    return done


def compare_states(
    result: Opened, source: Opened, said: Callable[[int], None] = lambda _: None
) -> Compared:
    """Compare every tensor of `result` with the one of the same name in `source`.

    Tensors of the source that the result lacks are the business of the caller.

    Args:
        result: has the tensors that count.
        source: has at least those.
        said: told the bytes compared so far.
    """
    found = Compared()
    mine, theirs = SliceReader(result), SliceReader(source)
    names = result.metadata.tensors
    known = source.metadata.tensor_ids
    specs = []
    for row in range(len(names)):
        spec = names.spec(row)
        other = known.get((spec.role, spec.kind, spec.fqn))
        there = None if other is None else source.metadata.tensors.spec(other)
        if there == spec:
            specs.append(spec)
            continue
        seen = "nothing" if there is None else f"{there.dtype} {there.shape}"
        found.faults.append(f"`{_name(spec)}` is {spec.dtype} {spec.shape}, the source has {seen}")
    found.num_tensors = len(specs)
    differing: dict[str, int] = {}
    for batch in _batches(specs):
        pairs = zip(batch, mine.read_many(batch), theirs.read_many(batch), strict=True)
        for part, ours, others in pairs:
            wrong = int(np.count_nonzero(ours.view(np.uint8) != others.view(np.uint8)))
            if wrong:
                name = _name(part.tensor)
                differing[name] = differing.get(name, 0) + wrong
            found.num_bytes += part.nbytes
        said(found.num_bytes)
    found.faults += [f"`{name}` differs in {count} bytes" for name, count in differing.items()]
    return found


def _name(spec: TensorSpec) -> str:
    return f"{spec.role}.{spec.kind} {spec.fqn}"


def _batches(specs: list[TensorSpec]) -> Iterator[list[Slice]]:
    """Yield runs of slices of about BATCH_BYTES; a larger tensor is cut."""
    batch: list[Slice] = []
    filled = 0
    for spec in specs:
        volume = int(np.prod(spec.shape, dtype=np.int64))
        step = max(1, BATCH_BYTES // ITEM_BYTES[spec.dtype])
        for start in range(0, volume, step):
            part = Slice(spec, tuple(flat_boxes(spec.shape, start, min(volume, start + step))))
            if batch and filled + part.nbytes > BATCH_BYTES:
                yield batch
                batch, filled = [], 0
            batch.append(part)
            filled += part.nbytes
    if batch:
        yield batch
