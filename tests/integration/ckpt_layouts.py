"""One model under many layouts: plain, DDP, FSDP2, FSDP2 x TP, HSDP, ZeRO-1.

Shapes are chosen so that little divides: dimensions smaller than the ranks, one to four dimensions,
a scalar buffer, a tied weight. `build` returns the state of a rank and, to check it without the
code under test, what its tensors must be: cut by `torch.chunk` as the layout says (`full_tensor` of
torch hangs where a shard is empty).
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.integration.ckpt_memory import raw
from tests.integration.zero1 import MOMENTS, Zero1Adam

SHAPES = {
    "rows": (7, 5),
    "bias": (5,),
    "short": (3,),
    "cube": (2, 3, 4),
    "conv": (3, 2, 3, 3),
    "line": (1, 9),
    "even": (16, 8),
    "low": (6, 4),
}
TENSOR_PARALLEL = {"even": 0, "rows": 1, "conv": 0, "cube": 2, "bias": 0}
"""Dimension that tensor parallelism cuts; the others are replicated."""
LAYOUTS = {
    "plain": (1,),
    "ddp2": (2,), "ddp4": (4,),
    "fsdp2:1": (1,), "fsdp2:2": (2,), "fsdp2:3": (3,), "fsdp2:4": (4,), "fsdp2:6": (6,),
    "tp2x2": (2, 2), "tp1x4": (1, 4), "tp4x1": (4, 1),
    "hsdp2x2": (2, 2),
    "zero2": (2,), "zero3": (3,), "zero4": (4,),
}  # fmt: skip
"""Name -> sizes of the mesh; the ranks are the first ones of the job."""


class Zoo(nn.Module):
    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator)
            setattr(self, name, nn.Parameter(value.to(torch.bfloat16) if name == "low" else value))
        self.inner = nn.Module()
        self.inner.tied = self.even
        self.register_buffer("scalar", torch.randn((), generator=generator, dtype=torch.float64))

    def forward(self):
        return sum(p.float().square().sum() for p in self.parameters())


@dataclasses.dataclass
class Built:
    """A rank's state under a layout; None for ranks outside of it."""

    framework: str
    state: dict
    local: Callable[[], dict]
    """Name -> this rank's tensors, to compare with what they were."""
    compared: Callable[[dict], tuple[dict, dict]]
    """Name -> whole tensors to (found, expected); may be a collective of the layout's ranks."""
    finish: Callable[[], None] = lambda: None


def fill_moments(optimizer, seed):
    """Give every parameter of a plain model random moments."""
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shape, dtype = parameter.shape, parameter.dtype
            optimizer.state[parameter] = {
                "step": torch.tensor(float(seed)),
                "exp_avg": torch.randn(shape, generator=generator).to(dtype),
                "exp_avg_sq": torch.rand(shape, generator=generator).to(dtype),
            }


def meshes():
    """Return the process groups of all layouts; a collective of all ranks of the job."""
    found = {}
    for name, sizes in LAYOUTS.items():
        count = torch.Size(sizes).numel()
        if name.startswith(("zero", "ddp")):
            found[name] = dist.new_group(list(range(count)))
        elif name.startswith("fsdp"):
            found[name] = DeviceMesh("cpu", torch.arange(count), mesh_dim_names=("dp",))
        elif len(sizes) == 2:
            names = ("dp", "tp") if name.startswith("tp") else ("replica", "dp")
            found[name] = DeviceMesh("cpu", torch.arange(count).view(sizes), mesh_dim_names=names)
    return found


def members(name):
    return range(torch.Size(LAYOUTS[name]).numel())


def build(name, mesh, seed):
    """Return the state of this rank: values of `seed`, and an optimizer that never stepped."""
    model = Zoo(seed)
    if name.startswith("zero"):
        return build_zero(model, mesh)
    framework = "plain" if name == "plain" else "fsdp2"
    if name.startswith("ddp"):
        framework, model = "ddp", nn.parallel.DistributedDataParallel(model, process_group=mesh)
    elif framework == "fsdp2":
        shard(name, model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 + seed)

    def local():
        return named(model, optimizer)

    def compared(expected):
        return local(), {n: cut(name, mesh, n, tensor) for n, tensor in expected.items()}

    return Built(framework, {"model": model, "optimizer": optimizer}, local, compared)


def part(tensor, parts, index, dim):
    """Return one of the parts that a dimension is cut into, the last ones maybe empty."""
    chunks = tensor.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def cut(layout, mesh, name, tensor):
    """Return this rank's part of a whole tensor."""
    if not layout.startswith(("fsdp2:", "tp", "hsdp")) or not tensor.dim():
        return tensor
    base = name.partition(".")[0]
    if layout.startswith("tp") and base in TENSOR_PARALLEL:
        tensor = part(tensor, mesh["tp"].size(), mesh["tp"].get_local_rank(), TENSOR_PARALLEL[base])
    return part(tensor, mesh["dp"].size(), mesh["dp"].get_local_rank(), 0)


def shard(name, model, mesh):
    from torch.distributed.fsdp import fully_shard

    data = mesh
    if name.startswith("tp"):
        for key, parameter in list(model.named_parameters(recurse=False)):
            dim = TENSOR_PARALLEL.get(key)
            placement = Replicate() if dim is None else Shard(dim)
            value = distribute_tensor(parameter.detach(), mesh["tp"], [placement])
            setattr(model, key, nn.Parameter(value))
        model.inner.tied = model.even
        data = mesh["dp"]
    fully_shard(model, mesh=data)


def named(model, optimizer):
    inner = model.module if hasattr(model, "module") else model
    found = dict(inner.named_parameters()) | {"scalar": inner.scalar}
    for name, parameter in inner.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value
    return found


def build_zero(model, group):
    """ZeRO-1: whole parameters, flat moments; the bfloat16 parameter is not trained."""
    trained = {n: p for n, p in model.named_parameters() if p.dtype == torch.float32}
    optimizer = Zero1Adam(trained, group=group, lr=0.5)
    held = optimizer.state()
    half = {f"low.{key}": torch.zeros_like(model.low) for key in MOMENTS}
    half["low.step"] = torch.zeros(())
    held |= half
    held["param_groups"].append({"params": ["low"], **optimizer.options})

    def local():
        found = dict(model.named_parameters()) | {"scalar": model.scalar} | half
        return found | optimizer.moments | {"steps": optimizer.steps}

    def compared(expected):
        found = dict(model.named_parameters()) | {"scalar": model.scalar} | half
        for key, buffer in optimizer.moments.items():
            flat = torch.empty(optimizer.length * optimizer.size)
            dist.all_gather_into_tensor(flat, buffer, group=group)
            for name, parameter in trained.items():
                start = optimizer.starts[name]
                value = flat[start : start + parameter.numel()].view(parameter.shape)
                found[f"{name}.{key}"] = value.clone()
        return found | {f"{name}.step": optimizer.steps for name in trained}, expected

    state = {"model": model, "optimizer": held}
    return Built("flat", state, local, compared, lambda: optimizer.take(held))


def bits(tensors):
    """Return the bits of tensors, whatever holds them."""
    return {
        name: raw(t.to_local() if isinstance(t, DTensor) else t).numpy().tobytes()
        for name, t in tensors.items()
    }
