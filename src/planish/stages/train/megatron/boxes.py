"""Rows of parameters of megatron-core, as boxes of the tensors of transformers.

Megatron keeps queries, keys and values of a group next to each other, and the gate above the up
projection. It cuts matrices over tensor-parallel ranks, spreads experts and pads the vocabulary.
All of this maps rows to boxes, so a rank reads and writes its rows in place, under the names of
transformers. Each trainer resumes what any other has saved, moments included, without conversion.

Source: megatron-core 0.16.1, `SelfAttention.get_query_key_value_tensors` and `MLP.forward`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planish.base.parallel import Grid
from planish.checkpoint import FlatShard
from planish.models.experts import LAYER_NAMES, TOP_NAMES

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERTS = "mlp.experts."
"""Part of the names of all parameters of experts, both in megatron-core and in transformers."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """Consecutive rows of a local parameter, and their box in a tensor of transformers."""

    name: str
    """Name of that tensor."""
    offset: Shape
    """Beginning of the box in the whole tensor."""
    extent: Shape
    """Lengths of the box, which has as many elements as the rows."""
    rows: slice

    def of(self, value: Tensor) -> Tensor:
        """Return the rows of `value`, which has the parameter's shape, as a view in box form."""
        return value[self.rows].view(self.extent)

    def shard(self, suffix: str, shape: Shape, value: Tensor) -> FlatShard:
        """Return the rows of `value` as a shard for the checkpoint.

        `value` is contiguous and has the parameter's shape; `shape` is that of the whole tensor.
        `suffix` names a moment, such as `.exp_avg`.
        """
        part = value.detach()[self.rows].reshape(-1)
        return FlatShard(self.name + suffix, shape, self.offset, self.extent, 0, part.numel(), part)


@dataclass(frozen=True)
class Boxes:
    """The boxes of one model on one rank."""

    wholes: Mapping[str, Shape]
    """Shape of each parameter of the model of transformers."""
    config: Mapping[str, Any]
    """`num_attention_heads`, `num_key_value_heads` and `head_dim` of that model."""
    grid: Grid
    prefix: str = "model."
    """Prefix of the decoder's names in transformers; `body.` in a critic."""
    is_tied: bool = False
    """True if the LM head is the input embedding."""
    first_layer: int = 0
    """Number of this rank's first layer."""

    def pieces(self, name: str, shape: Shape) -> list[Piece]:
        """Return the pieces of a local parameter of a GPTModel, or of the value head.

        A parameter with rows of padding only has none.
        """
        match = _LAYER.fullmatch(name)
        if match is None:
            there = TOP_NAMES.get(name, name)
            if self.is_tied and there == "lm_head.weight":
                there = TOP_NAMES["embedding.word_embeddings.weight"]
            return self._cut(self._renamed(there), shape, slice(0, shape[0]))
        layer, short = self._renamed(f"model.layers.{self.first_layer + int(match[1])}."), match[2]
        if short.startswith(EXPERTS):
            first = self.grid.ep_rank * shape[0]
            return [Piece(layer + short, (first, 0, 0), shape, slice(0, shape[0]))]
        if short in LAYER_NAMES:
            return self._cut(layer + LAYER_NAMES[short], shape, slice(0, shape[0]))
        if short == "mlp.linear_fc1.weight":
            half = (shape[0] // 2, *shape[1:])
            gate, up = slice(0, half[0]), slice(half[0], shape[0])
            pieces = self._cut(f"{layer}mlp.gate_proj.weight", half, gate)
            return pieces + self._cut(f"{layer}mlp.up_proj.weight", half, up)
        return list(self._attention(layer, short.rpartition(".")[2], shape))

    def _attention(self, layer: str, kind: str, shape: Shape) -> Iterator[Piece]:
        """Yield the queries, keys and values of each group of this rank."""
        heads = int(self.config["num_attention_heads"])
        groups = int(self.config["num_key_value_heads"])
        width = int(self.config["head_dim"])
        queries = heads // groups * width
        here = groups // self.grid.tp
        for group in range(here):
            start = group * (queries + 2 * width)
            for part, length in zip(_PROJECTIONS, (queries, width, width), strict=True):
                first = (self.grid.tp_rank * here + group) * length
                offset = (first, *(0,) * (len(shape) - 1))
                rows = slice(start, start + length)
                there = f"{layer}self_attn.{part}.{kind}"
                yield Piece(there, offset, (length, *shape[1:]), rows)
                start += length

    def _cut(self, there: str, shape: Shape, rows: slice) -> list[Piece]:
        """Return the piece of rows that form one box; tensor parallelism may cut one dimension.

        Only the vocabulary is padded, so its last part may have more rows than the tensor has left.
        """
        whole = self.wholes[there]
        offset, extent = [0] * len(whole), list(shape)
        for dim, (length, size) in enumerate(zip(shape, whole, strict=True)):
            if length != size:
                offset[dim] = min(self.grid.tp_rank * length, size)
                extent[dim] = min(length, size - offset[dim])
        if not all(extent):
            return []
        rows = slice(rows.start, rows.start + extent[0])
        return [Piece(there, tuple(offset), tuple(extent), rows)]

    def _renamed(self, there: str) -> str:
        return there.replace("model.", self.prefix, 1) if there.startswith("model.") else there


def fill_pieces(
    parameters: Mapping[str, Tensor],
    pieces: Mapping[str, list[Piece]],
    weights: Mapping[str, Tensor],
) -> None:
    """Copy this rank's boxes of the weights of transformers; rows of padding become 0.

    It skips a local parameter whose name is also in `weights` (the value head), and weights on the
    device `meta`, which the caller reads later.
    """
    with torch.no_grad():
        for name in parameters.keys() - weights.keys():
            parameters[name].zero_()
            for piece in pieces[name]:
                if weights[piece.name].is_meta:
                    continue
                ends = zip(piece.offset, piece.extent, strict=True)
                box = tuple(slice(start, start + length) for start, length in ends)
                piece.of(parameters[name]).copy_(weights[piece.name][box])
