"""The states that are saved and loaded: five workloads, deterministic, in any layout.

Each element of a tensor is a function of the tensor's name and the element's place in the whole
tensor, so that every rank of every layout knows what a load must leave. Needs torch only: another
environment may run it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PERIOD = 1 << 20
CHUNK_ELEMENTS = 1 << 22
MOMENTS = ("exp_avg", "exp_avg_sq")


class Piece(NamedTuple):
    """The part of a tensor that lies on this rank."""

    fqn: str
    data: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class State:
    """One rank's share of a workload."""

    framework: str
    world: int
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    pieces: list[Piece]
    flat: dict[str, Tensor] = field(default_factory=dict)
    """Name of a moment -> this rank's slice of the flattened optimizer state (W3 only)."""

    @property
    def unique_bytes(self) -> int:
        """Bytes of all tensors of the job, each element once."""
        names = [name for name, _ in self.model.named_parameters()]
        sizes = [math.prod(p.shape) * p.element_size() for p in self.model.parameters()]
        per_parameter = 3 if self.optimizer is not None or self.flat else 1
        assert len(names) == len(sizes)
        return per_parameter * sum(sizes)


def expected(fqn: str, offsets: tuple[int, ...], shape: tuple[int, ...], out: Tensor) -> None:
    """Fill `out`, the region of `shape` that begins at `offsets`."""
    if out.numel() == 0:
        return
    if out.dim() == 0:
        out, offsets, shape = out.view(1), (0,), (1,)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    table = torch.arange(PERIOD, dtype=torch.float32) / PERIOD
    inner = torch.full((1,) * out.dim(), zlib.crc32(fqn.encode()) % PERIOD)
    for dim in range(1, out.dim()):
        places = (torch.arange(out.shape[dim]) + offsets[dim]) * strides[dim]
        inner = inner + places.view([-1 if d == dim else 1 for d in range(out.dim())])
    rows = max(1, CHUNK_ELEMENTS // max(1, inner.numel()))
    for first in range(0, out.shape[0], rows):
        count = min(rows, out.shape[0] - first)
        places = (torch.arange(first, first + count) + offsets[0]) * strides[0]
        index = places.view([-1] + [1] * (out.dim() - 1)) + inner
        out[first : first + count] = table[index.remainder_(PERIOD)]


def fill(state: State) -> None:
    """Give every element its value."""
    for piece in state.pieces:
        expected(piece.fqn, piece.offsets, piece.shape, piece.data)


def clear(state: State) -> None:
    """Zero all elements, as before a load."""
    for piece in state.pieces:
        piece.data.zero_()


def wrong_tensors(state: State) -> list[str]:
    """Return the names of tensors that are not bit for bit what `fill` gives."""
    return [piece.fqn for piece in state.pieces if not all(_right(piece))]


def _right(piece: Piece) -> Iterator[bool]:
    """Yield for one run of rows after the other whether they are right."""
    data, offsets = piece.data, piece.offsets
    if not data.dim():
        data, offsets = data.view(1), (0,)
    rows = max(1, CHUNK_ELEMENTS // max(1, data[:1].numel()))
    for first in range(0, data.shape[0], rows):
        part = data[first : first + rows]
        right = torch.empty_like(part)
        expected(piece.fqn, (offsets[0] + first, *offsets[1:]), piece.shape or (1,), right)
        yield torch.equal(right, part)


class Block(nn.Module):
    """The parameters of a transformer layer; nothing runs it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Gpt(nn.Module):
    """The parameters of a GPT-like model."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)


class Many(nn.Module):
    """`count` parameters of `elements` each."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"t{number:05d}", nn.Parameter(torch.empty(elements)))


def _gpt(scale: float, *, big: bool) -> Gpt:
    """About 60 million parameters, or 120 when `big`, times `scale`."""
    root = math.sqrt(scale)
    width = max(64, round((768 if big else 512) * root / 64) * 64)
    with torch.device("meta"):
        return Gpt(width, 10 if big else 8, max(1024, round(32_000 * root / 8) * 8))


def _local(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor's local part and where it begins in the whole."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local().detach(), tuple(offsets)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return Adam with the state that its first step would make."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        moments = {name: torch.zeros_like(parameter.detach()) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return optimizer


def _pieces(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Piece]:
    for name, parameter in model.named_parameters():
        data, offsets = _local(parameter)
        yield Piece(name, data, offsets, tuple(parameter.shape))
        if optimizer is None:
            continue
        for moment in MOMENTS:
            data, offsets = _local(optimizer.state[parameter][moment])
            yield Piece(f"{name}.{moment}", data, offsets, tuple(parameter.shape))


def _whole(framework: str, model: nn.Module, world: int, *, trains: bool) -> State:
    model = model.to_empty(device="cpu")
    optimizer = _adam(model) if trains else None
    return State(framework, world, model, optimizer, list(_pieces(model, optimizer)))


def _ddp(scale: float, rank: int, world: int) -> State:
    return _whole("ddp", _gpt(scale, big=False), world, trains=True)


def _fsdp2(scale: float, rank: int, world: int) -> State:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _gpt(scale, big=True)
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _whole("fsdp2", model, world, trains=True)


def _tensor_parallel(scale: float, rank: int, world: int) -> State:
    """The model of W2, split over tensor-parallel ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    split: dict[str, Any] = {"embed": RowwiseParallel(), "head": ColwiseParallel()}
    model = _gpt(scale, big=True).to_empty(device="cpu")
    for number in range(len(model.blocks)):
        at = f"blocks.{number}"
        split |= {f"{at}.qkv": ColwiseParallel(), f"{at}.proj": RowwiseParallel()}
        split |= {f"{at}.up": ColwiseParallel(), f"{at}.down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (world,)), split)
    optimizer = _adam(model)
    return State("fsdp2", world, model, optimizer, list(_pieces(model, optimizer)))


def flat_ranges(model: nn.Module, rank: int, world: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield what a rank holds of the flattened optimizer: name, first, last and place in its slice.

    All parameters lie one after the other; the whole is padded and cut in `world` equal slices.
    """
    total = sum(p.numel() for p in model.parameters())
    share = -(-total // world)
    low, high = rank * share, (rank + 1) * share
    start = 0
    for name, parameter in model.named_parameters():
        first, last = max(start, low), min(start + parameter.numel(), high)
        if first < last:
            yield name, first - start, last - start, first - low
        start += parameter.numel()


def _zero1(scale: float, rank: int, world: int) -> State:
    model = _gpt(scale, big=True).to_empty(device="cpu")
    share = -(-sum(p.numel() for p in model.parameters()) // world)
    flat = {moment: torch.zeros(share) for moment in MOMENTS}
    pieces = list(_pieces(model, None))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, first, last, at in flat_ranges(model, rank, world):
        for moment, data in flat.items():
            # A flat range is a region of the flattened tensor.
            part = data[at : at + last - first]
            pieces.append(Piece(f"{name}.{moment}", part, (first,), (math.prod(shapes[name]),)))
    return State("flat", world, model, None, pieces, flat)


def _many(scale: float, rank: int, world: int) -> State:
    return _whole("ddp", Many(max(8, round(5000 * scale)), 1024), world, trains=False)


def _one(scale: float, rank: int, world: int) -> State:
    return _whole("ddp", Many(1, max(1024, round((1 << 28) * scale))), world, trains=False)


WORKLOADS: dict[str, Callable[[float, int, int], State]] = {
    "W1": _ddp,
    "W2": _fsdp2,
    "W2-tp": _tensor_parallel,
    "W3": _zero1,
    "W4": _many,
    "W5": _one,
}
ABOUT = {
    "W1": "DDP, 60M parameters + Adam, replicated",
    "W2": "FSDP2, 120M parameters + Adam, sharded",
    "W2-tp": "the state of W2 under tensor parallelism",
    "W3": "ZeRO-1, 120M parameters, moments in flat slices",
    "W4": "5,000 tensors of 4 KB, replicated",
    "W5": "one tensor of 1 GiB, replicated",
}


def build(name: str, scale: float, rank: int, world: int) -> State:
    """Build a workload's state on this rank, filled; needs a process group."""
    torch.manual_seed(0)
    state = WORKLOADS[name](scale, rank, world)
    fill(state)
    return state
