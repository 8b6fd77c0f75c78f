"""From what a rank wants to the stored pieces it consists of.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3 (local load plan of one rank).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planish.base.errors import LayoutMismatch, MissingKeys, ShapeMismatch
from planish.checkpoint.format.geometry import I64
from planish.checkpoint.format.records import Columns, LocalItem, Metadata
from planish.checkpoint.plan.cover import cover_faults
from planish.checkpoint.plan.gather import told_box
from planish.checkpoint.plan.lookup import ShardIndex, fit
from planish.checkpoint.plan.ordering import ranges
from planish.checkpoint.plan.reads import LocalReads
from planish.checkpoint.plan.tiling import untiled


def match(
    metadata: Metadata,
    items: Columns | Sequence[LocalItem],
    *,
    rows: I64 | None = None,
    index: ShardIndex | None = None,
) -> LocalReads:
    """Find the stored pieces of every wanted box; types are not looked at.

    Args:
        metadata: Of the checkpoint.
        items: What one rank wants.
        rows: [t], row of `metadata.tensors` for each tensor of the columns, -1: leave its items
            out. None: found by role, kind and name.
        index: Of `metadata`, where several calls share it.

    Returns:
        One row for each wanted box and stored shard that share elements, ascending by item, box
        and shard; together exactly the wanted boxes.

    Raises:
        MissingKeys: the checkpoint lacks tensors (`rows` is None); all are listed.
        ShapeMismatch: tensors have another shape in the checkpoint; all are listed.
        LayoutMismatch: wanted elements are not stored, or stored twice; all boxes are listed.
    """
    wanted = items if isinstance(items, Columns) else Columns.from_items(items)
    rows = _rows(metadata, wanted) if rows is None else rows
    _refuse_shapes(metadata, wanted, rows)
    index = ShardIndex(metadata) if index is None else index
    owner = wanted.box_tensor
    kept = np.flatnonzero(rows[owner] >= 0) if len(owner) else owner
    tensor = rows[owner[kept]]
    offsets = fit(wanted.offsets[kept], index.width, 0)
    lengths = fit(wanted.lengths[kept], index.width, 1)
    limits = fit(metadata.tensors.shapes, index.width, 1)[tensor]
    outside = ((offsets < 0) | (offsets > limits - lengths)).any(axis=1)
    if outside.any():
        told = [
            f"`{wanted.tensors.fqns[owner[kept[row]]]}`: "
            + _told(wanted, int(kept[row]), offsets[row], lengths[row])
            for row in np.flatnonzero(outside)
        ]
        raise LayoutMismatch(
            "wanted boxes must lie inside of their tensors, got\n  " + "\n  ".join(told)
        )
    box, shard, lower, extent = index.meeting(tensor, offsets, lengths)
    _refuse_gaps(wanted, kept, (offsets, lengths), (box, lower, extent))
    item = wanted.box_item
    number = ranges(np.zeros(len(wanted.item_tensor), np.int64), np.diff(wanted.item_starts))
    return LocalReads(item[kept][box], number[kept][box], shard, lower, extent, offsets[box])


def _rows(metadata: Metadata, wanted: Columns) -> I64:
    """Return [t]: the row in the metadata of each wanted tensor."""
    known = metadata.tensor_ids
    missing = [name for name in wanted.tensors.ids if name not in known]
    if missing:
        told = "\n  ".join(f"`{fqn}` ({role} {kind})" for role, kind, fqn in missing)
        raise MissingKeys(
            f"the checkpoint must hold every wanted tensor, it lacks {len(missing)}:\n  {told}"
        )
    return np.array([known[name] for name in wanted.tensors.ids], np.int64)


def _refuse_shapes(metadata: Metadata, wanted: Columns, rows: I64) -> None:
    told = []
    for mine in np.flatnonzero(rows >= 0).tolist():
        row = int(rows[mine])
        dims = int(wanted.tensors.dims[mine])
        if dims != metadata.tensors.dims[row] or (
            (wanted.tensors.shapes[mine, :dims] != metadata.tensors.shapes[row, :dims]).any()
        ):
            here, there = wanted.tensors.spec(mine), metadata.tensors.spec(row)
            told.append(f"`{here.fqn}`: {there.shape} in the checkpoint, {here.shape} wanted")
    if told:
        raise ShapeMismatch(
            "tensors must have the shape they were saved with, got\n  "
            + "\n  ".join(told)
            + "\nload into the model that was saved"
        )


def _refuse_gaps(
    wanted: Columns, kept: I64, boxes: tuple[I64, I64], pieces: tuple[I64, I64, I64]
) -> None:
    """Refuse wanted boxes that the stored pieces do not fill exactly, once each."""
    offsets, lengths = boxes
    box, lower, extent = pieces
    inside = lower - offsets[box]
    suspects = untiled(lengths, box, inside, extent)
    if not len(suspects):
        return
    dense = np.full(len(lengths), -1, np.int64)
    dense[suspects] = np.arange(len(suspects))
    mine = np.flatnonzero(dense[box] >= 0)
    tensors = wanted.box_tensor[kept[suspects]]
    faults = cover_faults(
        lengths[suspects],
        dense[box[mine]],
        inside[mine],
        extent[mine],
        dims=wanted.tensors.dims[tensors],
    )
    if faults:
        told = []
        for number, fault in sorted(faults.items()):
            row = int(suspects[number])
            name = wanted.tensors.fqns[int(tensors[number])]
            where = _told(wanted, int(kept[row]), offsets[row], lengths[row])
            told.append(f"`{name}` {where}, counted from its corner: {fault}")
        raise LayoutMismatch(
            "every wanted element must be stored exactly once, got\n  " + "\n  ".join(told)
        )


def _told(wanted: Columns, box: int, offsets: I64, lengths: I64) -> str:
    return told_box(offsets, lengths, int(wanted.tensors.dims[wanted.box_tensor[box]]))
