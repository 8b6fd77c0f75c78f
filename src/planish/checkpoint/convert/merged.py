"""Weights as they are exported: read from a checkpoint, with what their adapters add.

numpy only. Sums are float32, as the trainer computes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planish.base.errors import LayoutMismatch
from planish.checkpoint.convert.hf_names import WeightPart
from planish.checkpoint.convert.numbers import Array, to_numbers
from planish.checkpoint.load.slices import Slice, SliceReader


def read_weights(reader: SliceReader, parts: Sequence[WeightPart]) -> list[tuple[Array, str]]:
    """Return the elements of weights, and their types as `numbers.cast` takes them.

    Args:
        reader: of the checkpoint.
        parts: what the weights are made of.

    Returns:
        Of each weight [n] elements in their stored type, or in F32 where adapters are merged.

    Raises:
        LayoutMismatch: a weight with an adapter is of a type that numpy cannot compute with.
        CheckpointCorrupt: a block differs from its checksum.
    """
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
