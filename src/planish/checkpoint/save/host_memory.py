"""Warm host memory without a name: allocated and touched once, handed out again and again.

A first copy into fresh memory costs five to seven times as much as one into memory that is mapped.
Buffers are shared with the uploading process by file descriptor, so nothing has a name in /dev/shm
that could outlive a killed process.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (ping-pong buffers).
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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PAGE = 4096
"""Files begin at multiples of this in a buffer, bytes."""
MEMORY_SHARE = 0.5
"""Two buffers may take this share of the free memory; beyond it there is one."""
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
        """Take no memory yet; `on_free` hears of every buffer that is given back."""
        self._most, self._free_memory, self._on_free = most, free_memory, on_free
        self._changed = threading.Condition()
        self._size, self._count = 0, 0
        self._free: list[SharedBuffer] = []
        self._used: list[SharedBuffer] = []

    @property
    def num_buffers(self) -> int:
        """How many buffers have memory now."""
        with self._changed:
            return len(self._free) + len(self._used)

    @property
    def limit(self) -> int:
        """How many buffers there may be at the present size."""
        return self._count

    def warm(self, size: int) -> None:
        """Allocate every buffer of this size ahead of time."""
        with self._changed:
            self._fit(size)
            while len(self._free) + len(self._used) < self._count:
                self._free.append(SharedBuffer(self._size))

    def warm_one_more(self) -> None:
        """Allocate the second buffer, if it may be and is not there; for a background thread."""
        with self._changed:
            if len(self._free) + len(self._used) >= self._count:
                return
            size = self._size
        spare = SharedBuffer(size)
        with self._changed:
            if size == self._size and len(self._free) + len(self._used) < self._count:
                self._free.append(spare)
                self._changed.notify_all()
                return
        spare.free()

    def acquire(self, size: int, timeout_s: float) -> SharedBuffer | None:
        """Return a warm buffer of at least `size` bytes; None if all stay in use for so long."""
        limit = time.monotonic() + timeout_s
        with self._changed:
            self._fit(size)
            while True:
                if self._free:
                    buffer = self._free.pop(0)
                elif len(self._used) < self._count:
                    buffer = SharedBuffer(self._size)
                else:
                    if not self._changed.wait(max(0.0, limit - time.monotonic())) and (
                        time.monotonic() >= limit
                    ):
                        return None
                    continue
                self._used.append(buffer)
                return buffer

    def release(self, buffer: SharedBuffer) -> None:
        """Take a buffer back; one of another size than now wanted is freed."""
        with self._changed:
            self._used.remove(buffer)
            if buffer.size == self._size and len(self._free) + len(self._used) < self._count:
                self._free.append(buffer)
            else:
                self._drop(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Give all memory back, of buffers in use as soon as they are released."""
        with self._changed:
            self._size = self._count = 0
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
        count = self._most
        if count > 1 and count * size - held > MEMORY_SHARE * self._free_memory():
            logger.warning(
                "staging falls back to one buffer bytes=%d free_bytes=%d: a save waits for the "
                "one before it",
                size,
                self._free_memory(),
            )
            count = 1
        self._count = count
