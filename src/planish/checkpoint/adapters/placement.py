"""Placement of a state's values: the boxes in the whole tensor, the names, and the refused types.

A plain tensor is one box, all of it. A shard of a DTensor is the box that follows from its mesh and
placements alone; ranks along a replicating axis have equal boxes. A flat shard of ZeRO is a
row-major range, which is cut into boxes. The module sends, gathers and copies nothing.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (a planner per framework turns its sharding
specification into boxes; irregular tensor decomposition).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import Box, Sides, flat_boxes, shift, whole
from planish.checkpoint.format.items import TORCH_TYPES

TYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in TORCH_TYPES.items()
}
"""Name of a type in a checkpoint -> type of torch."""
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TYPES.items()}

_whole = functools.lru_cache(maxsize=65536)(whole)


class Placed(NamedTuple):
    """A local value as boxes of a whole tensor."""

    shape: Sides
    boxes: tuple[Box, ...]
    """As `LocalItem.boxes`; () if this rank has no elements."""
    data: Tensor
    """Tensor of the one box's shape, or contiguous 1-D over all boxes, in the state's memory."""


def name_of(dtype: torch.dtype, key: str) -> str:
    """Return the name of a type in a checkpoint; `key` names the tensor in the error."""
    name = NAMES.get(dtype)
    if name is None:
        raise TypeError(
            f"`{key}` must have one of the types {', '.join(NAMES.values())}, got {dtype}; store "
            "its bytes as uint8, or leave the tensor out of the state"
        )
    return name


def place(key: str, value: Any) -> Placed:
    """Place a tensor, a DTensor or a flat shard."""
    if isinstance(value, DTensor):
        return place_dtensor(key, value)
    if isinstance(value, FlatShard):
        return place_flat(key, value)
    check_dense(key, value)
    shape = tuple(value.shape)
    return Placed(shape, (_whole(shape),) if value.numel() else (), value.detach())


def place_dtensor(key: str, tensor: DTensor) -> Placed:
    """Place a rank's shard of a DTensor."""
    local = tensor._local_tensor
    if hasattr(local, "wait"):
        local = local.wait()  # It is an AsyncCollectiveTensor: a gather is under way.
    local = local.detach()
    check_dense(key, local)
    spec, shape = tensor._spec, tuple(tensor._spec.shape)
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return Placed(shape, (), local)
    order = tuple((entry.tensor_dim, entry.mesh_dims) for entry in spec.shard_order or ())
    box, fault = shard_box(shape, tuple(spec.mesh.shape), tuple(coordinate), spec.placements, order)
    if not fault and box.volume and box.lengths != tuple(local.shape):
        fault = f"a local shape of {tuple(local.shape)} where its placements give {box.lengths}"
    if not fault and not box.volume and local.numel():
        fault = f"{local.numel()} elements where its placements give none"
    if fault:
        raise LayoutMismatch(
            f"`{key}` must be one box on each rank to be stored, got {fault} (placements "
            f"{spec.placements} on a mesh of {tuple(spec.mesh.shape)}); redistribute it to Shard "
            "and Replicate first"
        )
    return Placed(shape, (box,) if box.volume else (), local)


@functools.lru_cache(maxsize=65536)
def shard_box(
    shape: Sides,
    mesh: Sides,
    coordinate: Sides,
    placements: tuple[Any, ...],
    order: tuple[tuple[int, Sides], ...],
) -> tuple[Box, str]:
    """Return the box of a mesh coordinate and "", or any box and the fault as text."""
    offsets, lengths = [0] * len(shape), list(shape)
    if any(isinstance(placement, Partial) for placement in placements):
        return Box(tuple(offsets), tuple(lengths)), "sums that are still pending (Partial)"
    for dim, axes in order or _cut_order(mesh, placements):
        if axes is None:
            return Box((), ()), f"dim {dim} cut in stripes that are no box"
        for axis in axes:
            size = -(-lengths[dim] // mesh[axis])
            begin = min(coordinate[axis] * size, lengths[dim])
            offsets[dim] += begin
            lengths[dim] = min(size, lengths[dim] - begin)
    return Box(tuple(offsets), tuple(lengths)), ""


def _cut_order(mesh: Sequence[int], placements: Sequence[Any]) -> list[tuple[int, Sides | None]]:
    """Return (tensor dim, axes of the mesh that cut it, in the order of the cuts).

    Axes cut from left to right, but a strided shard comes after the axes to its right whose sizes
    multiply to its split factor: tensor parallelism cuts before FSDP though its axis is the inner
    one. The axes are None if the shard is stripes that no order of cuts makes.
    """
    axes: dict[int, list[int] | None] = {}
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
        cuts = axes.setdefault(placement.dim, [])
        if cuts is None:
            continue
        fits = [k for k in range(len(cuts) + 1) if math.prod(mesh[a] for a in cuts[:k]) == factor]
        if fits:
            cuts.insert(fits[0], axis)
        else:
            axes[placement.dim] = None
    return [(dim, None if cuts is None else tuple(cuts)) for dim, cuts in axes.items()]


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
    global_shape: Sides
    tp_offset: Sides
    """Offsets in the whole tensor of the flattened tensor-parallel shard; zeros without one."""
    tp_shape: Sides
    """Shape of the flattened tensor-parallel shard; `global_shape` without one."""
    flat_start: int
    """First element, row-major within the flattened shard."""
    flat_stop: int
    """One past the last element; padding lies behind it and is never stored."""
    tensor1d: Tensor
    """[flat_stop - flat_start], contiguous."""


def place_flat(key: str, shard: FlatShard) -> Placed:
    """Place a flat shard."""
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
    shape: Sides,
    tp_offset: Sides,
    tp_shape: Sides,
    start: int,
    stop: int,
) -> tuple[Box, ...]:
    """Return the boxes of a flat range of a shard, in the coordinates of the tensor."""
    sides = zip(tp_offset, tp_shape, shape, strict=False)
    inside = all(0 <= low <= size - length for low, length, size in sides)
    if (
        not len(shape) == len(tp_offset) == len(tp_shape)
        or not inside
        or not 0 <= start <= stop <= math.prod(tp_shape)
    ):
        raise ValueError(
            f"`{key}` must be a range of a shard inside {shape}, got [{start}, {stop}) of "
            f"{tp_shape} at {tp_offset}; pass the offsets of the shard that was flattened"
        )
    return tuple(shift(box, tp_offset) for box in flat_boxes(tp_shape, start, stop))


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NO_DISPATCH = {Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl}


def check_dense(key: str, value: Any) -> None:
    """Refuse tensors that are not dense, or have no plain values in memory."""
    fault = ""
    if value.is_nested:
        fault = "a nested tensor"
    elif value.layout is not torch.strided:
        fault = f"a sparse tensor ({value.layout})"
    elif value.is_quantized:
        fault = f"a quantised tensor ({value.dtype})"
    elif value.is_meta:
        fault = "a meta tensor, which has no values"
    elif not isinstance(value, _PLAIN) or type(value).__torch_dispatch__ not in _NO_DISPATCH:
        fault = f"a tensor of class {type(value).__name__}"
    if fault:
        raise TypeError(
            f"`{key}` must be a dense tensor in memory, got {fault}; convert it first "
            "(to_dense, dequantize, to_empty), or leave it out of the state"
        )


def check_not_expanded(key: str, tensor: Tensor) -> None:
    """Refuse tensors whose elements share memory (`expand`)."""
    shared = zip(tensor.stride(), tensor.shape, strict=True)
    if tensor.numel() and any(step == 0 and length > 1 for step, length in shared):
        raise TypeError(
            f"`{key}` must have a place in memory for each element, got an expanded tensor of "
            f"shape {tuple(tensor.shape)} with strides {tensor.stride()}; store `.contiguous()`, "
            "or the tensor that was expanded"
        )


Path = tuple[Any, ...]
"""Keys and indices from the root."""
Leaf = tuple[Path, Any]
"""A value of a nested state, and its path."""


def name_of_path(path: Path) -> str:
    """Return the name of a tensor at a path: keys joined by dots, numbers in brackets."""
    return ".".join(part if isinstance(part, str) else f"[{part!r}]" for part in path)


def leaves(value: Any, path: Path = ()) -> Iterator[Leaf]:
    """Yield paths and leaves of mappings, and of lists with tensors; an empty mapping is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, (list, tuple)) and has_tensor(value):
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))
    else:
        yield path, value


def has_tensor(value: Any) -> bool:
    """Return whether a nested value contains a tensor or flat shard."""
    if isinstance(value, Mapping):
        return any(has_tensor(child) for child in value.values())
    if isinstance(value, (list, tuple)):
        return any(has_tensor(child) for child in value)
    return isinstance(value, (Tensor, FlatShard))


def unpacked(value: Any) -> Any:
    """Return a nested value in which objects are replaced by their `state_dict()`, with a mark."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return {_STATE: value.state_dict()}
    if isinstance(value, Mapping):
        return {key: unpacked(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        made = [unpacked(child) for child in value]
        return made if isinstance(value, list) else tuple(made)
    return value


_STATE = "\0state_dict"
"""Key that marks the state of an object; its NUL keeps it apart from the keys of callers."""


def restore(target: Any, saved: Any) -> Any:
    """Return the value for the target's place; an object loads its state, a container is filled."""
    if isinstance(saved, Mapping) and set(saved) == {_STATE}:
        if hasattr(target, "load_state_dict"):
            target.load_state_dict(saved[_STATE])
            return target
        return saved[_STATE]
    if isinstance(saved, Mapping):
        place: Any = target if isinstance(target, MutableMapping) else {}
        for key, value in saved.items():
            place[key] = restore(place.get(key), value)
        return place
    if isinstance(saved, (list, tuple)):
        kind: Any = list if isinstance(saved, list) else tuple
        fits = isinstance(target, kind) and len(target) == len(saved)
        olds = target if fits else [None] * len(saved)
        made = kind(restore(old, new) for old, new in zip(olds, saved, strict=True))
        if fits and isinstance(target, list):
            target[:] = made
            return target
        return made
    if isinstance(target, Tensor) and isinstance(saved, Tensor):
        if (target.shape, target.dtype) != (saved.shape, saved.dtype):
            return saved
        target.detach().copy_(saved)
        return target
    return saved


def put(container: Any, path: Path, value: Any, restored: Callable[[Any, Any], Any]) -> None:
    """Set the value at a path of nested mappings; add mappings that are missing."""
    for part in path[:-1]:
        if isinstance(container, MutableMapping):
            container = container.setdefault(part, {})
        else:
            container = container[part]
    old = container.get(path[-1]) if isinstance(container, Mapping) else container[path[-1]]
    container[path[-1]] = restored(old, value)
