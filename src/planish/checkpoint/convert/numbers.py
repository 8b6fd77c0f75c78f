"""Raw elements of tensors as numbers, and rounded from one float type to another; numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.items import ITEM_BYTES

Array = npt.NDArray[Any]

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_COMPLEX = {"C64": np.complex64, "C128": np.complex128}


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
