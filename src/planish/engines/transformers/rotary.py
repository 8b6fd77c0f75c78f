"""Rotary position embeddings as a table of cosines and signed sines.

Dynamic scalings, whose table depends on the length in use, are left out.

Source: RoFormer, arXiv 2104.09864, section 3.2; Llama 3's scaling as in its model card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def _default(rope: Mapping[str, Any], frequencies: Tensor) -> Tensor:
    return frequencies


def _linear(rope: Mapping[str, Any], frequencies: Tensor) -> Tensor:
    return frequencies / float(rope["factor"])


def _llama3(rope: Mapping[str, Any], frequencies: Tensor) -> Tensor:
    """Slow frequencies are divided, fast ones kept, those between blended."""
    slow, fast = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    length = float(rope["original_max_position_embeddings"])
    turns = length * frequencies / (2 * math.pi)
    share = ((turns - slow) / (fast - slow)).clamp(0.0, 1.0)
    return (1 - share) * frequencies / float(rope["factor"]) + share * frequencies


SCALINGS: dict[str, Callable[[Mapping[str, Any], Tensor], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
}
"""`rope_type` of a configuration to what it does with the frequencies."""


def rotation_table(rope: Mapping[str, Any], head_dim: int, length: int) -> Tensor:
    """Return what rotates a head: `x * table[p, 0] + roll(x, head_dim / 2) * table[p, 1]`.

    Args:
        rope: `rope_type`, `rope_theta` and the settings of the type.
        head_dim: size of a head, even.
        length: positions.

    Returns:
        [length, 2, head_dim] float32: cosines, and sines whose first half is negated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / float(rope["rope_theta"]) ** exponents
    frequencies = SCALINGS[rope["rope_type"]](rope, frequencies)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
