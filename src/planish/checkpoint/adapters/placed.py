"""Where a local value lies in its whole tensor; and which values cannot be stored.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (a planner per framework turns its sharding
specification into boxes).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planish.checkpoint.format.geometry import Box, whole


class Placed(NamedTuple):
    """A local value as boxes of a whole tensor.

    Example:
        >>> place_whole("w", torch.zeros(2, 3)).boxes
        (Box(offsets=(0, 0), lengths=(2, 3)),)
    """

    shape: tuple[int, ...]
    """Of the whole tensor."""
    boxes: tuple[Box, ...]
    """As `model.LocalItem.boxes`; none where this rank holds nothing."""
    data: Tensor
    """Shape of the one box, or 1-D contiguous over all boxes; shares memory with the state."""


_whole = functools.lru_cache(maxsize=65536)(whole)


def place_whole(key: str, tensor: Tensor) -> Placed:
    """Place a tensor that this rank holds completely."""
    shape = tuple(tensor.shape)
    boxes = (_whole(shape),) if tensor.numel() else ()
    return Placed(shape, boxes, tensor.detach())


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def check_dense(key: str, value: Any) -> None:
    """Refuse tensors whose bytes are not their values.

    Raises:
        TypeError: sparse, quantised, meta, nested, or of a class of its own.
    """
    fault = _fault(value)
    if fault:
        raise TypeError(
            f"`{key}` must be a dense tensor in memory, got {fault}; convert it first "
            "(to_dense, dequantize, to_empty), or leave it out of the state"
        )


def _fault(value: Tensor) -> str:
    if value.is_nested:
        return "a nested tensor"
    if value.layout is not torch.strided:
        return f"a sparse tensor ({value.layout})"
    if value.is_quantized:
        return f"a quantised tensor ({value.dtype})"
    if value.is_meta:
        return "a meta tensor, which has no values"
    if not isinstance(value, _PLAIN) or type(value).__torch_dispatch__ not in _NO_DISPATCH:
        return f"a tensor of class {type(value).__name__}"
    return ""


_NO_DISPATCH = {Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl}


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements share one place in memory (`expand`)."""
    return any(
        step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
    )


def copy_expanded(key: str, source: Tensor, target: Tensor) -> None:
    """Fill an expanded tensor: its places in memory, once each.

    Raises:
        ValueError: elements that share a place would need different values.
    """
    core, wanted = target.detach(), source
    for dim, (step, length) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if step == 0 and length > 1:
            core, wanted = core.narrow(dim, 0, 1), wanted.narrow(dim, 0, 1)
    if not torch.equal(wanted.expand(source.shape), source):
        raise ValueError(
            f"`{key}` must have equal values where its elements share memory, got different ones; "
            "load into a tensor that was not expanded"
        )
    core.copy_(wanted)
