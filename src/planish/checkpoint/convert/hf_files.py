"""Hugging Face weight files written from arrays: which tensor goes where, headers, casts.

Deliberately without torch and without stores: numpy arrays in, local files out.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.tables import ITEM_BYTES

INDEX_FILE = "model.safetensors.index.json"
CHUNK_BYTES = 16 << 20
"""Elements are converted in pieces of this size."""

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_COMPLEX = {"C64": np.complex64, "C128": np.complex128}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Form:
    """Type and shape of a tensor in a file.

    Example:
        >>> Form("BF16", (2, 3)).nbytes
        12
    """

    dtype: str
    """Key of `ITEM_BYTES`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def plan_files(forms: Mapping[str, Form], max_file_bytes: int) -> dict[str, list[str]]:
    """Return file name to tensor names, in an order that keeps every tensor aligned.

    Wide types first, then by name; a tensor larger than `max_file_bytes` has a file of its own.

    Example:
        >>> plan_files({"a": Form("F32", (2,)), "b": Form("F32", (2,))}, 8)
        {'model-00001-of-00002.safetensors': ['a'], 'model-00002-of-00002.safetensors': ['b']}
    """
    order = sorted(forms, key=lambda name: (-ITEM_BYTES[forms[name].dtype], name))
    groups: list[list[str]] = [[]]
    filled = 0
    for name in order:
        size = forms[name].nbytes
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def encode_header(forms: Mapping[str, Form]) -> bytes:
    """Return the first bytes of a safetensors file whose tensors follow in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, form in forms.items():
        stop = start + form.nbytes
        header[name] = {
            "dtype": form.dtype,
            "shape": list(form.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded, so that the tensors begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def encode_index(files: Mapping[str, Sequence[str]], forms: Mapping[str, Form]) -> bytes:
    """Return the JSON that says in which of several files each tensor lies."""
    index = {
        "metadata": {"total_size": sum(form.nbytes for form in forms.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    return json.dumps(index, sort_keys=True, indent=2).encode()


def write_weights(
    folder: Path,
    forms: Mapping[str, Form],
    files: Mapping[str, Sequence[str]],
    arrays: Callable[[Sequence[str]], Iterator[tuple[str, str, Array]]],
) -> dict[str, Path | bytes]:
    """Write weight files one tensor after the other.

    Args:
        folder: an existing local folder.
        forms: type and shape of every tensor in the files.
        files: what `plan_files` returned.
        arrays: for names in the order of a file, yields (name, stored type, contiguous array of
            its elements, as unsigned integers of their size).

    Returns:
        Name of each file to what belongs there, the index included.
    """
    written: dict[str, Path | bytes] = {}
    for file, names in files.items():
        with (folder / file).open("wb") as stream:
            stream.write(encode_header({name: forms[name] for name in names}))
            for name, stored, array in arrays(names):
                _write(stream, array.reshape(-1), stored, forms[name].dtype)
        written[file] = folder / file
    if len(files) > 1:
        written[INDEX_FILE] = encode_index(files, forms)
    return written


def _write(stream: IO[bytes], array: Array, stored: str, wanted: str) -> None:
    step = CHUNK_BYTES // array.dtype.itemsize
    for start in range(0, len(array), step):
        part = cast(array[start : start + step], stored, wanted)
        stream.write(part.view(np.uint8).data)


def cast(elements: Array, stored: str, wanted: str) -> Array:
    """Return elements in the wanted float type, rounded to nearest, ties to even.

    Args:
        elements: [n] of any type of the right size; its bits are those of the type `stored`.
        stored: key of `ITEM_BYTES`.
        wanted: key of `ITEM_BYTES`.

    Raises:
        LayoutMismatch: the types differ and are not both floats that numpy can read.
    """
    if stored == wanted:
        return elements
    if stored not in {*_FLOATS, "BF16"} or wanted not in {*_FLOATS, "BF16"}:
        raise LayoutMismatch(
            f"weights must be exported between float types, got {stored} to {wanted}"
        )
    numbers = to_numbers(elements, stored)
    assert numbers is not None
    if wanted != "BF16":
        with np.errstate(over="ignore"):
            return numbers.astype(_FLOATS[wanted])
    with np.errstate(over="ignore"):
        return to_bfloat16(numbers.astype(np.float32))


def to_numbers(elements: Array, dtype: str) -> Array | None:
    """Return elements as numbers that numpy computes with; None for types that it lacks.

    Args:
        elements: [n] of any type of the right size; its bits are those of the type `dtype`.
        dtype: key of `ITEM_BYTES`. BF16 becomes float32, integers become float64.
    """
    bits = np.ascontiguousarray(elements)
    if dtype == "BF16":
        return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in _FLOATS:
        return bits.view(_FLOATS[dtype])
    if dtype in _COMPLEX:
        return bits.view(_COMPLEX[dtype])
    if dtype[0] in "IU" or dtype == "BOOL":
        sign = "i" if dtype[0] == "I" else "u"
        return bits.view(f"{sign}{ITEM_BYTES[dtype]}").astype(np.float64)
    return None


def to_bfloat16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to the upper 16 bits, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), rounded).astype(np.uint16)
