"""Tensor tables and the columns of a rank as bytes, and the signature of a rank's plan."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from planish.base.errors import PlanMismatch
from planish.checkpoint.format.geometry import I64
from planish.checkpoint.format.packing import (
    PackFault,
    Unsigned,
    pack,
    pack_choices,
    pack_ragged,
    pack_texts,
    signed,
    unpack,
    unpack_choices,
    unpack_ragged,
    unpack_texts,
)
from planish.checkpoint.format.records import Columns
from planish.checkpoint.format.tables import ITEM_BYTES, MAX_DIMS, TensorTable

_MAGIC = b"PLNSHCOL"
_VERSION = 1
_MAX_PADDING = 16
"""Padded sides of boxes, per byte of the columns of a rank."""


def table_columns(table: TensorTable) -> tuple[dict[str, Any], dict[str, I64 | bytes]]:
    """Return a tensor table as a head and columns for `packing.pack`."""
    count = len(table)
    roles, role = pack_choices(table.roles, count)
    kinds, kind = pack_choices(table.kinds, count)
    dtypes, dtype = pack_choices(table.dtypes, count)
    sizes, names = pack_texts(table.fqns)
    return {"roles": roles, "kinds": kinds, "dtypes": dtypes}, {
        "tensor.role": role,
        "tensor.kind": kind,
        "tensor.dtype": dtype,
        "tensor.dims": table.dims,
        **pack_ragged("tensor.shape", table.shapes, table.dims),
        "tensor.name_size": sizes,
        "tensor.names": names,
    }


def read_table(head: Mapping[str, Any], columns: Mapping[str, Unsigned]) -> TensorTable:
    """Read what `table_columns` wrote.

    Raises:
        PackFault: anything that `table_columns` would not write.
    """
    dims = signed(column_of(columns, "tensor.dims"))
    count = len(dims)
    width = int(dims.max(initial=0))
    if width > MAX_DIMS:
        raise PackFault(f"a tensor must have at most {MAX_DIMS} dimensions, got {width}")
    shapes = unpack_ragged("tensor.shape", columns, dims, width=width, fill=1)
    choices = {
        name: unpack_choices(head.get(f"{name}s"), column_of(columns, f"tensor.{name}", count))
        for name in ("role", "kind", "dtype")
    }
    unknown = set(choices["dtype"]) - ITEM_BYTES.keys()
    if unknown:
        raise PackFault(f"unknown type of tensors {sorted(unknown)!r:.80}")
    names = unpack_texts(
        column_of(columns, "tensor.name_size", count), column_of(columns, "tensor.names")
    )
    table = TensorTable(
        choices["role"], choices["kind"], tuple(names), choices["dtype"], dims, shapes
    )
    if len(table.ids) != count:
        raise PackFault("a tensor appears twice")
    return table


def column_of(columns: Mapping[str, Unsigned], name: str, count: int = -1) -> Unsigned:
    """Return a column that must be there, with `count` values unless -1."""
    column = columns.get(name)
    if column is None or count not in {-1, len(column)}:
        seen = "none" if column is None else len(column)
        raise PackFault(f"column `{name}` must have {max(count, 0)} values, got {seen}")
    return column


def encode_columns(columns: Columns) -> bytes:
    """Return the columns of a rank as bytes; equal columns give equal bytes."""
    head, packed = table_columns(columns.tensors)
    dims = columns.tensors.dims[columns.box_tensor]
    packed |= {
        "item.tensor": columns.item_tensor,
        "item.boxes": np.diff(columns.item_starts),
        **pack_ragged("box.offset", columns.offsets, dims),
        **pack_ragged("box.length", columns.lengths, dims),
    }
    return pack(_MAGIC, _VERSION, head | {"context": columns.context}, packed)


def decode_columns(data: bytes, known: dict[bytes, TensorTable] | None = None) -> Columns:
    """Read what `encode_columns` wrote.

    Args:
        data: The columns of one rank.
        known: Tables by their bytes, which this call may use and add to: ranks that hold the same
            tensors then share one table.

    Raises:
        PlanMismatch: the bytes are not columns of this version.
    """
    try:
        head, columns = unpack(data, _MAGIC, _VERSION)
        known = {} if known is None else known
        key = _table_key(head, columns)
        table = known.get(key) or known.setdefault(key, read_table(head, columns))
        rows = signed(column_of(columns, "item.tensor"))
        counts = signed(column_of(columns, "item.boxes", len(rows)))
        if len(rows) and int(rows.max()) >= len(table):
            raise PackFault(f"item of tensor {int(rows.max())} of {len(table)}")
        if len(counts) and int(counts.max()) > len(data):
            raise PackFault(f"item of {int(counts.max())} boxes")
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        # A box has at least a byte in every column of its dimensions; padding must not swell it.
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
    return Columns(table, rows, starts, boxes["offset"], boxes["length"], context)


def _table_key(head: Mapping[str, Any], columns: Mapping[str, Unsigned]) -> bytes:
    """Return bytes that are equal only for equal tables."""
    parts = [repr([head.get(f"{name}s") for name in ("role", "kind", "dtype")]).encode()]
    for name, column in columns.items():
        if name.startswith("tensor."):
            parts += [f"|{name}:{column.itemsize}x{len(column)}|".encode(), column.tobytes()]
    return b"".join(parts)


def signature(columns: Columns) -> bytes:
    """Return 32 bytes that differ when anything but the data differs."""
    return hashlib.sha256(encode_columns(columns)).digest()
