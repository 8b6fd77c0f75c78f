"""Layouts of a rewritten checkpoint, and the boxes of a tensor that each rank gets.

A layout is text: `merged`, or degrees such as `fsdp=4,tp=2`. The module knows the usual names of
linear layers, and nothing else of a model; a tensor without a known name is whole on every rank
of `tp`. A checkpoint of any layout loads under every other one: a rewrite only decides which bytes
are neighbours.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from planish.base.errors import ConfigError
from planish.checkpoint.format.geometry import Box, flat_boxes, shift, whole
from planish.checkpoint.format.items import TensorSpec

MERGED = "merged"
"""Layout of one rank, written as a Hugging Face folder that engines load."""
AXES = ("dp", "fsdp", "flat", "tp")
"""Axes: whole copies, rows, runs of elements, and the dimension that tensor parallelism cuts."""
MAX_RANKS = 65_536

_SPLIT_ROWS = frozenset(
    [
        "q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj",
        "embed_tokens", "lm_head",
        "linear_qkv", "linear_fc1", "word_embeddings", "output_layer",
    ]
)  # fmt: skip
"""Layers that tensor parallelism cuts along dimension 0, with their biases."""
_SPLIT_COLUMNS = frozenset(["o_proj", "down_proj", "linear_proj", "linear_fc2"])
"""Layers that tensor parallelism cuts along dimension 1; their biases stay whole."""
_STACKED = re.compile(r"(?:^|\.)decoder\.layers\.(?!\d)")
_AXIS = re.compile(r"(?P<name>[a-z]+)=(?P<degree>[0-9]{1,6})")


@dataclass(frozen=True)
class Layout:
    """Split of the tensors of a rewritten checkpoint over its ranks."""

    dp: int = 1
    """Number of replicas."""
    fsdp: int = 1
    """Number of ranks that split the rows of every tensor."""
    flat: int = 1
    """Number of ranks that split the row-major elements of every tensor, also within rows."""
    tp: int = 1
    """Number of ranks that split linear layers and embeddings."""
    is_merged: bool = False
    """True for a Hugging Face folder in place of a checkpoint."""

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `merged` or degrees, e.g. `tp=4` or `dp=2,tp=2`."""
        if text.strip() == MERGED:
            return cls(is_merged=True)
        degrees: dict[str, int] = {}
        faults = []
        for part in text.split(","):
            match = _AXIS.fullmatch(part.strip())
            if match is None or match["name"] not in AXES or match["name"] in degrees:
                faults.append(f"{part.strip()!r} is none of {', '.join(f'{a}=N' for a in AXES)}")
                continue
            degrees[match["name"]] = int(match["degree"])
        faults += [f"`{name}` must be at least 1, got 0" for name, n in degrees.items() if n < 1]
        if min(degrees.get("fsdp", 1), degrees.get("flat", 1)) > 1:
            faults.append("`fsdp` and `flat` exclude each other")
        if math.prod(degrees.values()) > MAX_RANKS:
            faults.append(f"must have at most {MAX_RANKS} ranks")
        if faults:
            raise ConfigError(
                f"`layout` must be `{MERGED}` or degrees such as `fsdp=4,tp=2`, got {text!r}: "
                f"{'; '.join(faults)}"
            )
        dp, fsdp, flat, tp = (degrees.get(name, 1) for name in AXES)
        return cls(dp, fsdp, flat, tp)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the layout."""
        return self.dp * self.fsdp * self.flat * self.tp

    def __str__(self) -> str:
        if self.is_merged:
            return MERGED
        degrees = {name: getattr(self, name) for name in AXES}
        return ",".join(f"{name}={n}" for name, n in degrees.items() if n > 1) or "dp=1"

    def boxes(self, tensor: TensorSpec, rank: int) -> tuple[Box, ...]:
        """Return the boxes of a tensor that a rank gets; () if it gets none.

        `tp` is the fastest axis of the rank's number, then `fsdp` or `flat`, then `dp`. Parts are
        as of `torch.chunk`: the first ranks get the longer ones.
        """
        tp, data = rank % self.tp, rank // self.tp
        box = whole(tensor.shape)
        dim = tensor_parallel_dim(tensor.fqn, len(tensor.shape))
        if dim is not None and self.tp > 1:
            box = _chunk(box, dim, self.tp, tp)
        if self.fsdp > 1:
            number = data % self.fsdp
            if box.lengths:
                box = _chunk(box, 0, self.fsdp, number)
            elif number:
                return ()
        if self.flat > 1:
            step = -(-box.volume // self.flat)
            start = min(box.volume, data % self.flat * step)
            parts = flat_boxes(box.lengths, start, min(box.volume, start + step))
            return tuple(shift(part, box.offsets) for part in parts)
        return (box,) if box.volume else ()


def _chunk(box: Box, dim: int, parts: int, number: int) -> Box:
    """Return part `number` of `parts` of a box along a dimension; it may be empty."""
    length = box.lengths[dim]
    step = -(-length // parts)
    start = min(length, number * step)
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[dim] += start
    lengths[dim] = min(length, start + step) - start
    return Box(tuple(offsets), tuple(lengths))


def tensor_parallel_dim(fqn: str, num_dims: int) -> int | None:
    """Return the dimension that tensor parallelism cuts, None for a tensor that stays whole.

    A moment of an optimizer (`<fqn>.exp_avg`) is cut like its parameter.
    """
    names = fqn.split(".")
    # Megatron may stack one parameter of all layers in one tensor, and has norms in linear layers.
    lead = 1 if _STACKED.search(fqn) else 0
    if any(name.startswith("layer_norm") for name in names):
        return None
    if any(name in _SPLIT_ROWS for name in names):
        return lead if num_dims > lead else None
    if any(name in _SPLIT_COLUMNS for name in names) and num_dims > lead + 1:
        return lead + 1
    return None
