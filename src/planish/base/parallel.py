"""Process groups and the few collectives that training needs.

A single process never imports torch.distributed: `Ranks(0, 1)` needs no process group.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
"""Environment variable of pods that request GPUs; such a pod must not fall back to the CPU."""

MIN_DRIVER = 580
"""Smallest major version of NVIDIA's driver for CUDA 13. Source: CUDA Toolkit 13.0 release
notes."""


LOOK_SECONDS = 0.5
"""Interval in which a rank that waits for words looks whether others live."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of processes.

    Example:
        >>> Ranks(0, 1).share(5)
        range(0, 5)
    """

    rank: int
    size: int
    group: Any = None
    """Process group of the collectives; None means the default group."""

    @property
    def is_first(self) -> bool:
        """True on the process that writes reports and manifests."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Return the indices of this rank's items: every `size`-th one of `count`."""
        return range(self.rank, count, self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks in place; return it."""
        return self._reduce(tensor, "SUM")

    def max(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum of a tensor over all ranks in place; return it."""
        return self._reduce(tensor, "MAX")

    def barrier(self) -> None:
        """Wait until every rank calls it."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier(group=self.group)

    def _reduce(self, tensor: Tensor, operation: str) -> Tensor:
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation), group=self.group)
        return tensor


SINGLE = Ranks(0, 1)
"""A job of one process."""


@dataclass(frozen=True)
class Grid:
    """The parallel layout of training: each process's part of the model and of the batch.

    Ranks count through tensor parallelism first, then context parallelism, data parallelism and
    pipeline stages, so that ranks with the most traffic are neighbours. The experts of a layer are
    distributed over the ranks of a stage in the same order, whole experts to each rank. Every
    `ep`-th rank of a stage has the same experts.

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
    """Rank of this process, and number of all processes."""
    tp: int = 1
    """Tensor parallelism: ranks that share every matrix."""
    pp: int = 1
    """Pipeline parallelism: stages of consecutive layers."""
    ep: int = 1
    """Expert parallelism: ranks of a stage that share the experts of a layer; divides `tp` x `cp` x
    `dp`."""
    cp: int = 1
    """Context parallelism: ranks that share the tokens of every row."""

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.ranks.size // self.pp

    @property
    def dp(self) -> int:
        """Data parallelism: number of parts of each batch."""
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
        """True on the first of all ranks with the same experts."""
        return self.ranks.rank % self.stage_size < self.ep

    def to_json(self) -> dict[str, int]:
        """Return all sizes in the form of a manifest."""
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep}
        sizes |= {"cp": self.cp} if self.cp > 1 else {}
        return {"world": self.ranks.size, "dp": self.dp, **sizes}

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over data-parallel ranks in place; return it. All ranks of a model have
        equal values.
        """
        if self.tp_rank or self.cp_rank or self.pp_rank:
            tensor.zero_()
        return self.ranks.sum(tensor)


@dataclass(frozen=True)
class Share:
    """The rows of a batch that this rank has, if data-parallel ranks share the batch.

    Ranks that share a model have the same rows. All ranks must call every method together, except
    `own` and `here`.

    Example:
        >>> import torch
        >>> [rows] = Share().every(torch.tensor([0.5, 0.0]))
        >>> rows.tolist(), Share().means(rows)
        ([0.5, 0.0], [0.25])
    """

    num_rows: int = 0
    """R, number of rows of all ranks; not used if `rows` is None."""
    rows: Tensor | None = None
    """[B] int64, numbers of this rank's rows among the R rows, in the order of its batch; None: all
    rows."""
    grid: Grid = Grid()
    device: Any = "cpu"
    """Device for tensors that collectives send."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over data-parallel ranks, on the CPU."""
        return self.grid.sum(tensor.to(self.device, copy=True)).cpu()

    def max(self, values: Tensor) -> float:
        """Return the largest value of all ranks' `values` [K], which are not negative; 0 if there
        is none.
        """
        top = values.new_tensor(values.numpy().max(initial=0), device=self.device)
        return float(self.grid.ranks.max(top))

    def means(self, *values: Tensor) -> list[float]:
        """Return the mean over all ranks of each of several [K]; an empty list if no rank has
        values.
        """
        sums = [x.double().sum() for x in values]
        total = self.sum(sums[0].new_tensor([len(values[0]), *sums]))
        return (total[1:] / total[0]).tolist() if total[0] else []

    def every(self, *per_row: Tensor) -> list[Tensor]:
        """Return [R] float64 for each of several [B]: the values of all ranks' rows, in order."""
        if self.rows is None:
            return [x.double() for x in per_row]
        whole = per_row[0].new_zeros((len(per_row), self.num_rows)).double()
        for place, x in enumerate(per_row):
            whole[place, self.rows] = x.double()
        return list(self.sum(whole))

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor [R, ...]."""
        return whole if self.rows is None else whole[self.rows]

    def take(self, places: Tensor) -> Share:
        """Return the share for the rows at some places of the batch."""
        return self if self.rows is None else replace(self, rows=self.rows[places])

    def here(self, numbers: Tensor) -> Tensor:
        """Return the places in this rank's batch of those rows `numbers` that it has, in order."""
        if self.rows is None:
            return numbers
        return (numbers[:, None] == self.rows).nonzero()[:, 1]

    def join(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Concatenate the selected tokens of all rows of all ranks.

        Args:
            values: [B, S], any number.
            mask: [B, S] bool.

        Returns:
            [T] values, and [R] int64 with the number of tokens of each row.
        """
        [counts] = self.every(mask.sum(1))
        lengths = counts.long()
        starts = self.own(lengths.cumsum(0) - lengths)
        flat = values.new_zeros(int(lengths.sum()))
        flat[(starts[:, None] + mask.cumsum(1) - 1)[mask]] = values[mask]
        return self.sum(flat), lengths


ALONE = Share()
"""A share with all rows of the batch, for a job of one process."""


def grid_fault(size: int, *, tp: int, pp: int, ep: int, cp: int, replicas: int = 1) -> str:
    """Return why the sizes do not fit `size` training processes; "" if they fit."""
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
    **dict.fromkeys(("transformers", "disagg"), ("transformers", "`pip install 'planish[train]'`")),
    "nixl": ("nixl_cu13", "`pip install 'planish[rollout]'`"),
    **dict.fromkeys(
        ("vllm", "vllm_disagg"),
        ("vllm", "`pip install 'planish[rollout]'`, or `make engines` where there is no GPU,"),
    ),
}
"""Map from a setting's value to the module that it needs and the command that installs it."""


def package_fault(key: str, choice: str) -> str:
    """Return why a value is not available in this environment; "" if it is."""
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
    # For a driver that is too old, torch only warns and reports no device.
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
    """Return the number of accelerators that `pick_device` chooses from; 1 for the CPU."""
    import torch

    return 1 if pick_device(name).type == "cpu" else torch.cuda.device_count()


def local_rank() -> int:
    """Return the index of this process on its machine, as the launcher (torchrun) numbers it."""
    return int(os.environ["LOCAL_RANK"])


def join(
    device: torch.device, *, timeout_seconds: float, part: tuple[Any, Ranks] | None = None
) -> Ranks:
    """Join the process group that the launcher (torchrun) describes in the environment.

    `part` limits the group to some processes: the store in which they meet, and this process's rank
    among them. None takes all processes.
    """
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    here: dict[str, Any] = {}
    if part is not None:
        store, ranks = part
        here = {"store": store, "rank": ranks.rank, "world_size": ranks.size}
        # An engine that joins these processes reads the two variables.
        os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)}
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(_backend(device), timeout=timeout, **here)
    return Ranks(dist.get_rank(), dist.get_world_size())


def launcher_store(timeout_seconds: float) -> tuple[Any, Ranks]:
    """Return the store of the launcher (torchrun), and this rank among all its processes."""
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
    """Return a second process group beside the default one; its processes meet in a store.

    Tensors that the group exchanges lie on `device`. Torch does not register the group, so callers
    use the group's own methods. Source: vLLM 0.32, `distributed/utils.py`, makes groups beside the
    default one in this way.
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
    """Return how many of `size` processes train; the others sample the next iteration meanwhile.

    `split` is `train.split`, e.g. "3:1" for samplers to trainers; 0 if it does not divide `size`.

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
    """Return the `DeviceMesh` of a grid with one stage; each process makes it once.

    With replicas the mesh has two axes; the ranks along the second axis, `shard`, share a model. A
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
    # Groups of `init_device_mesh` would have torch's default timeout.
    make: Any = dist.new_subgroups_by_enumeration
    places, limit = torch.arange(size).view(replicas, -1), timedelta(seconds=timeout_seconds)
    groups = [make(axis.tolist(), timeout=limit)[0] for axis in (places.T, places)]
    return DeviceMesh.from_group(groups, device.type, places, mesh_dim_names=("replicate", "shard"))


@contextmanager
def peers(who: str) -> Iterator[None]:
    """Turn errors in a collective of `who` into PeerLost."""
    import torch.distributed as dist

    try:
        yield
    except RuntimeError as error:
        # Most errors of gloo have no class of their own, but name the file of gloo that found them.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise PeerLost(f"{who} must all live and answer in time, got {error}") from error


def patient(ranks: Ranks, timeout_seconds: float) -> Ranks:
    """Return the ranks with a process group of their own, whose collectives may take this long."""
    if ranks.size == 1:
        return ranks
    return replace(ranks, group=neighbours(ranks.size, timeout_seconds))


@functools.cache
def neighbours(size: int, timeout_seconds: float) -> Any:
    """Return this rank's process group of `size` neighbours; each process makes it once."""
    import torch.distributed as dist

    make: Any = dist.new_subgroups
    return make(size, timeout=timedelta(seconds=timeout_seconds))[0]
