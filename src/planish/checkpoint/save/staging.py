"""The copy that a save stops training for: from tensors to their places in the files.

Every tensor is copied straight to its final position in the file that it becomes part of, so there
is no serialisation afterwards. The memory is that of `host_memory`.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (asynchronous save).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planish.checkpoint.save.host_memory import PAGE, SharedBuffer

if TYPE_CHECKING:
    import torch

    from planish.checkpoint.format.records import LocalItem
    from planish.checkpoint.plan.records import FilePlan, RankPlan

NOTIFY_BYTES = 32 << 20
"""The uploader hears of progress in steps of at least this many bytes."""
PATIENCE_SECONDS = 0.25
"""... but not before the copy has gone on for so long: where cores are shared, an upload that
begins earlier slows down the copy that training waits for (by 1.5x with 2 cores for 4 ranks)."""


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
        """Copy everything; `progress` hears how many bytes from the start are in place.

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
    ) -> Iterator[tuple[torch.Tensor, tuple[int, int, int, bool], int]]:
        memory = self.buffer.tensor
        rows = zip(
            file.items.tolist(),
            file.starts.tolist(),
            file.stops.tolist(),
            file.offsets.tolist(),
            strict=True,
        )
        for item, start, stop, offset in rows:
            data = _data_of(items[item])
            part = _real(part_of(data, start, stop))
            first = base + offset
            target = memory[first : first + stop - start].view(part.dtype).view(part.shape)
            yield target, (item, start, stop, part is data), first + stop - start


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
    device = next((one.device for one in data if one.is_cuda), None)
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
                    data = self._data(int(plan.items[row]))
                    part = part_of(data, begin + low - offset, begin + high - offset)
                    part = part.contiguous().reshape(-1).view(torch.uint8)
                    target[low - start : high - start].copy_(part)

    def _data(self, item: int) -> torch.Tensor:
        data = _real(_data_of(self._items[item]))
        if data.is_contiguous():
            return data
        # Once, not for every part of the file.
        return self._whole.setdefault(item, data.contiguous())
