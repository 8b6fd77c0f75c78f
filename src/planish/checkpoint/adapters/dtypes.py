"""Types of tensors: torch's own to the names that a checkpoint uses, and back."""

from __future__ import annotations

import torch

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",
}
"""Keys of `tables.ITEM_BYTES`."""
TYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}
"""Name to type."""


def name_of(dtype: torch.dtype, key: str) -> str:
    """Return the name of a type.

    Raises:
        TypeError: a checkpoint has no name for it; the tensor is `key`.
    """
    name = NAMES.get(dtype)
    if name is None:
        raise TypeError(
            f"`{key}` must have one of the types {', '.join(NAMES.values())}, got {dtype}; store "
            "its bytes as uint8, or leave the tensor out of the state"
        )
    return name
