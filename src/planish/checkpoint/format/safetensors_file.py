"""Headers of safetensors files: planned before any bytes are copied, and parsed without trust.

A file is a length word, a JSON header, and the entries' bytes without gaps: any safetensors library
reads it. An entry is one box of a tensor; its name is `<fqn>|<offsets>|<lengths>`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.format.geometry import I64, Box, Sides
from planish.checkpoint.format.items import ITEM_BYTES, MAX_DIMS
from planish.checkpoint.format.strict_json import FormatFault, are_counts, dump_json, load_json

MAX_HEADER_BYTES = 100_000_000
"""Largest header that safetensors libraries accept."""
ALIGNMENT = 64
"""The first entry begins at a multiple of it, bytes; entries sorted by item size stay aligned."""

_LENGTH = struct.Struct("<Q")
_STORED = {
    "C64": ("F32", 2), "C128": ("F64", 2), "F8_E4M3FNUZ": ("U8", 1), "F8_E5M2FNUZ": ("U8", 1),
}  # fmt: skip
"""Types that readers of safetensors may not know -> (the type to store, values per element)."""
_PLAIN = re.compile(r"[A-Za-z0-9_.\-/:@+=()\[\] ]*")
_PRINTED = re.compile(r"[ !#-\[\]-~]*")
"""Characters that JSON does not escape."""
_SAFE = "_.-/:@+=()[] "


class NewEntry(NamedTuple):
    """One box to be written."""

    name: str
    dtype: str
    """Key of `ITEM_BYTES`: the type of the tensor, not of its storage."""
    shape: Sides

    @property
    def nbytes(self) -> int:
        """Number of bytes of the box."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class StoredEntry(NamedTuple):
    """One entry as the header of a file describes it."""

    dtype: str
    shape: Sides
    start: int
    stop: int


def quote_fqn(fqn: str) -> str:
    """Return a name with percent codes for characters that have a meaning in entry names, keys."""
    return fqn if _PLAIN.fullmatch(fqn) else quote(fqn, safe=_SAFE, errors="surrogatepass")


def entry_name(fqn: str, box: Box) -> str:
    """Return the name of a box of a tensor inside its file: `w|0,2|1,4`, or `step||` (scalar)."""
    sides = ",".join(map(str, box.offsets)), ",".join(map(str, box.lengths))
    return f"{quote_fqn(fqn)}|{sides[0]}|{sides[1]}"


def plan_header(
    entries: Sequence[NewEntry],
    *,
    notes: Mapping[str, str] | None = None,
    alignment: int = ALIGNMENT,
) -> tuple[bytes, I64]:
    """Return the first bytes of a file, and [len(entries)] where each entry begins in it.

    Args:
        entries: in the order of their bytes; sorted by item size, 8, 4, 2, 1, they stay aligned.
        notes: `__metadata__` of the file, texts only.
        alignment: the first entry begins at a multiple of it.
    """
    forms = [entry[1:] for entry in entries]
    nbytes = {form: NewEntry("", *form).nbytes for form in set(forms)}
    sizes = np.fromiter(map(nbytes.__getitem__, forms), np.int64, len(entries))
    ends = np.cumsum(sizes)
    rows = [f'"__metadata__":{dump_json(dict(notes)).decode()}'] if notes else []
    # JSON does not escape most names.
    is_plain = _PRINTED.fullmatch("".join([entry.name for entry in entries]))
    forms_as_json = {}
    for dtype, shape in set(forms):
        kind, values = _STORED.get(dtype, (dtype, 1))
        sides = ",".join(map(str, shape if values == 1 else (*shape, values)))
        forms_as_json[dtype, shape] = f'"dtype":"{kind}","shape":[{sides}]'
    for entry, start, end in zip(entries, (ends - sizes).tolist(), ends.tolist(), strict=True):
        name = f'"{entry.name}"' if is_plain else dump_json(entry.name).decode()
        rows.append(f'{name}:{{{forms_as_json[entry[1:]]},"data_offsets":[{start},{end}]}}')
    text = ("{" + ",".join(rows) + "}").encode("ascii")
    size = -(-(len(text) + _LENGTH.size) // alignment) * alignment
    header = _LENGTH.pack(size - _LENGTH.size) + text.ljust(size - _LENGTH.size)
    return header, ends - sizes + size


def header_bytes(word: bytes, file_size: int, *, file: str = "") -> int:
    """Return the number of bytes that `parse_header` needs, from the first 8 bytes of a file."""
    if len(word) < _LENGTH.size or file_size < _LENGTH.size:
        raise _corrupt(file, f"must have at least {_LENGTH.size} bytes, got {file_size}")
    size: int = _LENGTH.unpack_from(word)[0]
    if size > min(MAX_HEADER_BYTES, file_size - _LENGTH.size):
        raise _corrupt(file, f"a header of {size} bytes does not fit into {file_size}")
    return _LENGTH.size + size


def read_header(
    read: Callable[[int], bytes], file_size: int, *, file: str
) -> dict[str, StoredEntry]:
    """Read and parse a header; `read(n)` returns the first n bytes. See `parse_header`."""
    size = header_bytes(read(min(_LENGTH.size, file_size)), file_size, file=file)
    return parse_header(read(size), file_size, file=file)


def parse_header(data: bytes, file_size: int, *, file: str = "") -> dict[str, StoredEntry]:
    """Return the entries of an untrusted file of `file_size` bytes, in order, from its header.

    Raises `CheckpointCorrupt` if the header is invalid or the entries do not fill the file exactly.
    """
    data_start = header_bytes(data[: _LENGTH.size], file_size, file=file)
    if len(data) < data_start:
        raise _corrupt(file, f"the header has {data_start} bytes, got {len(data)}")
    try:
        raw = load_json(data[_LENGTH.size : data_start])
        if not isinstance(raw, dict):
            raise FormatFault("the header must be an object")
        notes = raw.pop("__metadata__", {})
        if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
            raise FormatFault("`__metadata__` must hold texts")
        entries = {name: _entry(name, value, data_start) for name, value in raw.items()}
    except FormatFault as fault:
        raise _corrupt(file, str(fault)) from None
    ordered = dict(sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].stop)))
    end = data_start
    for name, entry in ordered.items():
        if entry.start != end:
            raise _corrupt(file, f"entry {name!r:.120} must begin at {end}, got {entry.start}")
        end = entry.stop
    if end != file_size:
        raise _corrupt(file, f"the entries end at {end}, the file at {file_size}")
    return ordered


def _entry(name: str, raw: Any, data_start: int) -> StoredEntry:
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatFault(f"entry {name!r:.120} must have dtype, shape and data_offsets")
    dtype, shape, places = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise FormatFault(f"entry {name!r:.120} has unknown type {dtype!r:.40}")
    lists = isinstance(shape, list) and isinstance(places, list)
    if not lists or not are_counts([*shape, *places]) or len(shape) > MAX_DIMS:
        raise FormatFault(f"entry {name!r:.120} must have counts as shape and places")
    if len(places) != 2 or places[1] - places[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        raise FormatFault(
            f"entry {name!r:.120} at {places!r:.60} must fit its shape {shape!r:.80} of {dtype}"
        )
    return StoredEntry(dtype, tuple(shape), data_start + places[0], data_start + places[1])


def _corrupt(file: str, reason: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"`{file}` is not a safetensors file: {reason}; it was changed after it was written",
        file=file,
    )
