"""Map from each weight of a Hugging Face model to stored tensors, and casts of their elements.

A weight is one stored tensor, or boxes of one: Megatron keeps queries, keys and values of a group
next to each other, gate and up projection in one matrix, all layers in one tensor and a padded
vocabulary. A weight may have a low-rank adapter; its product is added in float32, as the trainer
computes it. The module also rounds elements from one float type to another. It needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import ITEM_BYTES, TORCH_TYPES, TensorSpec
from planish.checkpoint.format.strict_json import Values
from planish.checkpoint.loading.fill import Array
from planish.checkpoint.loading.reader import Opened
from planish.checkpoint.loading.slices import Slice, SliceReader
from planish.models.adapters import DOWN, SCALE, UP, is_adapter
from planish.models.experts import LAYER_NAMES, TOP_NAMES, disk_tensors


class Form(NamedTuple):
    """Type and shape of a tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class AdapterPart(NamedTuple):
    """Low-rank adapter of a weight, which adds scale x up x down."""

    down: Slice
    """[rank, columns]"""
    up: Slice
    """[rows, rank]"""
    scale: Slice


class WeightPart(NamedTuple):
    """Stored tensors of one weight."""

    slice: Slice
    form: Form
    """Stored type, and the shape of the weight."""
    adapter: AdapterPart | None = None
    """Adapter of the weight; None without one."""


Sources = dict[str, WeightPart]
"""Name of a weight -> its stored tensors."""

_MEGATRON = "decoder.layers."
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")


def weights_of(opened: Opened, role: str, config: Values) -> Sources:
    """Return the stored tensors of each weight of a role's model.

    Tensors of Megatron-core's GPTModel become the weights of a Llama- or Qwen-like model: fused
    projections are split; the padding of the vocabulary and a tied head are left out. Tensors of
    other models, and those of Megatron without a config, keep their names.

    `config` is the content of the model's `config.json`, empty without one. Raises `LayoutMismatch`
    if a tensor of Megatron has no place in such a model.
    """
    table = opened.metadata.tensors
    tensors = {
        fqn: table.spec(row)
        for (owner, kind, fqn), row in table.ids.items()
        if owner == role and kind == "model"
    }
    if not config or not any(name.startswith(_MEGATRON) for name in tensors):
        return {
            part.name: WeightPart(
                Slice(spec, (Box(part.start, part.extent),)),
                Form(spec.dtype, part.shape),
                adapter_of(name, tensors),
            )
            for name, spec in tensors.items()
            if not is_adapter(name)
            for part in disk_tensors(name, spec.shape, config)
        }
    weights: Sources = {}
    unknown = []
    for name, spec in tensors.items():
        if name == "output_layer.weight" and config.get("tie_word_embeddings"):
            continue
        made = dict(_weights(name, spec, config))
        unknown += [] if made else [name]
        weights |= made
    if unknown:
        raise LayoutMismatch(
            f"every tensor must have a place in a Llama- or Qwen-like model, {unknown} have none; "
            "export without `config.json` and rename the weights yourself"
        )
    return weights


def adapter_of(name: str, tensors: Mapping[str, TensorSpec]) -> AdapterPart | None:
    """Return the adapter of a weight; `LayoutMismatch` if its parts do not fit the weight."""
    layer = name.removesuffix(".weight")
    names = [f"{layer}.{DOWN}.weight", f"{layer}.{UP}.weight", SCALE]
    if layer == name or tensors.keys().isdisjoint(names[:2]):
        return None
    specs = [tensors.get(part) for part in names]
    shapes = [None if spec is None else list(spec.shape) for spec in specs]
    down, rows_and_columns = shapes[0], list(tensors[name].shape)
    rank = down[0] if down else 0
    if shapes != [[rank, *rows_and_columns[1:]], [*rows_and_columns[:1], rank], []]:
        raise LayoutMismatch(
            f"`{name}` {rows_and_columns} must have an adapter of {names}, got the shapes {shapes};"
            " export a state as the trainer saved it"
        )
    return AdapterPart(*(Slice(spec, (whole(spec.shape),)) for spec in specs if spec is not None))


def _weights(name: str, spec: TensorSpec, config: Values) -> Iterator[tuple[str, WeightPart]]:
    """Yield the weights that one stored tensor becomes."""
    if name in TOP_NAMES:
        rows = spec.shape[0] if "layernorm" in name else int(config["vocab_size"])
        yield TOP_NAMES[name], _rows_of(spec, [(0, rows)])
    match = _LAYER.fullmatch(name)
    if match is None:
        return
    stacked = match[1] is None
    layers = range(int(config["num_hidden_layers"])) if stacked else [int(match[1])]
    for number in layers:
        layer = number if stacked else None
        for short, runs in _runs(match[2], spec.shape[1 if stacked else 0], config):
            yield f"model.layers.{number}.{short}", _rows_of(spec, runs, layer)


def _rows_of(spec: TensorSpec, runs: list[tuple[int, int]], layer: int | None = None) -> WeightPart:
    """Return runs `[start, stop)` of a tensor's rows; `layer` is an index of stacked layers."""
    lead = () if layer is None else (layer,)
    rest = spec.shape[len(lead) + 1 :]
    boxes = tuple(
        Box((*lead, start, *(0,) * len(rest)), (*(1,) * len(lead), stop - start, *rest))
        for start, stop in runs
    )
    count = sum(stop - start for start, stop in runs)
    return WeightPart(Slice(spec, boxes), Form(spec.dtype, (count, *rest)))


def _runs(name: str, rows: int, config: Values) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield each weight of one layer that a tensor contains, as runs of its rows."""
    if name in LAYER_NAMES:
        yield LAYER_NAMES[name], [(0, rows)]
    elif name == "mlp.linear_fc1.weight":
        yield "mlp.gate_proj.weight", [(0, rows // 2)]
        yield "mlp.up_proj.weight", [(rows // 2, rows)]
    elif name in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        kind = name.rpartition(".")[2]
        heads = int(config["num_attention_heads"])
        groups = int(config.get("num_key_value_heads") or heads)
        width = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        queries = heads // groups * width
        size = queries + 2 * width
        if rows != groups * size:
            raise LayoutMismatch(
                f"`{name}` must have {groups * size} rows for {heads} heads and "
                f"{groups} groups of width {width}, got {rows}; pass the config of this model"
            )
        starts = [group * size for group in range(groups)]
        yield f"self_attn.q_proj.{kind}", [(s, s + queries) for s in starts]
        for place, short in enumerate(("k_proj", "v_proj")):
            low = queries + place * width
            yield f"self_attn.{short}.{kind}", [(s + low, s + low + width) for s in starts]


FLOATS = ("F64", "F32", "F16", "BF16")
"""Float types that a policy may have."""


def to_numbers(elements: Array, dtype: str) -> Array | None:
    """Return [n] elements of type `dtype` as a numpy array of numbers; None if numpy lacks it.

    `elements` are raw bits of the item size. BF16 becomes float32, integers become float64.
    """
    bits = np.ascontiguousarray(elements)
    if dtype == "BF16":
        return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype.startswith("F8"):
        return None
    numbers = bits.view(TORCH_TYPES[dtype])
    return numbers if dtype[0] in "FC" else numbers.astype(np.float64)


def cast(elements: Array, stored: str, wanted: str) -> Array:
    """Return [n] elements, whose bits are of the type `stored`, in the float type `wanted`.

    Numbers are rounded to nearest, ties to even. Raises `LayoutMismatch` if the types differ and
    are not both of F64, F32, F16 and BF16.
    """
    if stored == wanted:
        return elements
    if not {stored, wanted} <= {*FLOATS}:
        raise LayoutMismatch(
            f"weights must be exported between float types, got {stored} to {wanted}"
        )
    numbers = to_numbers(elements, stored)
    assert numbers is not None
    with np.errstate(over="ignore"):
        if wanted == "BF16":
            return to_bfloat16(numbers.astype(np.float32))
        return numbers.astype(TORCH_TYPES[wanted])


def to_bfloat16(numbers: Array) -> Array:
    """Round float32 to the upper 16 bits, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), rounded).astype(np.uint16)


def read_weights(reader: SliceReader, parts: Sequence[WeightPart]) -> list[tuple[Array, str]]:
    """Return [n] elements and type of each weight: as stored, or F32 with adapters merged."""
    adapters = [part.adapter for part in parts if part.adapter is not None]
    arrays = reader.read_many([part.slice for part in parts] + [s for a in adapters for s in a])
    weights: list[tuple[Array, str]] = []
    added = iter(arrays[len(parts) :])
    for part, array in zip(parts, arrays, strict=False):
        if part.adapter is None:
            weights.append((array, part.form.dtype))
            continue
        weight = _numbers(array, part.slice).reshape(part.form.shape)
        down, up, scale = (
            _numbers(next(added), piece).reshape(piece.tensor.shape) for piece in part.adapter
        )
        weights.append(((weight + (up @ down) * scale).reshape(-1), "F32"))
    return weights


def _numbers(elements: Array, source: Slice) -> Array:
    numbers = to_numbers(elements, source.tensor.dtype)
    if numbers is None:
        raise LayoutMismatch(
            f"`{source.tensor.fqn}` must be of a float type to have adapters, got "
            f"{source.tensor.dtype}; export a state as the trainer saved it"
        )
    return numbers.astype(np.float32)
