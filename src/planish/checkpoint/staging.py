"""The copy that a save stops training for: from tensors to their places in the files.

Every tensor is copied straight to its final position in the file that it becomes part of, so there
is no serialisation afterwards. The memory is that of `host_memory`.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (asynchronous save).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planish.checkpoint.host_memory import PAGE, SharedBuffer

if TYPE_CHECKING:
    import torch

    from planish.checkpoint.model import LocalItem
    from planish.checkpoint.plan.records import FilePlan, RankPlan

NOTIFY_BYTES = 32 << 20
"""The uploader hears of progress in steps of at least this many bytes."""


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
    sources: list[tuple[int, int, int]]
    """Item, first byte, one past the last byte."""
    end: int
    """All bytes of the buffer before this one are in place after the batch."""


class Stager:
    """Copies the items of one plan into one buffer; the views of the buffer are made once.

    Args:
        plan: What this rank writes.
        buffer: At least `BufferLayout.of(...)` bytes.
    """

    def __init__(self, plan: RankPlan, buffer: SharedBuffer) -> None:
        self.plan, self.buffer = plan, buffer
        self.layout = BufferLayout.of([file.size for file in plan.files])
        self._batches: list[_Batch] | None = None

    def copy(self, items: Sequence[LocalItem], progress: Callable[[int], None]) -> None:
        """Copy everything; `progress` hears how many bytes from the start are in place."""
        import torch

        view = self.buffer.view
        for start, file in zip(self.layout.starts, self.plan.files, strict=True):
            view[start : start + len(file.header)] = file.header
        if self._batches is None:
            self._batches = list(self._plan_batches(items))
        with torch.no_grad(), _side_stream(items) as finish:
            for batch in self._batches:
                sources = [_real(part_of(items[i].data, a, b)) for i, a, b in batch.sources]
                torch._foreach_copy_(batch.targets, sources, finish is not None)
                if finish is None:
                    progress(batch.end)
            if finish is not None:
                finish()
        progress(self.layout.size)

    def _plan_batches(self, items: Sequence[LocalItem]) -> Iterator[_Batch]:
        batch, size = _Batch([], [], 0), 0
        for start, file in zip(self.layout.starts, self.plan.files, strict=True):
            for target, source, end in self._entries(start, file, items):
                batch.targets.append(target)
                batch.sources.append(source)
                batch.end = end
                size += target.nbytes
                if size >= NOTIFY_BYTES:
                    yield batch
                    batch, size = _Batch([], [], 0), 0
        if batch.targets:
            yield batch

    def _entries(
        self, base: int, file: FilePlan, items: Sequence[LocalItem]
    ) -> Iterator[tuple[torch.Tensor, tuple[int, int, int], int]]:
        memory = self.buffer.tensor
        rows = zip(
            file.items.tolist(),
            file.starts.tolist(),
            file.stops.tolist(),
            file.offsets.tolist(),
            strict=True,
        )
        for item, start, stop, offset in rows:
            part = _real(part_of(items[item].data, start, stop))
            first = base + offset
            target = memory[first : first + stop - start].view(part.dtype).view(part.shape)
            yield target, (item, start, stop), first + stop - start


def part_of(data: torch.Tensor | None, start: int, stop: int) -> torch.Tensor:
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
    assert data is not None, "items without data are for simulations"
    width = data.element_size()
    if start == 0 and stop == data.numel() * width:
        return data
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
def _side_stream(items: Sequence[LocalItem]) -> Iterator[Callable[[], None] | None]:
    """Copy from a device on a stream of its own; yields what waits for the copies, if needed."""
    device = next(
        (item.data.device for item in items if item.data is not None and item.data.is_cuda), None
    )
    if device is None:
        yield None
        return
    import torch

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream.synchronize
