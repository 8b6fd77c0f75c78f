"""Bitwise comparison of two checkpoints, tensor by tensor in windows of bytes; without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from planish.checkpoint.convert.hf_names import to_numbers
from planish.checkpoint.format.geometry import flat_boxes
from planish.checkpoint.format.items import ITEM_BYTES, TensorSpec, quoted_name
from planish.checkpoint.loading.extras import names_of
from planish.checkpoint.loading.fill import Array
from planish.checkpoint.loading.reader import BlockReader, Opened, Progress, open_state
from planish.checkpoint.loading.slices import Slice, SliceReader, batches

WINDOW_BYTES = 32 << 20
"""Bytes in memory of each checkpoint: many small tensors, or a part of a large one."""


class TensorDiff(NamedTuple):
    """Difference of one tensor."""

    name: str
    reason: str
    """`values`, or the types and shapes of both sides if these differ."""
    num_elements: int = 0
    """Number of elements whose bits differ."""
    first: tuple[int, ...] = ()
    max_abs: float = math.nan
    """Largest absolute difference; NaN if an element is NaN, or if numpy lacks the type."""


@dataclass
class Diff:
    """Differences of two checkpoints."""

    only_a: list[str] = field(default_factory=list)
    """Names of tensors that only the first one has."""
    only_b: list[str] = field(default_factory=list)
    differing: list[TensorDiff] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    """Roles whose shared small values differ."""
    num_equal: int = 0
    """Number of tensors that are equal bit by bit."""
    num_bytes: int = 0
    """Bytes compared of one checkpoint: of the tensors that both have."""

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs."""
        return not (self.only_a or self.only_b or self.differing or self.values)


class _Window(NamedTuple):
    start: int
    """Number of its first element in the tensor, row-major."""
    slice: Slice


def diff(
    a: str,
    b: str,
    *,
    parts: Sequence[str] = ("model", "optim"),
    progress: Progress | None = None,
) -> Diff:
    """Compare two checkpoints; errors are those of `load`.

    Args:
        a: URI or pin of the first.
        b: URI or pin of the second.
        parts: kinds of tensors to compare: `model`, `optim`, `extra` (tensors of single ranks,
            which differ between layouts by design).
        progress: called with the bytes compared so far and the bytes in all.
    """
    sides = open_state(a), open_state(b)
    result = Diff()
    common = list(_common(sides, parts, result))
    small = []
    for side in sides:
        reader, objects = BlockReader(side), side.metadata.objects
        keys = {role: names_of(objects, role).shared for role in objects}
        small.append({role: reader.read_file(key) for role, key in keys.items() if key})
    roles = sorted({*small[0], *small[1]})
    result.values = [role for role in roles if small[0].get(role) != small[1].get(role)]
    total = sum(ITEM_BYTES[spec.dtype] * math.prod(spec.shape) for spec in common)
    readers = SliceReader(sides[0]), SliceReader(sides[1])
    faults: dict[str, TensorDiff] = {}
    with ThreadPoolExecutor(2) as pool:
        for windows in batches(_windows(common), lambda window: window.slice.nbytes, WINDOW_BYTES):
            slices = [window.slice for window in windows]
            first, second = pool.map(SliceReader.read_many, readers, (slices, slices))
            for window, x, y in zip(windows, first, second, strict=True):
                _compare(window, x, y, faults)
                result.num_bytes += x.nbytes
            if progress is not None:
                progress(result.num_bytes, total)
    result.differing = sorted([*result.differing, *faults.values()])
    result.num_equal = len(common) - len(faults)
    return result


def _common(
    sides: tuple[Opened, Opened], parts: Sequence[str], result: Diff
) -> Iterator[TensorSpec]:
    """Yield the tensors that both have with equal type and shape; add the others to `result`."""
    ids = [side.metadata.tensor_ids for side in sides]
    for key in sorted({*ids[0], *ids[1]}):
        if key[1] not in parts:
            continue
        name = quoted_name(*key)
        if key not in ids[0] or key not in ids[1]:
            (result.only_a if key in ids[0] else result.only_b).append(name)
            continue
        x, y = (side.metadata.tensors.spec(i[key]) for side, i in zip(sides, ids, strict=True))
        if x != y:
            form = f"{x.dtype} {list(x.shape)} against {y.dtype} {list(y.shape)}"
            result.differing.append(TensorDiff(name, form))
            continue
        yield x


def _windows(tensors: Sequence[TensorSpec]) -> Iterator[_Window]:
    """Yield all tensors in parts of at most `WINDOW_BYTES`."""
    for tensor in tensors:
        volume = math.prod(tensor.shape)
        step = max(1, WINDOW_BYTES // ITEM_BYTES[tensor.dtype])
        for start in range(0, max(volume, 1), step):
            boxes = flat_boxes(tensor.shape, start, min(start + step, volume))
            yield _Window(start, Slice(tensor, tuple(boxes)))


def _compare(window: _Window, x: Array, y: Array, faults: dict[str, TensorDiff]) -> None:
    # View complex numbers as integers, because a NaN is unequal to a NaN of the same bits.
    width = x.dtype.itemsize
    bits = [side.view(np.uint64 if width == 16 else side.dtype) for side in (x, y)]
    places = np.flatnonzero(bits[0] != bits[1]) // (2 if width == 16 else 1)
    if not len(places):
        return
    places = np.unique(places)
    tensor = window.slice.tensor
    name = quoted_name(tensor.role, tensor.kind, tensor.fqn)
    numbers = [to_numbers(side[places], tensor.dtype) for side in (x, y)]
    with np.errstate(invalid="ignore", over="ignore"):
        largest = math.nan if numbers[0] is None else float(np.abs(numbers[0] - numbers[1]).max())
    first = np.unravel_index(window.start + int(places[0]), tensor.shape)
    index = tuple(int(i) for i in first)
    found = faults.setdefault(name, TensorDiff(name, "values", 0, index, largest))
    faults[name] = found._replace(
        num_elements=found.num_elements + len(places),
        max_abs=float(np.maximum(largest, found.max_abs)),
    )
