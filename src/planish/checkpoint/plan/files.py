"""Result of planning a save: the files of each rank, their headers, and the place of every shard.

A data file is a safetensors file with one entry for each stored box, named by tensor, offsets and
lengths. The plan needs only the size of a header; each rank writes the text of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from planish.checkpoint.format.geometry import (
    I64,
    before,
    order_by,
    ranges,
    run_sums,
    strides_of,
    volumes,
)
from planish.checkpoint.format.items import (
    ITEM_BYTES,
    Columns,
    TensorTable,
    pack_columns,
    unpack_columns,
)
from planish.checkpoint.format.metafile import FileTable, Metadata, Shards
from planish.checkpoint.format.safetensors_file import (
    ALIGNMENT,
    NewEntry,
    plan_header,
    quote_fqn,
)

PAGE = 4096
"""Alignment of files in a staging buffer, bytes."""
_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)


class Rows(NamedTuple):
    """The entries of one or more headers: [b] boxes, their sides [b, n] padded with 0 and 1.

    Bytes `start` to `stop` are counted from the end of the header.
    """

    tensor: I64
    dims: I64
    offsets: I64
    lengths: I64
    start: I64
    stop: I64


def header(names: Sequence[str], dtypes: Sequence[str], rows: Rows) -> bytes:
    """Return the beginning of a file: length word, JSON and padding; `names` are quoted."""
    entries = []
    columns = (column.tolist() for column in rows[:4])
    for tensor, dims, offsets, lengths in zip(*columns, strict=True):
        box = f"{','.join(map(str, offsets[:dims]))}|{','.join(map(str, lengths[:dims]))}"
        entries.append(NewEntry(f"{names[tensor]}|{box}", dtypes[tensor], tuple(lengths[:dims])))
    return plan_header(entries)[0]


def header_sizes(names: Sequence[str], dtypes: Sequence[str], rows: Rows, files: I64) -> I64:
    """Return [f]: sizes of the headers that `header` writes; file f begins at row `files[f]`."""
    fixed = {dtype: _fixed(dtype) for dtype in dict.fromkeys(dtypes)}
    lengths = np.array([len(name) for name in names], np.int64)
    scalar, sided = np.array([fixed[dtype] for dtype in dtypes], np.int64).reshape(-1, 2).T
    size = np.where(rows.dims == 0, scalar[rows.tensor], sided[rows.tensor]) + 1
    size += lengths[rows.tensor] + digits(rows.start) + digits(rows.stop)
    size += 3 * np.maximum(rows.dims - 1, 0)
    for dim in range(rows.offsets.shape[1]):
        count = digits(rows.offsets[:, dim]) + 2 * digits(rows.lengths[:, dim])
        size += np.where(rows.dims > dim, count, 0)
    # Add the length word and two braces; there is one comma less than entries.
    total = run_sums(size, files) + 8 + 2 - 1
    return np.asarray(-(-total // ALIGNMENT) * ALIGNMENT)


def _fixed(dtype: str) -> tuple[int, int]:
    """Return the length of an entry without name and numbers: for a scalar, and for other boxes."""
    known = len("{}") + len(f"0{ITEM_BYTES[dtype]}")
    scalar, sided = (
        len(plan_header([NewEntry(name, dtype, shape)])[0][8:].rstrip()) - known
        for name, shape in (("||", ()), ("|0|1", (1,)))
    )
    return scalar, sided - 3


def digits(values: I64) -> I64:
    """Return the number of decimal digits of non-negative numbers."""
    return np.searchsorted(_POWERS, values, side="right").astype(np.int64) + 1


@dataclass(frozen=True)
class FilePlan:
    """One safetensors file that a rank writes; nothing lies between header and entries."""

    key: str
    """`data/<role>.<kind>/<rank>-<k>.safetensors`, relative to the folder of the attempt."""
    header: bytes
    size: int
    items: I64
    """[e], the rank's item that has each entry."""
    starts: I64
    """[e], first byte of the entry in the item's row-major bytes (box after box)."""
    stops: I64
    offsets: I64
    """[e], first byte of the entry in the file, ascending and without gaps."""


@dataclass(frozen=True)
class RankPlan:
    """Files that one rank writes."""

    rank: int
    files: tuple[FilePlan, ...]
    """Files by role, kind and number; () if other ranks write all of this rank's items."""

    @functools.cached_property
    def starts(self) -> list[int]:
        """First byte of each file in a staging buffer, in which the files follow each other."""
        starts: list[int] = (before(self._pages) * PAGE).tolist()
        return starts

    @functools.cached_property
    def size(self) -> int:
        """Bytes of all files in a staging buffer."""
        return int(self._pages.sum()) * PAGE

    @property
    def _pages(self) -> I64:
        return np.array([-(-file.size // PAGE) for file in self.files], np.int64)

    @classmethod
    def decode(cls, data: bytes, columns: Columns) -> RankPlan:
        """Undo `GlobalPlan.wire`; `columns` are those of this rank in the plan."""
        head, entries = unpack_columns(data)
        names = [quote_fqn(name) for name in columns.tensors.fqns]
        files = []
        for key, low, high in head["files"]:
            items, starts, stops = (column[low:high] for column in entries.values())
            rows = entry_rows(columns, items, starts, stops)
            text = header(names, columns.tensors.dtypes, rows)
            nbytes = stops - starts
            size, offsets = len(text) + int(nbytes.sum()), len(text) + before(nbytes)
            files.append(FilePlan(key, text, size, items, starts, stops, offsets))
        return cls(head["rank"], tuple(files))


def entry_rows(columns: Columns, items: I64, starts: I64, stops: I64) -> Rows:
    """Return the boxes of entries: all boxes of an item, or a part of one box."""
    counts = np.diff(columns.item_starts)[items]
    rows = ranges(columns.item_starts[items], counts)
    entry = np.repeat(np.arange(len(items)), counts)
    tensor = columns.item_tensor[items][entry]
    offsets, lengths = columns.offsets[rows], columns.lengths[rows]
    width = columns.tensors.item_bytes[tensor]
    nbytes = volumes(lengths) * width
    behind = before(nbytes)
    low = behind - behind[before(counts)][entry] if len(entry) else behind
    # Intersect each box with the entry's range, in bytes of the box.
    first = np.maximum(starts[entry] - low, 0)
    last = np.minimum(stops[entry] - low, nbytes)
    kept = np.flatnonzero(last > first)
    part = kept[(last - first)[kept] < nbytes[kept]]
    for dim in range(lengths.shape[1]):
        line = strides_of(lengths[part])[:, dim] * width[part]
        here = ((first[part] % line) == 0) & ((last[part] % line) == 0)
        here &= (lengths[part, :dim] == 1).all(axis=1) & (lengths[part, dim] > 1)
        cut = part[here]
        offsets[cut, dim] += first[cut] // line[here]
        lengths[cut, dim] = (last - first)[cut] // line[here]
        part = part[~here]
    size = volumes(lengths[kept]) * width[kept]
    begin = before(size)
    dims = columns.tensors.dims[tensor[kept]]
    return Rows(tensor[kept], dims, offsets[kept], lengths[kept], begin, begin + size)


@dataclass(frozen=True)
class GlobalPlan:
    """Files of all ranks as columns: entries file by file, files rank by rank.

    Equal columns of all ranks give equal plans, byte by byte.
    """

    ranks: int
    tensors: TensorTable
    keys: tuple[str, ...]
    """[f], keys relative to the folder of the attempt."""
    sizes: I64
    headers: I64
    """[f], bytes of the header alone."""
    rank_files: I64
    """[ranks + 1], files of rank r are rows `rank_files[r] : rank_files[r + 1]`."""
    file_entries: I64
    """[f + 1], entries of file f are rows `file_entries[f] : file_entries[f + 1]`."""
    items: I64
    """[e], the writing rank's item."""
    starts: I64
    """[e], first byte in the item's row-major bytes."""
    stops: I64
    file_boxes: I64
    """[f + 1], boxes of file f are rows `file_boxes[f] : file_boxes[f + 1]`."""
    boxes: Rows
    """All stored boxes, file by file; their bytes count from the end of the file's header."""

    def wire(self, rank: int) -> bytes:
        """Return the plan of one rank as bytes, without headers: the rank computes them."""
        first, last = self.rank_files[rank : rank + 2].tolist()
        bounds = self.file_entries[first : last + 1]
        low, high = int(bounds[0]), int(bounds[-1])
        ends = (bounds - low).tolist()
        files = list(zip(self.keys[first:last], ends, ends[1:], strict=False))
        columns = {"items": self.items, "starts": self.starts, "stops": self.stops}
        return pack_columns(
            {"rank": rank, "files": files}, {name: c[low:high] for name, c in columns.items()}
        )

    def metadata(self, header: Mapping[str, Any], *, algorithm: str = "crc32c") -> Metadata:
        """Return the metadata of the checkpoint, without the checksums of the files."""
        count = len(self.keys)
        files = FileTable(
            list(self.keys),
            self.sizes.tolist(),
            [algorithm] * count,
            [np.zeros(0, np.uint32)] * count,
        )
        return Metadata(dict(header), self.tensors, files, self._shards)

    @functools.cached_property
    def _shards(self) -> Shards:
        """The stored boxes, ascending by tensor and by place in the tensor."""
        boxes = self.boxes
        place = np.einsum("kn,kn->k", boxes.offsets, strides_of(self.tensors.shapes)[boxes.tensor])
        order = order_by(boxes.tensor, place)
        file = np.repeat(np.arange(len(self.keys)), np.diff(self.file_boxes))
        start = boxes.start + self.headers[file]
        return Shards(
            boxes.tensor[order],
            file[order],
            start[order],
            (boxes.stop - boxes.start)[order],
            boxes.offsets[order],
            boxes.lengths[order],
        )
