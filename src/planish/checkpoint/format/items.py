"""What one rank holds: its tensors as items, and the same items as columns without their data.

A save takes items as its source, a load fills them. Columns are what ranks send each other to plan.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (tensor, basic and byte metadata).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from planish.base.errors import PlanMismatch
from planish.checkpoint.format.geometry import I64, Box
from planish.checkpoint.format.packing import (
    PackFault,
    column_of,
    pack,
    pack_ragged,
    signed,
    unpack,
    unpack_ragged,
)
from planish.checkpoint.format.tables import TensorSpec, TensorTable, read_table, table_columns

if TYPE_CHECKING:
    import torch

Finish = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
"""(shared, own) of the checkpoint -> nothing; puts loaded values into the state."""
_MAGIC = b"PLNSHCOL"
_VERSION = 1
_MAX_PADDING = 16
"""Padded sides of boxes, per byte of the columns of a rank."""


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
    finish: list[Finish] = field(default_factory=list)
    """What ends a load, in this order, once every item has been filled."""
    report: dict[str, str] = field(default_factory=dict)
    """Filled by `finish`: whether parts are exact (`rng` is exact, reseeded or absent)."""


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
        head, packed = table_columns(self.tensors)
        dims = self.tensors.dims[self.box_tensor]
        packed |= {
            "item.tensor": self.item_tensor,
            "item.boxes": np.diff(self.item_starts),
            **pack_ragged("box.offset", self.offsets, dims),
            **pack_ragged("box.length", self.lengths, dims),
        }
        return pack(_MAGIC, _VERSION, head | {"context": self.context}, packed)

    @classmethod
    def decode(cls, data: bytes, known: dict[bytes, TensorTable] | None = None) -> Columns:
        """Read what `encode` wrote.

        Args:
            data: The columns of one rank.
            known: Tables by their bytes, which this call may use and add to: ranks that hold the
                same tensors then share one table.

        Raises:
            PlanMismatch: the bytes are not columns of this version.
        """
        try:
            head, columns = unpack(data, _MAGIC, _VERSION)
            known = {} if known is None else known
            # Bytes that are equal only for equal tables.
            parts = [repr([head.get(name) for name in ("roles", "kinds", "dtypes")]).encode()]
            for name, column in columns.items():
                if name.startswith("tensor."):
                    parts += [f"|{name}:{column.itemsize}x{len(column)}|".encode()]
                    parts += [column.tobytes()]
            key = b"".join(parts)
            table = known.get(key) or known.setdefault(key, read_table(head, columns))
            rows = signed(column_of(columns, "item.tensor"))
            counts = signed(column_of(columns, "item.boxes", len(rows)))
            if len(rows) and int(rows.max()) >= len(table):
                raise PackFault(f"item of tensor {int(rows.max())} of {len(table)}")
            if len(counts) and int(counts.max()) > len(data):
                raise PackFault(f"item of {int(counts.max())} boxes")
            starts = np.zeros(len(rows) + 1, np.int64)
            np.cumsum(counts, out=starts[1:])
            # A box has at least a byte in every column of its dimensions; padding must not swell
            # it.
            if int(starts[-1]) * max(table.max_dims, 1) > _MAX_PADDING * len(data):
                raise PackFault(f"{starts[-1]} boxes of {table.max_dims} dimensions")
            dims = table.dims[np.repeat(rows, counts)]
            boxes = {
                name: unpack_ragged(f"box.{name}", columns, dims, width=table.max_dims, fill=fill)
                for name, fill in (("offset", 0), ("length", 1))
            }
            context = head.get("context")
            if not isinstance(context, str):
                raise PackFault(f"`context` must be a text, got {context!r:.80}")
        except PackFault as fault:
            raise PlanMismatch(
                f"the columns of a rank: {fault}; all ranks must run one version of this program"
            ) from fault
        return cls(table, rows, starts, boxes["offset"], boxes["length"], context)

    def signature(self) -> bytes:
        """Return 32 bytes that differ when anything but the data differs."""
        return hashlib.sha256(self.encode()).digest()
