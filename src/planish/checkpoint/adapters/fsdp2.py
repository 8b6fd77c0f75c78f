"""DTensors (FSDP2, tensor parallelism, HSDP, any mesh): the box that a rank's shard is.

Offsets follow from mesh and placements alone: nothing is sent between ranks. Ranks that differ only
along a replicating axis of the mesh hold equal boxes, so they are replicas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from planish.base.errors import LayoutMismatch
from planish.checkpoint.adapters.placed import Placed, check_dense
from planish.checkpoint.format.geometry import Box


def place_dtensor(key: str, tensor: DTensor) -> Placed:
    """Place a rank's shard of a DTensor.

    Raises:
        LayoutMismatch: sums are pending (`Partial`), or the shard is no single box.
        TypeError: the local tensor is not dense.
    """
    local = tensor._local_tensor
    if hasattr(local, "wait"):
        local = local.wait()  # An AsyncCollectiveTensor: a gather is under way.
    local = local.detach()
    check_dense(key, local)
    shape, boxes = _place(key, tensor._spec, local)
    return Placed(shape, boxes, local)


def _place(
    key: str, spec: DTensorSpec, local: torch.Tensor
) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """Return the shape of the whole, and the box of a local tensor unless it is empty."""
    shape = tuple(spec.shape)
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return shape, ()
    order = tuple((e.tensor_dim, e.mesh_dims) for e in spec.shard_order or ())
    box, fault = _box(shape, tuple(spec.mesh.shape), tuple(coordinate), spec.placements, order)
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
    return shape, (box,) if box.volume else ()


@functools.lru_cache(maxsize=65536)
def _box(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...],
) -> tuple[Box, str]:
    """Return the box of a coordinate and "", or any box and what stands against it."""
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


def _cut_order(
    mesh: Sequence[int], placements: Sequence[Any]
) -> list[tuple[int, tuple[int, ...] | None]]:
    """Return per tensor dim which axes of the mesh cut it, in the order in which they do.

    Axes cut from left to right, but a strided shard comes after the axes to its right whose sizes
    multiply to its split factor: tensor parallelism cuts before FSDP though its axis is the inner
    one. None for stripes that no order of cuts makes.
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
