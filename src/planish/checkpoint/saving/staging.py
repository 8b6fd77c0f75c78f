"""Staging: the copy from tensors into a buffer of file contents, during which training waits.

A first copy into fresh memory costs five to seven times as much as one into memory that is mapped,
so every page of a buffer is touched once and the buffer is used again. The uploading process gets a
buffer as a file descriptor: no name in /dev/shm could outlive a killed process.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (asynchronous save, ping-pong buffers).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from planish.base.errors import SaveFailed
from planish.checkpoint.plan.files import PAGE, RankPlan

if TYPE_CHECKING:
    import torch

    from planish.checkpoint.format.items import LocalItem

logger = logging.getLogger(__name__)

MOST_BUFFERS = 2
MEMORY_SHARE = 0.5
"""Share of the free memory that two buffers may take; if they need more, there is one buffer."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, Linux 5.14."""


class _Copy(NamedTuple):
    """Bytes [start, stop) of an item, and the part of the buffer that gets them."""

    target: torch.Tensor
    item: int
    start: int
    stop: int
    is_whole: bool
    """True if the bytes are the whole item and its numbers are real."""


class SharedBuffer:
    """Anonymous memory with a file descriptor; all pages present from the start."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("planish-staging", os.MFD_CLOEXEC)
        self.plan: RankPlan | None = None
        self.copies: list[_Copy] = []
        self._tensor: torch.Tensor | None = None
        self._is_pinned = False
        try:
            os.ftruncate(self.fd, size)
            self.view = memoryview(mmap.mmap(self.fd, size))
            _touch(self.view)
        except OSError as error:
            os.close(self.fd)
            raise MemoryError(
                f"a staging buffer must fit into memory, got {size} bytes: {error}"
            ) from error

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a 1-D uint8 tensor, page-locked if this process uses a CUDA device."""
        if self._tensor is None:
            import torch

            self._tensor = torch.frombuffer(self.view, dtype=torch.uint8)
            if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                code = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                    self._tensor.data_ptr(), self.size, 0
                )
                self._is_pinned = int(code) == 0
        return self._tensor

    def free(self) -> None:
        """Close the descriptor; the memory is freed once no view of it is left."""
        if self.fd < 0:
            return
        if self._is_pinned:
            import torch

            torch.cuda.cudart().cudaHostUnregister(  # type: ignore[no-untyped-call]
                self.tensor.data_ptr()
            )
        os.close(self.fd)
        self.fd = -1
        self.plan, self.copies, self._tensor = None, [], None
        self.view = memoryview(b"")


def _touch(view: memoryview) -> None:
    """Make every page present and writable in this process."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    libc = ctypes.CDLL(None, use_errno=True)
    # ctypes releases the GIL during the call, so that other threads run meanwhile.
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), _POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number in (12, 14):  # ENOMEM, EFAULT: no memory left
        raise OSError(number, os.strerror(number))
    for start in range(0, len(view), PAGE):
        view[start] = 0


def free_memory_bytes() -> int:
    """Return the bytes that this process may still take: the smaller of machine and cgroup."""
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    folder = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((folder / "memory.max").read_text())
        free = min(free, limit - int((folder / "memory.current").read_text()))
    return free


class StagingPool:
    """At most two buffers of one size, handed out in turn."""

    def __init__(self, *, free_memory: Callable[[], int] = free_memory_bytes) -> None:
        self._free_memory = free_memory
        self._changed = threading.Condition()
        self._size = 0
        self.limit = MOST_BUFFERS
        """Number of buffers allowed at the present size."""
        self._free: list[SharedBuffer] = []
        self._used: list[SharedBuffer] = []

    @property
    def num_buffers(self) -> int:
        """Number of buffers that have memory now."""
        with self._changed:
            return len(self._free) + len(self._used)

    def acquire(self, size: int, timeout_s: float) -> SharedBuffer:
        """Return a warm buffer of at least `size` bytes; `SaveFailed` if all stay in use."""
        with self._changed:
            self._fit(size)
            if not self._changed.wait_for(
                lambda: self._free or len(self._used) < self.limit, timeout_s
            ):
                raise SaveFailed("a staging buffer must become free within `timeout_s`")
            buffer = self._free.pop(0) if self._free else SharedBuffer(self._size)
            self._used.append(buffer)
            return buffer

    def release(self, buffer: SharedBuffer) -> None:
        """Take a buffer back; free it if its size is no longer the wanted one."""
        with self._changed:
            self._used.remove(buffer)
            self._keep(buffer)

    def warm_one_more(self) -> None:
        """Allocate the second buffer, if there may be one and memory suffices."""
        if self.num_buffers < self.limit:
            # The allocation takes no lock, so that no other thread waits for it.
            with contextlib.suppress(MemoryError):
                spare = SharedBuffer(self._size)
                with self._changed:
                    self._keep(spare)

    def close(self) -> None:
        """Free all memory; a buffer in use is freed when it is released."""
        with self._changed:
            self._size = self.limit = 0
            while self._free:
                self._free.pop().free()

    def _keep(self, buffer: SharedBuffer) -> None:
        if buffer.size == self._size and len(self._free) + len(self._used) < self.limit:
            self._free.append(buffer)
        else:
            buffer.free()
        self._changed.notify_all()

    def _fit(self, size: int) -> None:
        """Set the size and the number of buffers."""
        size = max(1, -(-size // PAGE)) * PAGE
        if size == self._size:
            return
        self._size, self.limit = size, MOST_BUFFERS
        while self._free:
            self._free.pop().free()
        held = sum(buffer.size for buffer in self._used)
        free = self._free_memory()
        if MOST_BUFFERS * size - held > MEMORY_SHARE * free:
            logger.warning(
                "staging falls back to one buffer bytes=%d free_bytes=%d: a save waits for the "
                "one before it",
                size,
                free,
            )
            self.limit = 1


def copy_tensors(plan: RankPlan, items: Sequence[LocalItem], buffer: SharedBuffer) -> None:
    """Copy the items of a plan, and the headers of its files, to their places in the buffer.

    The buffer keeps its list of copies (`SharedBuffer.copies`) for the next save of the same plan.
    """
    import torch

    for start, file in zip(plan.starts, plan.files, strict=True):
        buffer.view[start : start + len(file.header)] = file.header
    if buffer.plan is not plan:
        buffer.copies = list(_copies(plan, items, buffer.tensor))
        buffer.plan = plan
    data = {copy.item: _data_of(items[copy.item]) for copy in buffer.copies}
    with torch.no_grad(), _side_stream(data.values()) as finish:
        sources = [
            data[item]
            if is_whole
            else _real(part_of(data[item], start, stop)).reshape(target.shape)
            for target, item, start, stop, is_whole in buffer.copies
        ]
        if sources:
            torch._foreach_copy_(
                [copy.target for copy in buffer.copies], sources, finish is not None
            )
        if finish is not None:
            finish()


def _copies(plan: RankPlan, items: Sequence[LocalItem], memory: torch.Tensor) -> Iterator[_Copy]:
    for begin, file in zip(plan.starts, plan.files, strict=True):
        columns = (file.items, file.starts, file.stops, file.offsets)
        for item, start, stop, offset in zip(*(c.tolist() for c in columns), strict=True):
            data = _data_of(items[item])
            part = _real(part_of(data, start, stop))
            first = begin + offset
            target = memory[first : first + stop - start].view(part.dtype).view(part.shape)
            yield _Copy(target, item, start, stop, part is data)


def _data_of(item: LocalItem) -> torch.Tensor:
    assert item.data is not None, "items without data are for simulations"
    return item.data


def part_of(data: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the elements of a tensor whose row-major bytes are [start, stop), as a view.

    The result is a copy only if the tensor is not contiguous and the range cuts a row.
    """
    width = data.element_size()
    if start == 0 and stop == data.numel() * width:
        return data
    if start % width or stop % width:
        import torch

        return data.contiguous().view(-1).view(torch.uint8)[start:stop]
    first, last = start // width, stop // width
    if data.is_contiguous():
        return data.view(-1)[first:last]
    while data.dim() > 1 and data.shape[0] == 1:
        data = data[0]
    inner = data.numel() // data.shape[0]
    if first % inner == 0 and last % inner == 0:
        return data.narrow(0, first // inner, (last - first) // inner)
    return data.reshape(-1)[first:last]


def _real(part: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of reals, because files align only the reals."""
    if not part.is_complex():
        return part
    import torch

    return torch.view_as_real(part.resolve_conj())


@contextlib.contextmanager
def _side_stream(data: Iterable[torch.Tensor]) -> Iterator[Callable[[], None] | None]:
    """Run the body on a separate CUDA stream; yield a function that waits for it, None on CPU."""
    device = next((tensor.device for tensor in data if tensor.is_cuda), None)
    if device is None:
        yield None
        return
    import torch

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream.synchronize
