"""The systems that take turns: this project, torch's own ways, and peers on the same store.

Names: `ours`, `ours_paced` (the upload is spread over `PACE_SECONDS`), `ours_sync` (returns when
the checkpoint is durable); B1 `dcp_file`,
B2 `dcp_async` (thread), B2' `dcp_async_reused` (one stager for all saves), B2''
`dcp_async_process`; B3 `dcp_s3torch` (`dcp_s3torch_async`: the same behind training, one stager);
B4 `dcp_s3fs`; B5 `bytecheckpoint`; B6 `torch_save` (rank 0 gathers, `torch.save`s and uploads by
the SDK). For W3, `dcp_gather` and `dcp_gather_async` first gather every flat slice on all ranks,
as FSDP with flat parameters does; the second has one stager.

Every system saves a module and its optimizer (its own way to a state dict is part of the save) and
loads in place. torch's loads read into the tensors of the state dict; what an application does
afterwards (`set_state_dict`) is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.checkpoint.pending import Pending, System
from tests.benchmarks.checkpoint.schedule import PACE_SECONDS
from tests.benchmarks.checkpoint.workloads import State, flat_ranges

REGION = "us-east-1"
FILE_SYSTEMS = frozenset(
    {"dcp_file", "dcp_async", "dcp_async_reused", "dcp_async_process", "bytecheckpoint"}
    | {"dcp_gather", "dcp_gather_async"}
)
"""Systems that write to a folder; the others write to the store."""


class Ours:
    """This project."""

    def __init__(
        self,
        state: State,
        *,
        is_async: bool = True,
        pace_s: float = 0.0,
    ) -> None:
        from planish.checkpoint.adapters.placement import FlatShard

        self.is_async, self.pace_s = is_async, pace_s
        self.framework, self.step = state.framework, 0
        self.state: dict[str, Any] = {"model": state.model}
        if state.optimizer is not None:
            self.state["optimizer"] = state.optimizer
        if state.flat:
            shapes = {name: tuple(p.shape) for name, p in state.model.named_parameters()}
            ranges = list(flat_ranges(state.model, dist.get_rank(), state.world))
            self.state["optimizer"] = {
                f"{name}.{moment}": FlatShard(
                    f"{name}.{moment}", shapes[name], (0,) * len(shapes[name]), shapes[name],
                    first, last, data[at : at + last - first],
                )
                for name, first, last, at in ranges
                for moment, data in state.flat.items()
            }  # fmt: skip

    def save(self, path: str) -> Pending:
        from planish.checkpoint import api

        self.step += 1
        pending = Pending()
        handle = api.save(
            path, self.state, self.framework, self.is_async, step=self.step,
            pace_s=self.pace_s,
        )  # fmt: skip

        def wait() -> None:
            pending.details = stages(handle.result())

        return pending.watch(wait)

    def load(self, path: str) -> dict[str, Any]:
        from planish.checkpoint import api

        return stages(api.load(path, self.state, self.framework))

    def close(self) -> None:
        from planish.checkpoint.save.engine import default_engine

        default_engine().close()


def stages(info: Any) -> dict[str, Any]:
    """Return the seconds per stage of this rank."""
    found: dict[str, float] = {}
    mine = [r for r in info.timings.records if r.rank == dist.get_rank()]
    for record in mine:
        name = f"{record.op}.{record.stage}"
        found[name] = found.get(name, 0.0) + record.seconds
    return {"stages": found}


class Dcp:
    """`torch.distributed.checkpoint` on a file system, synchronous; the base of its variants."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.group = dist.new_group(backend="gloo")

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        if self.state.optimizer is None:
            return {"model": get_model_state_dict(self.state.model)}
        model, optimizer = get_state_dict(self.state.model, self.state.optimizer)
        return {"model": model, "optim": optimizer}

    def writer(self, path: str) -> Any:
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(path)

    def reader(self, path: str) -> Any:
        from torch.distributed.checkpoint import FileSystemReader

        return FileSystemReader(path)

    def save(self, path: str) -> Pending:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state_dict(), storage_writer=self.writer(path), process_group=self.group)
        pending = Pending()
        pending.finish()
        return pending

    def load(self, path: str) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.state_dict(), storage_reader=self.reader(path), process_group=self.group)
        return {}

    def close(self) -> None:
        pass


class DcpS3Torch(Dcp):
    """DCP with the writer and reader of `s3torchconnector`; the endpoint is AWS_ENDPOINT_URL."""

    def writer(self, path: str) -> Any:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageWriter

        return S3StorageWriter(REGION, path, S3ClientConfig(force_path_style=True))

    def reader(self, path: str) -> Any:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageReader

        return S3StorageReader(REGION, path, S3ClientConfig(force_path_style=True))


class DcpS3fs(Dcp):
    """DCP with torch's fsspec writer and reader over `s3fs`."""

    def options(self) -> dict[str, Any]:
        return {
            "key": os.environ["AWS_ACCESS_KEY_ID"],
            "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
            "client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
        }

    def writer(self, path: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(path, sync_files=False, **self.options())

    def reader(self, path: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(path, **self.options())


class DcpAsync(Dcp):
    """`dcp.async_save` to a file system."""

    def __init__(self, state: State, *, reused: bool = False, process: bool = False) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        super().__init__(state)
        self.kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        # The options with which torch makes its default stager where there is no accelerator.
        options = StagingOptions(False, False, False, False)
        self.stager = DefaultStager(options) if reused else None

    def save(self, path: str) -> Pending:
        import torch.distributed.checkpoint as dcp

        future = dcp.async_save(
            self.state_dict(),
            storage_writer=self.writer(path),
            process_group=self.group,
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )
        return Pending().watch(future.result)

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class DcpS3TorchAsync(DcpAsync, DcpS3Torch):
    """`dcp.async_save` with the writer of `s3torchconnector` and one stager."""

    def __init__(self, state: State) -> None:
        DcpAsync.__init__(self, state, reused=True)

    writer = DcpS3Torch.writer
    reader = DcpS3Torch.reader


class _Gathering(Dcp):
    """Flat slices become whole tensors on every rank, then a state dict like DDP's."""

    def state_dict(self) -> dict[str, Any]:
        model = {name: p.detach() for name, p in self.state.model.named_parameters()}
        moments: dict[str, Tensor] = {}
        for moment, mine in self.state.flat.items():
            whole = torch.empty(self.state.world * mine.numel())
            dist.all_gather_into_tensor(whole, mine, group=self.group)
            start = 0
            for name, value in model.items():
                moments[f"{name}.{moment}"] = whole[start : start + value.numel()].view_as(value)
                start += value.numel()
        return {"model": model, "optim": moments}

    def load(self, path: str) -> dict[str, Any]:
        raise NotImplementedError("only saves are compared")


class DcpGather(_Gathering):
    """Gather, then a synchronous save."""


class DcpGatherAsync(_Gathering, DcpAsync):
    """Gather, then `dcp.async_save` with one stager."""

    def __init__(self, state: State) -> None:
        DcpAsync.__init__(self, state, reused=True)


class TorchSave:
    """`torch.save` on rank 0 and an upload by the SDK; every rank downloads the whole to load."""

    def __init__(self, state: State) -> None:
        from minio import Minio

        self.state = state
        endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
        keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        self.client = Minio(endpoint, *keys, secure=False, region=REGION)
        self.file = Path(os.environ["BENCH_SCRATCH"]) / f"torch-save-{dist.get_rank()}.pt"

    def whole(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.state.model, self.state.optimizer, options=options)
        return {"model": model, "optim": optimizer}

    def save(self, path: str) -> Pending:
        whole = self.whole()
        if dist.get_rank() == 0:
            bucket, _, key = path.removeprefix("s3://").partition("/")
            torch.save(whole, self.file)
            self.client.fput_object(bucket, key, str(self.file))
            self.file.unlink()
        dist.barrier()
        pending = Pending()
        pending.finish()
        return pending

    def load(self, path: str) -> dict[str, Any]:
        bucket, _, key = path.removeprefix("s3://").partition("/")
        self.client.fget_object(bucket, key, str(self.file))
        found = torch.load(self.file, mmap=True, weights_only=True)
        self.file.unlink()
        self.state.model.load_state_dict(found["model"])
        moments = found["optim"]["state"]
        for name, parameter in self.state.model.named_parameters():
            for moment, value in self.state.optimizer.state[parameter].items():  # type: ignore[union-attr]
                value.copy_(moments[name][moment])
        return {}

    def close(self) -> None:
        pass


class ByteCheckpoint:
    """The open release of ByteCheckpoint, asynchronous, to a folder."""

    def __init__(self, state: State) -> None:
        self.state, self.step = state, 0
        self.saved: dict[str, int] = {}

    def parts(self) -> dict[str, Any]:
        optimizer = self.state.optimizer
        parts = {"model": self.state.model, "optimizer": optimizer}
        return {name: part for name, part in parts.items() if part is not None}

    def save(self, path: str) -> Pending:
        import bytecheckpoint

        self.step += 1
        pending = Pending()
        bytecheckpoint.save(
            path, self.parts(), self.state.framework, fast_saving=True,
            global_steps=self.step, callback=pending.finish,
            ignore_append_global_steps_to_folder=True,
        )  # fmt: skip
        if dist.get_rank() != 0:
            # Only rank 0 hears of the end, which is that of all ranks.
            pending.finish()
        return pending

    def load(self, path: str) -> dict[str, Any]:
        import bytecheckpoint

        bytecheckpoint.load(path, self.parts(), self.state.framework, fast_loading=True)
        return {}

    def close(self) -> None:
        pass


SYSTEMS: dict[str, Callable[[State], System]] = {
    "ours": Ours,
    "ours_paced": lambda state: Ours(state, pace_s=PACE_SECONDS),
    "ours_sync": lambda state: Ours(state, is_async=False),
    "dcp_file": Dcp,
    "dcp_async": DcpAsync,
    "dcp_async_reused": lambda state: DcpAsync(state, reused=True),
    "dcp_async_process": lambda state: DcpAsync(state, process=True),
    "dcp_s3torch": DcpS3Torch,
    "dcp_s3torch_async": DcpS3TorchAsync,
    "dcp_s3fs": DcpS3fs,
    "dcp_gather": DcpGather,
    "dcp_gather_async": DcpGatherAsync,
    "torch_save": TorchSave,
    "bytecheckpoint": ByteCheckpoint,
}


def open_system(name: str, state: State) -> System:
    """Open a system on this rank; all ranks must at once."""
    return SYSTEMS[name](state)
