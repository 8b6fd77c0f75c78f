"""Tensors as targets of a load: seen as raw elements, or converted where types differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.checkpoint.adapters.dtypes import TYPES
from planish.checkpoint.format.geometry import Box
from planish.checkpoint.format.records import LocalItem
from planish.checkpoint.load.fill import RAW, Array, Target, Targets

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorTarget:
    """A wanted box on a device, or of another type than the stored one.

    Example:
        >>> target = TensorTarget(torch.zeros(2, dtype=torch.float64), torch.float32)
        >>> target[(slice(0, 1),)] = np.array([0x3F800000], np.uint32)
        >>> target.tensor.tolist()
        [1.0, 0.0]
    """

    def __init__(self, tensor: Tensor, stored: torch.dtype) -> None:
        """Fill `tensor` from elements of the type `stored`."""
        self.tensor, self.stored = tensor, stored
        self.shape = tuple(tensor.shape)

    def __setitem__(self, place: tuple[slice, ...], value: Array) -> None:
        """Copy the raw elements of `value` to `place`, converted to the type of the tensor."""
        raw = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        part = raw.view(self.stored).view(value.shape)
        with torch.no_grad():
            self.tensor[place].copy_(part)


def tensor_targets(items: Sequence[LocalItem]) -> Targets:
    """Return the boxes of items as targets; `tensor.dtype` of an item is the stored type."""
    return [list(_targets(item, TYPES[item.tensor.dtype])) for item in items]


def _targets(item: LocalItem, stored: torch.dtype) -> Iterator[Target]:
    if not item.volume:
        return
    data = item.data
    assert data is not None, f"`{item.tensor.fqn}` has no data to load into"
    data = data.detach()
    plain = data.device.type == "cpu" and data.dtype == stored
    plain = plain and not data.is_conj() and not data.is_neg()
    for box, part in zip(item.boxes, _parts(data, item.boxes), strict=True):
        if plain:
            yield _raw(part)
        else:
            yield TensorTarget(part.view(box.lengths) if part.is_contiguous() else part, stored)


def _parts(data: Tensor, boxes: Sequence[Box]) -> Iterator[Tensor]:
    if len(boxes) == 1:
        yield data.view(boxes[0].lengths) if data.is_contiguous() else data
        return
    start = 0
    for box in boxes:
        yield data[start : start + box.volume].view(box.lengths)
        start += box.volume


def _raw(part: Tensor) -> Any:
    size = part.element_size()
    whole = part if size == 16 else part.view(_INTEGERS[size])
    return whole.numpy().view(RAW[size])
