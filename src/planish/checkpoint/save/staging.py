"""The copy that a save stops training for: from tensors to their places in the files.

`StagingPool` has the memory, `Stager` copies every tensor straight to its final position in the
file that it becomes part of, `LazyCopies` lets a part of that go on until the optimizer steps.
Saves that the caller waits for are not staged: `DirectSource`.

A first copy into fresh memory costs five to seven times as much as one into memory that is mapped,
so buffers are touched once and used again. They are shared with the uploading process by file
descriptor: nothing has a name in /dev/shm that could outlive a killed process.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (asynchronous save, ping-pong buffers).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planish.base.errors import SaveFailed

if TYPE_CHECKING:
    import torch

    from planish.checkpoint.format.items import LocalItem
    from planish.checkpoint.plan.files import RankPlan

logger = logging.getLogger(__name__)

PAGE = 4096
"""Files begin at multiples of this in a buffer, bytes."""
MEMORY_SHARE = 0.5
"""Two buffers may take this share of the free memory; beyond it there is one."""
NOTIFY_BYTES = 32 << 20
"""The uploader is told of progress in steps of at least this many bytes."""
PATIENCE_SECONDS = 0.25
"""... but not before the copy has gone on for so long: where cores are shared, an upload that
begins earlier slows down the copy that training waits for (by 1.5x with 2 cores for 4 ranks)."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, Linux 5.14."""
_numbers = itertools.count(1)


class SharedBuffer:
    """Anonymous memory with a file descriptor; all pages present from the start.

    Example:
        >>> buffer = SharedBuffer(8192)
        >>> buffer.view[:2] = b"ok"
        >>> os.pread(buffer.fd, 2, 0)
        b'ok'
        >>> buffer.free()
    """

    def __init__(self, size: int) -> None:
        """Allocate and touch `size` bytes.

        Raises:
            MemoryError: there is not that much memory.
        """
        self.number, self.size = next(_numbers), max(size, PAGE)
        self.fd = os.memfd_create(f"planish-{self.number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.size)
            memory = mmap.mmap(self.fd, self.size)
            self._tensor: torch.Tensor | None = None
            self._pinned = False
            self.view = memoryview(memory)
            _touch(self.view)
        except OSError as error:
            os.close(self.fd)
            raise MemoryError(
                f"a staging buffer must fit into memory, got {size} bytes: {error}"
            ) from error

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a 1-D uint8 tensor; page-locked where there is a CUDA device in use."""
        if self._tensor is None:
            import torch

            self._tensor = torch.frombuffer(self.view, dtype=torch.uint8)
            if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                code = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                    self._tensor.data_ptr(), self.size, 0
                )
                self._pinned = int(code) == 0
        return self._tensor

    def free(self) -> None:
        """Give the memory back as soon as nobody holds a view of it."""
        if self.fd < 0:
            return
        if self._pinned and self._tensor is not None:
            import torch

            torch.cuda.cudart().cudaHostUnregister(  # type: ignore[no-untyped-call]
                self._tensor.data_ptr()
            )
        os.close(self.fd)
        self.fd = -1
        self._tensor = None
        self.view = memoryview(b"")


def _touch(view: memoryview) -> None:
    """Make every page present and writable in this process."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    libc = ctypes.CDLL(None, use_errno=True)
    # Through ctypes, because it lets other threads run meanwhile.
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), _POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number in (12, 14):  # ENOMEM, EFAULT: no memory left
        raise OSError(number, os.strerror(number))
    for start in range(0, len(view), PAGE):
        view[start] = 0


def free_memory_bytes() -> int:
    """Return how much memory this process may still take: of the machine, and of its group."""
    free = 0
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
    folder = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((folder / "memory.max").read_text())
        free = min(free, limit - int((folder / "memory.current").read_text()))
    return free


class StagingPool:
    """At most two buffers of one size, handed out in turn.

    Example:
        >>> pool = StagingPool()
        >>> first, second = pool.acquire(100, 0.0), pool.acquire(100, 0.0)
        >>> pool.acquire(100, 0.0) is None
        True
        >>> pool.close()
    """

    def __init__(
        self,
        *,
        most: int = 2,
        free_memory: Callable[[], int] = free_memory_bytes,
        on_free: Callable[[SharedBuffer], None] = lambda _: None,
    ) -> None:
        """Take no memory yet; `on_free` is called with every buffer that is given back."""
        self._most, self._free_memory, self._on_free = most, free_memory, on_free
        self._changed = threading.Condition()
        self._size = 0
        self.limit = 0
        """How many buffers there may be at the present size."""
        self._free: list[SharedBuffer] = []
        self._used: list[SharedBuffer] = []

    @property
    def num_buffers(self) -> int:
        """How many buffers have memory now."""
        with self._changed:
            return len(self._free) + len(self._used)

    def warm(self, size: int) -> None:
        """Allocate every buffer of this size ahead of time."""
        with self._changed:
            self._fit(size)
            while len(self._free) + len(self._used) < self.limit:
                self._free.append(SharedBuffer(self._size))

    def warm_one_more(self) -> None:
        """Allocate the second buffer, if there may be one and memory suffices."""
        with self._changed:
            if len(self._free) + len(self._used) >= self.limit:
                return
            size = self._size
        try:
            spare = SharedBuffer(size)
        except MemoryError:
            return
        with self._changed:
            if size == self._size and len(self._free) + len(self._used) < self.limit:
                self._free.append(spare)
                self._changed.notify_all()
                return
        spare.free()

    def acquire(self, size: int, timeout_s: float) -> SharedBuffer | None:
        """Return a warm buffer of at least `size` bytes; None if all stay in use for so long."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._fit(size)
            while True:
                if self._free:
                    buffer = self._free.pop(0)
                elif len(self._used) < self.limit:
                    buffer = SharedBuffer(self._size)
                else:
                    left = deadline - time.monotonic()
                    if not self._changed.wait(max(0.0, left)) and time.monotonic() >= deadline:
                        return None
                    continue
                self._used.append(buffer)
                return buffer

    def release(self, buffer: SharedBuffer) -> None:
        """Take a buffer back; one of another size than now wanted is freed."""
        with self._changed:
            self._used.remove(buffer)
            if buffer.size == self._size and len(self._free) + len(self._used) < self.limit:
                self._free.append(buffer)
            else:
                self._drop(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Give all memory back, of buffers in use as soon as they are released."""
        with self._changed:
            self._size = self.limit = 0
            while self._free:
                self._drop(self._free.pop())

    def _drop(self, buffer: SharedBuffer) -> None:
        self._on_free(buffer)
        buffer.free()

    def _fit(self, size: int) -> None:
        """Settle the size and the number of buffers; called with the lock."""
        size = max(PAGE, -(-size // PAGE) * PAGE)
        if size == self._size:
            return
        self._size = size
        while self._free:
            self._drop(self._free.pop())
        held = sum(buffer.size for buffer in self._used)
        self.limit = self._most
        if self._most > 1 and self._most * size - held > MEMORY_SHARE * self._free_memory():
            logger.warning(
                "staging falls back to one buffer bytes=%d free_bytes=%d: a save waits for the "
                "one before it",
                size,
                self._free_memory(),
            )
            self.limit = 1


@dataclass(frozen=True)
class BufferLayout:
    """Where each file of a rank's plan begins in a buffer.

    Example:
        >>> BufferLayout.of([5000, 10])
        BufferLayout(starts=(0, 8192), size=8202)
    """

    starts: tuple[int, ...]
    """First byte of each file, multiples of PAGE."""
    size: int
    """Bytes in all."""

    @classmethod
    def of(cls, sizes: Sequence[int]) -> BufferLayout:
        """Place files one behind the other."""
        starts, place, end = [], 0, 0
        for size in sizes:
            starts.append(place)
            end = place + size
            place = -(-end // PAGE) * PAGE
        return cls(tuple(starts), end)


@dataclass
class _Batch:
    """Copies that are done in one call."""

    targets: list[torch.Tensor]
    sources: list[tuple[int, int, int, bool]]
    """Item, first byte, one past the last byte; whether that is all of a tensor of real numbers."""
    end: int
    """All bytes of the buffer before this one are in place after the batch."""

    def reduced(self, only: Callable[[int], bool]) -> _Batch:
        """Return the copies of the items whose number `only` is true of."""
        pairs = zip(self.targets, self.sources, strict=True)
        kept = [(target, source) for target, source in pairs if only(source[0])]
        return _Batch([target for target, _ in kept], [source for _, source in kept], self.end)


class Stager:
    """Copies the items of one plan into one buffer; the views of the buffer are made once.

    Args:
        plan: What this rank writes.
        buffer: At least `BufferLayout.of(...)` bytes.
        patience_s: Report no progress before the copy has gone on for so long, seconds.
    """

    def __init__(
        self, plan: RankPlan, buffer: SharedBuffer, patience_s: float = PATIENCE_SECONDS
    ) -> None:
        self.plan, self.buffer, self.patience_s = plan, buffer, patience_s
        self.layout = BufferLayout.of([file.size for file in plan.files])
        self._batches: list[_Batch] | None = None

    def copy(
        self,
        items: Sequence[LocalItem],
        progress: Callable[[int], None],
        only: Callable[[int], bool] | None = None,
    ) -> None:
        """Copy everything; `progress` is told how many bytes from the start are in place.

        Args:
            items: This rank's, as planned.
            progress: Called after every batch, and at the end.
            only: Copy no items but those whose number this is true of.
        """
        import torch

        began = time.monotonic()
        view = self.buffer.view
        for start, file in zip(self.layout.starts, self.plan.files, strict=True):
            view[start : start + len(file.header)] = file.header
        if self._batches is None:
            self._batches = list(self._plan_batches(items))
        numbers = {source[0] for batch in self._batches for source in batch.sources}
        data = {number: _data_of(items[number]) for number in numbers}
        with torch.no_grad(), _side_stream(data.values()) as finish:
            for batch in self._batches:
                if only is not None:
                    batch = batch.reduced(only)
                pairs = zip(batch.targets, batch.sources, strict=True)
                sources = [
                    data[i] if whole else _real(part_of(data[i], a, b)).reshape(target.shape)
                    for target, (i, a, b, whole) in pairs
                ]
                if sources:
                    torch._foreach_copy_(batch.targets, sources, finish is not None)
                if finish is None and time.monotonic() - began >= self.patience_s:
                    progress(batch.end)
            if finish is not None:
                finish()
        progress(self.layout.size)

    def _plan_batches(self, items: Sequence[LocalItem]) -> Iterator[_Batch]:
        memory = self.buffer.tensor
        batch, size = _Batch([], [], 0), 0
        for start, file in zip(self.layout.starts, self.plan.files, strict=True):
            columns = (file.items, file.starts, file.stops, file.offsets)
            for item, low, high, offset in zip(*(c.tolist() for c in columns), strict=True):
                data = _data_of(items[item])
                part = _real(part_of(data, low, high))
                first = start + offset
                target = memory[first : first + high - low].view(part.dtype).view(part.shape)
                batch.targets.append(target)
                batch.sources.append((item, low, high, part is data))
                batch.end = first + high - low
                size += target.nbytes
                if size >= NOTIFY_BYTES:
                    yield batch
                    batch, size = _Batch([], [], 0), 0
        if batch.targets:
            yield batch


def _data_of(item: LocalItem) -> torch.Tensor:
    assert item.data is not None, "items without data are for simulations"
    return item.data


def part_of(data: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the elements of a tensor whose row-major bytes are [start, stop), without a copy.

    Only a range that is no run of whole rows of a non-contiguous tensor costs one.

    Args:
        data: Any shape and strides.
        start: First byte, a multiple of the element size.
        stop: One past the last byte.

    Example:
        >>> import torch
        >>> part_of(torch.arange(6, dtype=torch.uint8).view(2, 3), 3, 6).flatten().tolist()
        [3, 4, 5]
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
    """Return complex numbers as pairs: files align them as such."""
    if not part.is_complex():
        return part
    import torch

    return torch.view_as_real(part.resolve_conj())


@contextlib.contextmanager
def _side_stream(data: Iterable[torch.Tensor]) -> Iterator[Callable[[], None] | None]:
    """Copy from a device on a stream of its own; yields what waits for the copies, if needed."""
    device = next((tensor.device for tensor in data if tensor.is_cuda), None)
    if device is None:
        yield None
        return
    import torch

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream.synchronize


class DirectSource:
    """The files of a plan, put together from the tensors when they are written: no staging.

    For saves that the caller waits for: nothing may change meanwhile.
    """

    def __init__(self, plan: RankPlan, items: Sequence[LocalItem], blobs: Sequence[bytes]) -> None:
        """Offer the files of `plan`, then `blobs`."""
        self._files, self._items, self._blobs = plan.files, items, blobs
        self._whole: dict[int, torch.Tensor] = {}

    def fill(self, file: int, start: int, stop: int, memory: memoryview) -> None:
        """Write bytes [start, stop) of a file into memory."""
        import numpy as np
        import torch

        if file >= len(self._files):
            memory[:] = self._blobs[file - len(self._files)][start:stop]
            return
        plan = self._files[file]
        head = plan.header[start:stop]
        memory[: len(head)] = head
        if start + len(head) == stop:
            return
        target = torch.frombuffer(memory, dtype=torch.uint8)
        first = max(0, int(np.searchsorted(plan.offsets, start, "right")) - 1)
        last = int(np.searchsorted(plan.offsets, stop, "left"))
        with torch.no_grad():
            for row in range(first, last):
                offset, begin = int(plan.offsets[row]), int(plan.starts[row])
                low = max(start, offset)
                high = min(stop, offset + int(plan.stops[row]) - begin)
                if low < high:
                    item = int(plan.items[row])
                    data = self._whole.get(item)
                    if data is None:
                        data = _real(_data_of(self._items[item]))
                        if not data.is_contiguous():
                            # Once, not for every part of the file.
                            data = self._whole.setdefault(item, data.contiguous())
                    part = part_of(data, begin + low - offset, begin + high - offset)
                    part = part.contiguous().reshape(-1).view(torch.uint8)
                    target[low - start : high - start].copy_(part)


def is_written_in_step(item: LocalItem) -> bool:
    """Return whether an item surely changes in `optimizer.step()` only.

    Parameters and the optimizer's tensors do; buffers (BatchNorm's) change in forward.
    """
    if item.tensor.kind == "optim":
        return True
    return item.tensor.kind == "model" and item.data is not None and item.data.requires_grad


class LazyCopies:
    """Copies under way (`snapshot="lazy"`), and the hook that makes the optimizer wait for them.

    Between two steps forward and backward read parameters and optimizer state but do not write
    them, so a thread may copy them meanwhile. What is written outside of `optimizer.step()` would
    make a mixture: PyTorch counts writes to a tensor, and the counts are compared.

    Example:
        >>> copies = LazyCopies()
        >>> copies.wait()
        >>> copies.close()
    """

    def __init__(self) -> None:
        """Register nothing until a copy begins."""
        self._hook: Any = None
        self._threads: list[threading.Thread] = []

    def begin(
        self,
        items: Sequence[LocalItem],
        copy: Callable[[], None],
        done: Callable[[BaseException | None], None],
    ) -> None:
        """Run `copy` in a thread; the next optimizer step waits for it.

        Args:
            items: What is copied, to notice writes meanwhile.
            copy: The work.
            done: Called at the end, with the error if there was one.
        """
        if self._hook is None:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            self._hook = register_optimizer_step_pre_hook(lambda *_: self.wait())
        versions = [_version(item) for item in items]

        def run() -> None:
            try:
                copy()
                pairs = zip(items, versions, strict=True)
                written = [item.tensor.fqn for item, count in pairs if _version(item) != count]
                if written:
                    raise SaveFailed(
                        "with `snapshot='lazy'` tensors must not be written outside of "
                        f"`optimizer.step()`, but {written[:5]} ({len(written)} in all) were; use "
                        "`snapshot='copy'`, or wait for `staged()`"
                    )
            except BaseException as error:
                done(error)
            else:
                done(None)

        thread = threading.Thread(target=run, name="lazy-copy", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def wait(self) -> None:
        """Return when no copy is under way."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def close(self) -> None:
        """Wait, and let steps go on without the hook."""
        self.wait()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _version(item: LocalItem) -> int:
    """Return how often PyTorch has counted a write to the tensor of an item."""
    data = item.data
    # Tensors made under inference mode have no count and can not be written in place.
    return -1 if data is None or data.is_inference() else int(data._version)
