"""ZeRO-like states: a rank holds a row-major range of a tensor's elements, given by the trainer.

The range is cut into boxes as it lies; nothing is gathered and nothing is copied.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (irregular tensor decomposition).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torch import Tensor

from planish.checkpoint.adapters.placed import Placed, check_dense
from planish.checkpoint.format.geometry import Box, flat_boxes, shift


@dataclass(frozen=True)
class FlatShard:
    """Elements `[flat_start, flat_stop)` of a tensor, or of one tensor-parallel shard of it.

    Example:
        >>> import torch
        >>> shard = FlatShard("b", (3, 2), (0, 0), (3, 2), 0, 3, torch.zeros(3))
        >>> [box.lengths for box in place_flat("b", shard).boxes]
        [(1, 2), (1, 1)]
    """

    fqn: str
    """Name of the value: `layer.weight` in a model, `layer.weight.exp_avg` in an optimizer."""
    global_shape: tuple[int, ...]
    """Of the whole tensor."""
    tp_offset: tuple[int, ...]
    """Where the shard that was flattened begins in the whole tensor; zeros without such."""
    tp_shape: tuple[int, ...]
    """Shape of the shard that was flattened; `global_shape` without such."""
    flat_start: int
    """First element, row-major within the flattened shard."""
    flat_stop: int
    """One past the last element; padding lies behind it and is never stored."""
    tensor1d: Tensor
    """[flat_stop - flat_start], contiguous."""


def place_flat(key: str, shard: FlatShard) -> Placed:
    """Place a flat shard.

    Raises:
        TypeError: the tensor is not dense.
        ValueError: sizes do not fit each other, or the shard lies outside its tensor.
    """
    check_dense(key, shard.tensor1d)
    data, length = shard.tensor1d.detach(), shard.flat_stop - shard.flat_start
    if data.dim() != 1 or len(data) != length or not data.is_contiguous():
        raise ValueError(
            f"`{key}` must come as {length} contiguous elements in one dimension, got shape "
            f"{tuple(data.shape)} with strides {data.stride()}; pass the slice of the flat buffer"
        )
    shape = tuple(shard.global_shape)
    place = tuple(shard.tp_offset), tuple(shard.tp_shape)
    boxes = _boxes(key, shape, *place, shard.flat_start, shard.flat_stop)
    if len(boxes) == 1:
        data = data.view(boxes[0].lengths)
    return Placed(shape, boxes, data)


@functools.lru_cache(maxsize=65536)
def _boxes(
    key: str,
    shape: tuple[int, ...],
    tp_offset: tuple[int, ...],
    tp_shape: tuple[int, ...],
    start: int,
    stop: int,
) -> tuple[Box, ...]:
    """Cut a flat range of a shard that lies inside its tensor."""
    ends = [a + b for a, b in zip(tp_offset, tp_shape, strict=False)]
    sizes = {len(shape), len(tp_offset), len(tp_shape)}
    inside = all(low >= 0 for low in tp_offset) and all(
        high <= size for high, size in zip(ends, shape, strict=False)
    )
    if len(sizes) > 1 or not inside or stop > math.prod(tp_shape):
        raise ValueError(
            f"`{key}` must be a range of a shard inside {shape}, got [{start}, {stop}) of "
            f"{tp_shape} at {tp_offset}; pass the offsets of the shard that was flattened"
        )
    return tuple(shift(box, tp_offset) for box in flat_boxes(tp_shape, start, stop))
