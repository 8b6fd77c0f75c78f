"""Raw elements of tensors as numbers, rounded from one float type to another; numpy only.

Weights with low-rank adapters become their merged sums, float32 as the trainer computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from planish.base.errors import LayoutMismatch
from planish.checkpoint.convert.hf_names import WeightPart
from planish.checkpoint.format.items import ITEM_BYTES
from planish.checkpoint.load.slices import Slice, SliceReader

Array = npt.NDArray[Any]

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_COMPLEX = {"C64": np.complex64, "C128": np.complex128}


def to_numbers(elements: Array, dtype: str) -> Array | None:
    """Return [n] elements, whose bits are of `dtype`, as numbers; None for types that numpy lacks.

    BF16 becomes float32, integers become float64.
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


def cast(elements: Array, stored: str, wanted: str) -> Array:
    """Return [n] elements, whose bits are of the type `stored`, in the float type `wanted`.

    They are rounded to nearest, ties to even. `LayoutMismatch` if the types differ and are not both
    floats that numpy can read.
    """
    if stored == wanted:
        return elements
    if not {stored, wanted} <= {*_FLOATS, "BF16"}:
        raise LayoutMismatch(
            f"weights must be exported between float types, got {stored} to {wanted}"
        )
    numbers = to_numbers(elements, stored)
    assert numbers is not None
    with np.errstate(over="ignore"):
        if wanted == "BF16":
            return to_bfloat16(numbers.astype(np.float32))
        return numbers.astype(_FLOATS[wanted])


def to_bfloat16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to the upper 16 bits, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), rounded).astype(np.uint16)


def read_weights(reader: SliceReader, parts: Sequence[WeightPart]) -> list[tuple[Array, str]]:
    """Return [n] elements and type of each weight: as stored, or F32 with adapters merged."""
    adapters = [part.adapter for part in parts if part.adapter is not None]
    arrays = reader.read_many([part.slice for part in parts] + [s for a in adapters for s in a])
    weights: list[tuple[Array, str]] = []
    added = iter(arrays[len(parts) :])
    for part, array in zip(parts, arrays, strict=False):
        if part.adapter is None:
            weights.append((array, part.form.dtype))
            continue
        weight = _numbers(array, part.slice).reshape(part.form.shape)
        down, up, scale = (
            _numbers(next(added), piece).reshape(piece.tensor.shape) for piece in part.adapter
        )
        weights.append(((weight + (up @ down) * scale).reshape(-1), "F32"))
    return weights


def _numbers(elements: Array, source: Slice) -> Array:
    numbers = to_numbers(elements, source.tensor.dtype)
    if numbers is None:
        raise LayoutMismatch(
            f"`{source.tensor.fqn}` must be of a float type to have adapters, got "
            f"{source.tensor.dtype}; export a state as the trainer saved it"
        )
    return numbers.astype(np.float32)
