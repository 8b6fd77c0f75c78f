"""What each rank of a large training would hold: columns of items without tensors.

Transformers are described by a few sizes and cut as Megatron (tensor, pipeline and data parallel,
optimizer states sliced flat over the data-parallel ranks) or as fully sharded data parallel (rows
over all ranks, optimizer states sliced flat). Twelve tensors a layer, as in a GPT with biases.

Source: ByteCheckpoint, arXiv 2407.20143, section 6 (the sizes of its evaluation).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planish.checkpoint.format.geometry import I64, Box, flat_boxes, shift
from planish.checkpoint.format.items import Columns, LocalItem, TensorSpec, TensorTable

STATES = ("master", "exp_avg", "exp_avg_sq")
"""Optimizer states of each parameter, all of type F32."""


@dataclass(frozen=True)
class Sizes:
    """A transformer.

    Example:
        >>> round(GPT_405B.num_parameters / 1e9)
        406
    """

    layers: int
    hidden: int
    ffn: int
    """Width of the gated feed-forward layer; its first matrix has twice as many rows."""
    vocab: int
    heads: int
    kv_heads: int
    """Fewer than `heads`: grouped-query attention."""

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(int(np.prod(one.shape)) for one in self.tensors(0, self.layers))

    def tensors(self, first: int, last: int) -> list[Weight]:
        """Return the tensors of layers `first` to `last`; embedding and head with the outermost."""
        head = self.hidden // self.heads
        rows = (self.heads + 2 * self.kv_heads) * head
        found = [Weight("embedding.weight", (self.vocab, self.hidden), 0)] if not first else []
        for layer in range(first, last):
            shapes = {
                "norm1.weight": ((self.hidden,), None),
                "norm1.bias": ((self.hidden,), None),
                "qkv.weight": ((rows, self.hidden), 0),
                "qkv.bias": ((rows,), 0),
                "proj.weight": ((self.hidden, self.heads * head), 1),
                "proj.bias": ((self.hidden,), None),
                "norm2.weight": ((self.hidden,), None),
                "norm2.bias": ((self.hidden,), None),
                "fc1.weight": ((2 * self.ffn, self.hidden), 0),
                "fc1.bias": ((2 * self.ffn,), 0),
                "fc2.weight": ((self.hidden, self.ffn), 1),
                "fc2.bias": ((self.hidden,), None),
            }
            found += [Weight(f"layers.{layer}.{k}", *pair) for k, pair in shapes.items()]
        if last == self.layers:
            found.append(Weight("norm.weight", (self.hidden,), None))
            found.append(Weight("head.weight", (self.vocab, self.hidden), 0))
        return found


@dataclass(frozen=True)
class Weight:
    """One parameter, and the dimension that tensor parallelism cuts (None: replicated)."""

    name: str
    shape: tuple[int, ...]
    cut: int | None

    def box(self, rank: int, size: int) -> Box:
        """Return what tensor-parallel rank `rank` of `size` holds."""
        offsets, lengths = [0] * len(self.shape), list(self.shape)
        if self.cut is not None:
            low, high = (self.shape[self.cut] * one // size for one in (rank, rank + 1))
            offsets[self.cut], lengths[self.cut] = low, high - low
        return Box(tuple(offsets), tuple(lengths))

    def spec(self, state: str = "") -> TensorSpec:
        """Return the parameter as a tensor of the model, or one of its optimizer states."""
        if state:
            return TensorSpec("main", "optim", f"optim.{self.name}.{state}", "F32", self.shape)
        return TensorSpec("main", "model", f"model.{self.name}", "BF16", self.shape)


DIT_4B = Sizes(layers=34, hidden=3072, ffn=8192, vocab=16384, heads=24, kv_heads=24)
GPT_70B = Sizes(layers=80, hidden=8192, ffn=28672, vocab=128256, heads=64, kv_heads=8)
GPT_405B = Sizes(layers=126, hidden=16384, ffn=53248, vocab=128256, heads=128, kv_heads=8)


@dataclass(frozen=True)
class Layout:
    """How many ranks hold what; `tp = pp = 1` with `rows`: fully sharded over all ranks.

    Example:
        >>> LAYOUTS["gpt-405b-8960"].ranks
        8960
    """

    sizes: Sizes
    tp: int = 1
    pp: int = 1
    dp: int = 1
    rows: bool = False
    """The model too is sharded over the data-parallel ranks, by rows."""
    host: int = 8
    """Ranks of one host."""

    def __post_init__(self) -> None:
        """Refuse sizes that such a training could not have."""
        if self.sizes.layers < self.pp:
            raise ValueError(
                "a model must have at least as many layers as pipeline stages, got "
                f"{self.sizes.layers} and {self.pp}"
            )
        sides = [one.shape[one.cut] for one in self.sizes.tensors(0, 1) if one.cut is not None]
        if any(side % self.tp for side in sides):
            raise ValueError(
                f"the tensor-parallel size must divide {sorted(set(sides))}, got {self.tp}"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks; tensor parallel fastest, then data, then pipeline."""
        return self.tp * self.dp * self.pp

    @property
    def hosts(self) -> list[int]:
        """[ranks], number of the host of each rank."""
        return [rank // self.host for rank in range(self.ranks)]

    def columns(self) -> Iterator[Columns]:
        """Yield the columns of each rank."""
        for pipeline in range(self.pp):
            first, last = (self.sizes.layers * one // self.pp for one in (pipeline, pipeline + 1))
            stage = _Stage(self, self.sizes.tensors(first, last))
            for data in range(self.dp):
                for tensor in range(self.tp):
                    yield stage.columns(tensor, data)


class _Stage:
    """Builds the columns of the ranks of one pipeline stage; what they share is built once."""

    def __init__(self, layout: Layout, weights: list[Weight]) -> None:
        self._layout, self._weights = layout, weights
        self._boxes = [[one.box(rank, layout.tp) for one in weights] for rank in range(layout.tp)]
        self._ends = [
            np.cumsum([0, *(box.volume for box in boxes)], dtype=np.int64) for boxes in self._boxes
        ]

    def columns(self, tensor: int, data: int) -> Columns:
        model, optim = self._model(tensor, data), self._optim(tensor, data)
        table = _joined(model.tensors, optim.tensors)
        return Columns(
            table,
            np.concatenate([model.item_tensor, optim.item_tensor + len(model.tensors)]),
            np.concatenate([model.item_starts, optim.item_starts[1:] + model.item_starts[-1]]),
            np.concatenate([model.offsets, _wide(optim.offsets, table.max_dims, 0)]),
            np.concatenate([model.lengths, _wide(optim.lengths, table.max_dims, 1)]),
        )

    def _model(self, tensor: int, data: int) -> Columns:
        return self._sharded(data) if self._layout.rows else self._replicated(tensor)

    @functools.cache  # noqa: B019
    def _replicated(self, tensor: int) -> Columns:
        rows = zip(self._weights, self._boxes[tensor], strict=True)
        return Columns.from_items([LocalItem(one.spec(), (box,)) for one, box in rows])

    def _sharded(self, data: int) -> Columns:
        """Rows of every tensor, as fully sharded data parallel cuts them; ranks may get none."""
        items = []
        for one in self._weights:
            chunk = -(-one.shape[0] // self._layout.dp)
            low, high = (min(chunk * rank, one.shape[0]) for rank in (data, data + 1))
            box = Box((low, *(0 for _ in one.shape[1:])), (high - low, *one.shape[1:]))
            items.append(LocalItem(one.spec(), (box,)))
        return Columns.from_items(items)

    def _optim(self, tensor: int, data: int) -> Columns:
        """A flat slice of all local parameters laid one behind the other, for each state."""
        ends = self._ends[tensor]
        low, high = (int(ends[-1]) * one // self._layout.dp for one in (data, data + 1))
        first = int(np.searchsorted(ends, low, side="right")) - 1
        last = int(np.searchsorted(ends, high, side="left"))
        items: list[LocalItem] = []
        for row in range(first, last):
            box, begin = self._boxes[tensor][row], int(ends[row])
            part = max(low - begin, 0), min(high - begin, box.volume)
            boxes = tuple(shift(one, box.offsets) for one in flat_boxes(box.lengths, *part))
            items += [LocalItem(self._weights[row].spec(state), boxes) for state in STATES]
        return Columns.from_items(items)


def _wide(sides: I64, width: int, fill: int) -> I64:
    missing = ((0, 0), (0, width - sides.shape[1]))
    return np.pad(sides, missing, constant_values=fill) if missing[1][1] else sides


def _joined(first: TensorTable, second: TensorTable) -> TensorTable:
    """Return the tensors of both tables; the first one has at least as many dimensions."""
    return TensorTable(
        first.roles + second.roles,
        first.kinds + second.kinds,
        first.fqns + second.fqns,
        first.dtypes + second.dtypes,
        np.concatenate([first.dims, second.dims]),
        np.concatenate([first.shapes, _wide(second.shapes, first.max_dims, 1)]),
    )


LAYOUTS = {
    "dit-4b-32": Layout(DIT_4B, dp=32, rows=True),
    "dit-4b-128": Layout(DIT_4B, dp=128, rows=True),
    "gpt-70b-2400": Layout(GPT_70B, tp=4, pp=8, dp=75),
    "gpt-70b-4800": Layout(GPT_70B, tp=4, pp=8, dp=150),
    "gpt-405b-8960": Layout(GPT_405B, tp=8, pp=16, dp=70),
    "gpt-405b-16384": Layout(GPT_405B, tp=8, pp=16, dp=128),
    "gpt-405b-65536": Layout(GPT_405B, tp=8, pp=16, dp=512),
}
"""By name: model and number of ranks."""
