"""The records of a checkpoint: what one rank holds, and what lies where in the store.

Deliberately without torch, files and ranks: bytes on disk are the business of `metafile.py`, the
choice of who writes what of `plan/`.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (tensor, basic and byte metadata).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from planish.checkpoint.format.geometry import I64, Box, BoxIndex
from planish.checkpoint.format.tables import TensorSpec, TensorTable

if TYPE_CHECKING:
    import torch

U32 = NDArray[np.uint32]
"""Checksums."""
KINDS = ("model", "optim", "extra")
"""What a tensor belongs to."""


@dataclass(slots=True)
class LocalItem:
    """One local value of a rank: source of a save, destination of a load.

    Replicas are items of different ranks with equal tensor and equal boxes. Boxes that overlap
    without being equal are refused when a save is planned.

    Example:
        >>> spec = TensorSpec("main", "model", "model.bias", "F32", (4,))
        >>> LocalItem(spec, (Box((0,), (2,)),)).volume
        2
    """

    tensor: TensorSpec
    """Of which tensor."""
    boxes: tuple[Box, ...]
    """Consecutive row-major pieces: one box for a regular shard, several for a flat slice."""
    data: torch.Tensor | None = None
    """Shape of the single box, any strides; or 1-D contiguous of the summed volume, in the order
    of the boxes. None in simulations."""

    @property
    def volume(self) -> int:
        """Number of elements."""
        return sum(box.volume for box in self.boxes)


class DescribedItems(Sequence[LocalItem]):
    """Items that are put together when they are asked for: a rank writes few of its replicas.

    Example:
        >>> spec = TensorSpec("main", "model", "model.bias", "F32", (4,))
        >>> DescribedItems([spec], [(Box((0,), (4,)),)], [None])[0].volume
        4
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        boxes: Sequence[tuple[Box, ...]],
        data: Sequence[torch.Tensor | None],
    ) -> None:
        """Take the fields of all items, each in their order."""
        self._columns = tensors, boxes, data

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> LocalItem: ...

    @overload
    def __getitem__(self, index: slice) -> DescribedItems: ...

    def __getitem__(self, index: int | slice) -> LocalItem | DescribedItems:
        """Return an item, or some of them."""
        tensors, boxes, data = self._columns
        if isinstance(index, slice):
            return DescribedItems(tensors[index], boxes[index], data[index])
        return LocalItem(tensors[index], boxes[index], data[index])


@dataclass
class Collected:
    """What an adapter finds in one role's state on this rank."""

    items: Sequence[LocalItem]
    """Tensors, model and optimizer."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Small values equal on all ranks; written once for the role."""
    own: dict[str, Any] = field(default_factory=dict)
    """Small values of this rank alone: generators' states."""
    loader: Any = None
    """`loader_state.LoaderState` of ranks that read data, else None."""
    facts: dict[str, Any] = field(default_factory=dict)
    """JSON that a load needs before it plans (`aliases` of tied weights); rank 0's counts."""
    description: object | None = None
    """The same object for items that differ in values alone; None where that is not known."""


@dataclass(frozen=True)
class Columns:
    """The items of one rank as arrays, without their data.

    Row i of the item columns is `items[i]` of the list that `from_items` took; boxes without
    elements are dropped, so an item may have no box.

    Example:
        >>> spec = TensorSpec("main", "model", "model.bias", "F32", (4,))
        >>> columns = Columns.from_items([LocalItem(spec, (Box((1,), (3,)),))])
        >>> columns.offsets.tolist(), columns.box_tensor.tolist(), columns.tensors.fqns
        ([[1]], [0], ('model.bias',))
    """

    tensors: TensorTable
    """The tensors that the items belong to, in order of first appearance."""
    item_tensor: I64
    """[i], row of `tensors`."""
    item_starts: I64
    """[i + 1], the boxes of item i are rows `item_starts[i] : item_starts[i + 1]`."""
    offsets: I64
    """[b, n], n = `tensors.max_dims`; padded with 0."""
    lengths: I64
    """[b, n], at least 1; padded with 1."""
    context: str = ""
    """What else two saves must share to share a plan (adapter, group, versions); opaque here."""

    @classmethod
    def from_items(cls, items: Sequence[LocalItem], *, context: str = "") -> Columns:
        """Turn the items of one rank into columns.

        Raises:
            LayoutMismatch: two items name one tensor with different types or shapes, or a box has
                another number of dimensions than its tensor.
        """
        tensors, rows = TensorTable.from_specs([item.tensor for item in items])
        held = [item.boxes for item in items]
        counts = np.fromiter(map(len, held), np.int64, len(items))
        boxes = list(chain.from_iterable(held))
        owners = np.repeat(rows, counts)
        offsets = tensors.pad([box[0] for box in boxes], owners, 0)
        lengths = tensors.pad([box[1] for box in boxes], owners, 1)
        full = (lengths > 0).all(axis=1)
        if not full.all():
            item_of = np.repeat(np.arange(len(items)), counts)[full]
            counts = np.bincount(item_of, minlength=len(items))
            offsets, lengths = offsets[full], lengths[full]
        starts = np.zeros(len(items) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        return cls(tensors, rows, starts, offsets, lengths, context)

    @property
    def box_item(self) -> I64:
        """[b], the item of each box."""
        return np.repeat(np.arange(len(self.item_tensor)), np.diff(self.item_starts))

    @property
    def box_tensor(self) -> I64:
        """[b], the tensor of each box."""
        return np.repeat(self.item_tensor, np.diff(self.item_starts))

    def boxes(self, item: int) -> tuple[Box, ...]:
        """Return the boxes of an item."""
        dims = int(self.tensors.dims[self.item_tensor[item]])
        rows = range(int(self.item_starts[item]), int(self.item_starts[item + 1]))
        return tuple(
            Box(
                tuple(self.offsets[row, :dims].tolist()),
                tuple(self.lengths[row, :dims].tolist()),
            )
            for row in rows
        )

    def encode(self) -> bytes:
        """Return the columns as bytes; equal columns give equal bytes."""
        from planish.checkpoint.format import columns_codec

        return columns_codec.encode_columns(self)

    @classmethod
    def decode(cls, data: bytes) -> Columns:
        """Read what `encode` wrote.

        Raises:
            PlanMismatch: the bytes are not columns of this version.
        """
        from planish.checkpoint.format import columns_codec

        return columns_codec.decode_columns(data)

    def signature(self) -> bytes:
        """Return 32 bytes that differ when anything but the data differs."""
        from planish.checkpoint.format import columns_codec

        return columns_codec.signature(self)


@dataclass
class FileTable:
    """The objects of a checkpoint.

    Example:
        >>> table = FileTable()
        >>> table.add("data/main.model/00000-0.safetensors", 2 << 20, algorithm="crc32c")
        0
        >>> table.num_blocks(0), len(table.crcs[0])
        (2, 0)
    """

    keys: list[str] = field(default_factory=list)
    """Relative to the attempt's folder."""
    sizes: list[int] = field(default_factory=list)
    """Bytes."""
    algorithms: list[str] = field(default_factory=list)
    """Checksum of each file: a key of `integrity.ALGORITHMS`."""
    crcs: list[U32] = field(default_factory=list)
    """Checksum of each block of 1 MiB; [0] while the file has not been written."""

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.keys)

    def add(self, key: str, size: int, *, algorithm: str, crcs: U32 | None = None) -> int:
        """Append a file and return its row."""
        self.keys.append(key)
        self.sizes.append(size)
        self.algorithms.append(algorithm)
        self.crcs.append(np.zeros(0, np.uint32) if crcs is None else crcs)
        return len(self.keys) - 1

    def num_blocks(self, row: int) -> int:
        """Return how many checksums a file has."""
        return -(-self.sizes[row] // (1 << 20))


@dataclass(frozen=True)
class Shards:
    """The stored boxes of all tensors.

    Example:
        >>> one = np.ones((1, 1), np.int64)
        >>> Shards(one[0], one[0], one[0], one[0], one, one).num_shards
        1
    """

    tensor: I64
    """[k], row of the tensor table."""
    file: I64
    """[k], row of the file table."""
    start: I64
    """[k], first byte in the file."""
    nbytes: I64
    """[k], the box's elements in row-major order."""
    offsets: I64
    """[k, n], padded with 0."""
    lengths: I64
    """[k, n], padded with 1."""

    @property
    def num_shards(self) -> int:
        """Number of stored boxes."""
        return len(self.tensor)


@dataclass
class Metadata:
    """All of a checkpoint but its data: the content of `meta/global.bin`.

    Example:
        >>> tensors, _ = TensorTable.from_specs([TensorSpec("main", "model", "w", "F32", (2, 2))])
        >>> zero, shape = np.zeros(1, np.int64), np.full((1, 2), 2)
        >>> shards = Shards(zero, zero, zero + 128, zero + 16, np.zeros((1, 2), np.int64), shape)
        >>> files = FileTable(["data/main.model/00000-0.safetensors"], [144], ["crc32c"], [])
        >>> metadata = Metadata({"step": 3}, tensors, files, shards)
        >>> metadata.tensor_ids["main", "model", "w"], metadata.shards_of(0).tolist()
        (0, [0])
    """

    header: dict[str, Any]
    """JSON: step, roles, layout, parents, attributes, versions. No time, no attempt, no process:
    equal states give equal bytes."""
    tensors: TensorTable
    """Every tensor of every role."""
    files: FileTable
    """Data, extra and loader objects."""
    shards: Shards
    """Which box lies where."""
    objects: dict[str, Any] = field(default_factory=dict)
    """JSON, by role: keys of the shared extra file, the ranks' own ones, the loader's."""

    @property
    def tensor_ids(self) -> dict[tuple[str, str, str], int]:
        """(role, kind, fqn) -> row of `tensors`."""
        return self.tensors.ids

    def shards_of(self, tensor: int) -> I64:
        """Return, ascending, the rows of `shards` that belong to a tensor."""
        order, bounds = self._by_tensor
        return order[bounds[tensor] : bounds[tensor + 1]]

    def boxes_of(self, tensor: int) -> tuple[BoxIndex, I64]:
        """Return an index of a tensor's stored boxes, and the rows of `shards` it numbers."""
        rows = self.shards_of(tensor)
        dims = int(self.tensors.dims[tensor])
        return BoxIndex(self.shards.offsets[rows, :dims], self.shards.lengths[rows, :dims]), rows

    @functools.cached_property
    def _by_tensor(self) -> tuple[I64, I64]:
        order = np.argsort(self.shards.tensor, kind="stable").astype(np.int64)
        bounds = np.searchsorted(
            self.shards.tensor[order], np.arange(len(self.tensors) + 1)
        ).astype(np.int64)
        return order, bounds
