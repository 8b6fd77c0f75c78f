"""Process groups and the few collectives that training needs; nothing else.

One process never imports torch.distributed: `Ranks(0, 1)` answers every question by itself.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from planish.base.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Ranks:
    """This process among the data-parallel processes of one job.

    Example:
        >>> Ranks(0, 1).share(5)
        range(0, 5)
    """

    rank: int
    """0 .. size - 1."""
    size: int
    """Number of processes."""

    @property
    def is_first(self) -> bool:
        """True on the process that writes reports and manifests."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Return which of `count` items belong to this rank: every `size`-th one."""
        return range(self.rank, count, self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place; returns it."""
        return self._reduce(tensor, "SUM")

    def max(self, tensor: Tensor) -> Tensor:
        """Take the largest value of each element over all ranks, in place; returns it."""
        return self._reduce(tensor, "MAX")

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()

    def _reduce(self, tensor: Tensor, operation: str) -> Tensor:
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation))
        return tensor


SINGLE = Ranks(0, 1)
"""The whole job in one process."""


def pick_device(name: DeviceName, rank: int = 0) -> torch.device:
    """Return the device of a rank; `auto` takes an accelerator where there is one.

    Raises:
        ConfigError: an accelerator is asked for and this process sees none.
    """
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(
            "`device` must be 'auto' or 'cpu' where a process sees no accelerator, got 'cuda'; "
            "give the pod or machine a GPU and its driver, and a torch with CUDA (`planish doctor`)"
        )
    return torch.device("cuda", rank % count)


def num_devices(name: DeviceName) -> int:
    """Return how many accelerators `pick_device` chooses from, 1 for the CPU."""
    import torch

    return 1 if pick_device(name).type == "cpu" else torch.cuda.device_count()


def local_rank() -> int:
    """Return the index of this process on its machine, as the launcher (torchrun) numbers it."""
    return int(os.environ["LOCAL_RANK"])


def join(device: torch.device, *, timeout_seconds: float) -> Ranks:
    """Join the process group that the launcher (torchrun) describes in the environment."""
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Control messages and metadata travel over gloo, tensors over NCCL.
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_seconds))
    return Ranks(dist.get_rank(), dist.get_world_size())


def leave() -> None:
    """Leave the process group, if this process is in one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def data_mesh(ranks: Ranks, device: torch.device) -> Any:
    """Return the one-axis device mesh `dp` of all ranks (a `DeviceMesh`)."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (ranks.size,), mesh_dim_names=("dp",))
