"""Reads of any part of any tensor of a checkpoint as a numpy array, by one process, without torch.

A read fetches and verifies only the blocks that have the wanted elements. Exports, comparisons and
evaluation use it; `load` loads a training state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import ITEM_BYTES, Columns, LocalItem, TensorSpec
from planish.checkpoint.loading.fill import RAW, Array, numpy_targets
from planish.checkpoint.loading.read_pool import ReadPool
from planish.checkpoint.loading.reader import BlockReader, Opened
from planish.checkpoint.plan.match import match
from planish.checkpoint.plan.reads import assemble
from planish.checkpoint.plan.share import share_reads
from planish.checkpoint.watch.monitor import Recorder

Part = TypeVar("Part")


def batches(
    parts: Iterable[Part], nbytes: Callable[[Part], int], most: int
) -> Iterator[list[Part]]:
    """Yield runs of parts that together have up to `most` bytes, or one part that has more."""
    group: list[Part] = []
    filled = 0
    for part in parts:
        size = nbytes(part)
        if group and filled + size > most:
            yield group
            group, filled = [], 0
        group.append(part)
        filled += size
    if group:
        yield group


class Slice(NamedTuple):
    """Boxes of one tensor, one after the other."""

    tensor: TensorSpec
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all boxes."""
        return ITEM_BYTES[self.tensor.dtype] * sum(box.volume for box in self.boxes)


class SliceReader:
    """Reads slices of one checkpoint."""

    def __init__(
        self, opened: Opened, *, reader: BlockReader | None = None, num_threads: int = 0
    ) -> None:
        self.opened = opened
        self.reader = reader or BlockReader(opened)
        self.num_threads = num_threads or min(4, 2 * (os.cpu_count() or 1))

    def read(self, tensor: TensorSpec, box: Box | None = None) -> Array:
        """Return one box (None: all) of a tensor, in the `RAW` type of its item size."""
        part = box or whole(tensor.shape)
        return self.read_many([Slice(tensor, (part,))])[0].reshape(part.lengths)

    def read_many(self, slices: Sequence[Slice]) -> list[Array]:
        """Return [volume] elements of each slice, in the order of its boxes."""
        arrays = [
            np.zeros(sum(box.volume for box in part.boxes), RAW[ITEM_BYTES[part.tensor.dtype]])
            for part in slices
        ]
        items = [LocalItem(part.tensor, part.boxes) for part in slices]
        metadata = self.opened.metadata
        mine = match(metadata, Columns.from_items(items))
        reads = assemble(metadata, share_reads(metadata, [mine]).part(0), mine)
        targets = numpy_targets(arrays, [part.boxes for part in slices])
        pool = ReadPool(self.reader, reads, targets, Recorder(0, "load"))
        pool.start(self.num_threads)
        pool.finish()
        return arrays
