"""Process groups and the few collectives that training needs; nothing else.

A single process never imports torch.distributed: `Ranks(0, 1)` needs no process group.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from planish.base.errors import ConfigError, PeerLost

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

DeviceName = Literal["auto", "cpu", "cuda"]

GPU_POD_VARIABLE = "PLANISH_GPU_POD"
"""Set in pods that request GPUs; these must not fall back to the CPU."""

MIN_DRIVER = 580
"""Least major version of NVIDIA's driver for CUDA 13. Source: CUDA Toolkit 13.0 release notes."""


LOOK_SECONDS = 0.5
"""Interval in which a rank that waits for words looks whether others live."""


@dataclass(frozen=True)
class Ranks:
    """This process among the processes of one job.

    Example:
        >>> Ranks(0, 1).share(5)
        range(0, 5)
    """

    rank: int
    size: int

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
        """Wait until every rank calls it."""
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


@dataclass(frozen=True)
class Grid:
    """The grid of the training processes: the rows and the part of the model of each process.

    Ranks count through tensor parallelism first, then context parallelism, data parallelism and
    pipeline stages, so that ranks with the most traffic are neighbours. Experts are distributed
    over the ranks of a stage in the same order, whole experts to each; every `ep`-th rank has the
    same.

    Example:
        >>> grid = Grid(Ranks(5, 8), tp=2, pp=2)
        >>> grid.dp, (grid.pp_rank, grid.dp_rank, grid.tp_rank)
        (2, (1, 0, 1))
        >>> grid = Grid(Ranks(5, 8), tp=2, cp=2)
        >>> grid.dp, (grid.dp_rank, grid.cp_rank, grid.tp_rank)
        (2, (1, 0, 1))
        >>> [Grid(Ranks(rank, 4), tp=2, ep=2).ep_rank for rank in range(4)]
        [0, 1, 0, 1]
    """

    ranks: Ranks = SINGLE
    """This process among all."""
    tp: int = 1
    """Ranks that share every matrix."""
    pp: int = 1
    """Stages of consecutive layers."""
    ep: int = 1
    """Ranks of a stage that share the experts of a layer; divides `tp` x `cp` x `dp`."""
    cp: int = 1
    """Ranks that share the tokens of every row."""

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.ranks.size // self.pp

    @property
    def dp(self) -> int:
        """Number of parts of each batch."""
        return self.stage_size // (self.tp * self.cp)

    @property
    def tp_rank(self) -> int:
        """Index of this rank's part of every matrix."""
        return self.ranks.rank % self.tp

    @property
    def cp_rank(self) -> int:
        """Index of this rank's part of the tokens of every row."""
        return self.ranks.rank // self.tp % self.cp

    @property
    def dp_rank(self) -> int:
        """Index of this rank's rows of every batch."""
        return self.ranks.rank // (self.tp * self.cp) % self.dp

    @property
    def pp_rank(self) -> int:
        """Index of this rank's pipeline stage."""
        return self.ranks.rank // self.stage_size

    @property
    def ep_rank(self) -> int:
        """Index of this rank's part of the experts of each layer."""
        return self.ranks.rank % self.stage_size % self.ep

    @property
    def has_first_experts(self) -> bool:
        """True on the first of the ranks that have the same experts."""
        return self.ranks.rank % self.stage_size < self.ep

    def to_json(self) -> dict[str, int]:
        """Return all sizes, as a manifest names them."""
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep}
        sizes |= {"cp": self.cp} if self.cp > 1 else {}
        return {"world": self.ranks.size, "dp": self.dp, **sizes}

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over data-parallel ranks, in place; all ranks of a model have it."""
        if self.tp_rank or self.cp_rank or self.pp_rank:
            tensor.zero_()
        return self.ranks.sum(tensor)


@dataclass(frozen=True)
class Share:
    """The rows of a batch that are here, where data-parallel ranks have some of them each.

    Ranks that share a model have the same rows. All ranks call every method alike, but `own` and
    `here`.

    Example:
        >>> import torch
        >>> [rows] = Share().every(torch.tensor([0.5, 0.0]))
        >>> rows.tolist(), Share().means(rows)
        ([0.5, 0.0], [0.25])
    """

    num_rows: int = 0
    """R, of all ranks; of no use where `rows` is None."""
    rows: Tensor | None = None
    """[B] int64, which of the R rows are here, in the order of the batch; None: all are."""
    grid: Grid = Grid()
    device: Any = "cpu"
    """Where tensors that travel between ranks lie."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over data-parallel ranks, on the CPU."""
        return self.grid.sum(tensor.to(self.device, copy=True)).cpu()

    def max(self, values: Tensor) -> float:
        """Return the largest of all ranks' values [K], none of them negative; 0 without any."""
        top = values.new_tensor(values.numpy().max(initial=0), device=self.device)
        return float(self.grid.ranks.max(top))

    def means(self, *values: Tensor) -> list[float]:
        """Return the mean of each of several [K] over all ranks; nothing where no rank has any."""
        sums = [x.double().sum() for x in values]
        total = self.sum(sums[0].new_tensor([len(values[0]), *sums]))
        return (total[1:] / total[0]).tolist() if total[0] else []

    def every(self, *per_row: Tensor) -> list[Tensor]:
        """Return [R] float64 of each of several [B], row by row those of all ranks."""
        if self.rows is None:
            return [x.double() for x in per_row]
        whole = per_row[0].new_zeros((len(per_row), self.num_rows)).double()
        for place, x in enumerate(per_row):
            whole[place, self.rows] = x.double()
        return list(self.sum(whole))

    def own(self, whole: Tensor) -> Tensor:
        """Return those of [R, ...] that belong to rows that are here."""
        return whole if self.rows is None else whole[self.rows]

    def take(self, places: Tensor) -> Share:
        """Return which rows those at some places of the batch are."""
        return self if self.rows is None else replace(self, rows=self.rows[places])

    def here(self, numbers: Tensor) -> Tensor:
        """Return the places in the batch of those of the rows `numbers` that are here, in order."""
        if self.rows is None:
            return numbers
        return (numbers[:, None] == self.rows).nonzero()[:, 1]

    def join(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Put the selected tokens of all rows one after another.

        Args:
            values: [B, S], any number.
            mask: [B, S] bool.

        Returns:
            [T], and [R] int64 with the tokens of each row.
        """
        [counts] = self.every(mask.sum(1))
        lengths = counts.long()
        starts = self.own(lengths.cumsum(0) - lengths)
        flat = values.new_zeros(int(lengths.sum()))
        flat[(starts[:, None] + mask.cumsum(1) - 1)[mask]] = values[mask]
        return self.sum(flat), lengths


ALONE = Share()
"""All rows of a batch in one process."""


def grid_fault(size: int, *, tp: int, pp: int, ep: int, cp: int, replicas: int = 1) -> str:
    """Return why this number of training processes does not fit the grid; "" if it fits."""
    if size % replicas:
        return (
            f"`train.replicas` must divide the number of training processes, got {replicas} for "
            f"{size}; 1 shares one model over all of them"
        )
    if size % (tp * pp * cp):
        return (
            "`train.tensor_parallel` x `train.pipeline_parallel` x `train.context_parallel` must "
            f"divide the number of training processes, got {tp} x {pp} x {cp} for {size}; "
            "`train.num_processes` sets it"
        )
    if size // pp % ep:
        return (
            "`train.expert_parallel` must divide the number of training processes of a pipeline "
            f"stage, got {ep} for {size // pp}; lower it, or raise `train.num_processes`"
        )
    return ""


_PACKAGES = {
    "megatron": ("megatron", "`pip install 'planish[megatron]'`"),
    "nixl": ("nixl_cu13", "`pip install 'planish[rollout]'`"),
    **dict.fromkeys(
        ("vllm", "vllm_disagg"),
        ("vllm", "`pip install 'planish[rollout]'`, or `make engines` where there is no GPU,"),
    ),
}
"""Choice of a setting -> the module that it needs, and the way to install it."""


def package_fault(key: str, choice: str) -> str:
    """Return why a choice is not available in this environment; "" if it is."""
    module, remedy = _PACKAGES.get(choice, ("", ""))
    if not module or find_spec(module):
        return ""
    return (
        f"`{key}` = {choice!r} must find the package {module!r} in this environment, got none; "
        f"{remedy} installs it"
    )


def pick_device(name: DeviceName, rank: int = 0) -> torch.device:
    """Return the device of a rank; `auto` takes an accelerator if there is one.

    Raises:
        ConfigError: `name` or the pod requires an accelerator, and this process sees none.
    """
    import torch

    if name == "cpu":
        return torch.device("cpu")
    # A driver that is too old counts as no device, as torch tells by a warning only.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return torch.device("cuda", rank % count)
    fault = driver_fault() if torch.version.cuda else ""
    if os.environ.get(GPU_POD_VARIABLE):
        raise ConfigError(
            f"`device` = {name!r} must find an accelerator in a pod that asked for GPUs, got none: "
            + (fault or "the node gives it none, or the image has a torch without CUDA")
        )
    if name == "auto":
        return torch.device("cpu")
    raise ConfigError(
        "`device` must be 'auto' or 'cpu' where a process sees no accelerator, got 'cuda'; "
        + (fault or "give the pod or machine a GPU and its driver, and a torch with CUDA")
        + " (`planish doctor`)"
    )


def driver_fault(place: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return why the NVIDIA driver of this machine cannot run CUDA 13; "" if it can or is unknown.

    The kernel module has its version at `place`; containers see the version of their node.
    """
    try:
        found = re.search(r"\b(\d{3,})\.\d+", place.read_text("utf-8", "replace"))
    except OSError:
        return ""
    if found is None or int(found[1]) >= MIN_DRIVER:
        return ""
    return (
        f"the NVIDIA driver must be {MIN_DRIVER} or newer for CUDA 13, which torch and vLLM are "
        f"built with, got {found[0]}; update the driver of the node"
    )


def num_devices(name: DeviceName) -> int:
    """Return how many accelerators `pick_device` chooses from, 1 for the CPU."""
    import torch

    return 1 if pick_device(name).type == "cpu" else torch.cuda.device_count()


def local_rank() -> int:
    """Return the index of this process on its machine, as the launcher (torchrun) numbers it."""
    return int(os.environ["LOCAL_RANK"])


def join(
    device: torch.device, *, timeout_seconds: float, part: tuple[Any, Ranks] | None = None
) -> Ranks:
    """Join the process group that the launcher (torchrun) describes in the environment.

    `part` is a store in which this process meets some of the processes; None takes all processes.
    """
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    here: dict[str, Any] = {}
    if part is not None:
        store, ranks = part
        here = {"store": store, "rank": ranks.rank, "world_size": ranks.size}
        # An engine that joins them reads this.
        os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)}
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(_backend(device), timeout=timeout, **here)
    return Ranks(dist.get_rank(), dist.get_world_size())


def launcher_store(timeout_seconds: float) -> tuple[Any, Ranks]:
    """Return the store of the launcher (torchrun), and this rank among all that it started."""
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=timeout_seconds)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    return store, Ranks(rank, size)


class Words:
    """Short messages between ranks through a store of torch, such as that of the launcher.

    Every method raises `PeerLost` if the store does not answer.
    """

    def __init__(self, store: Any, owner: str) -> None:
        """Take a store, and in `owner` the process that keeps it open, for errors."""
        self.store, self.owner = store, owner

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store."""
        try:
            return getattr(self.store, method)(*arguments)
        except RuntimeError as error:
            raise PeerLost(
                f"{self.owner} must keep its store open, got {str(error).splitlines()[0]!r}; has "
                "its process ended?"
            ) from error

    def tell(self, key: str, words: bytes | str) -> None:
        """Store words under a key."""
        self.call("set", key, words)

    def read(self, key: str) -> bytes:
        """Return the words under a key, empty if there are none."""
        words: bytes = self.call("get", key) if self.call("check", [key]) else b""
        return words

    def wait(
        self, keys: Sequence[str], deadline: float, look: Callable[[], None] = lambda: None
    ) -> bool:
        """Return whether there are words under all keys before `deadline`, a monotonic time.

        `look` is called twice a second meanwhile; an error in it ends the wait.
        """
        started = looked = time.monotonic()
        while not self.call("check", list(keys)):
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                looked = now
                look()
            if now > deadline:
                return False
            # Sleep shortly at first, because training waits for the plan of a save.
            time.sleep(min(0.02, max(0.0001, (now - started) / 10)))
        return True


def open_group(
    store: Any, ranks: Ranks, device: torch.device, *, timeout_seconds: float
) -> ProcessGroup:
    """Return a process group beside the default one; its processes meet in a store.

    Its tensors lie on `device`. Torch does not register the group: call its own methods.
    Source: vLLM 0.32, `distributed/utils.py`, makes groups beside the default one in this way.
    """
    from torch._C import _distributed_c10d as c10d

    limit = timedelta(seconds=timeout_seconds)
    place = store, ranks.rank, ranks.size
    kind = c10d.ProcessGroup.BackendType.GLOO
    if device.type == "cuda":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = limit
        kind = c10d.ProcessGroup.BackendType.NCCL
        backend: c10d.Backend = c10d.ProcessGroupNCCL(*place, options)
    else:
        backend = c10d.ProcessGroupGloo(*place, limit)
    backend._set_sequence_number_for_group()
    group = c10d.ProcessGroup(*place)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group


def num_trainers(split: str, size: int) -> int:
    """Return how many of `size` processes train; the others sample ahead of them.

    `split` is that of `TrainConfig`; 0 if it does not divide the processes.

    Example:
        >>> num_trainers("3:1", 32), num_trainers("3:1", 6)
        (8, 0)
    """
    samplers, trainers = map(int, split.split(":"))
    return 0 if size % (samplers + trainers) else size // (samplers + trainers) * trainers


def _backend(device: torch.device) -> str:
    # Control messages and metadata travel over gloo, tensors over NCCL.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def leave() -> None:
    """Leave the process group, if this process is in one."""
    import torch.distributed as dist

    data_mesh.cache_clear()
    neighbours.cache_clear()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@functools.cache
def data_mesh(grid: Grid, device: torch.device, replicas: int, timeout_seconds: float) -> Any:
    """Return the `DeviceMesh` of a grid with one stage; a process makes it once.

    With replicas it has two axes, and neighbours on the second one, `shard`, share a model. A
    process without peers forms a group of its own. `timeout_seconds` applies to new groups.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
    size = grid.ranks.size
    if replicas == 1:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("dp",))
    # Groups that `init_device_mesh` makes have torch's own timeout.
    make: Any = dist.new_subgroups_by_enumeration
    places, limit = torch.arange(size).view(replicas, -1), timedelta(seconds=timeout_seconds)
    groups = [make(axis.tolist(), timeout=limit)[0] for axis in (places.T, places)]
    return DeviceMesh.from_group(groups, device.type, places, mesh_dim_names=("replicate", "shard"))


@functools.cache
def neighbours(size: int, timeout_seconds: float) -> Any:
    """Return this rank's process group of `size` neighbours; a process makes it once."""
    import torch.distributed as dist

    make: Any = dist.new_subgroups
    return make(size, timeout=timedelta(seconds=timeout_seconds))[0]
