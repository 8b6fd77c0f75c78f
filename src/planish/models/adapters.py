"""Low-rank adapters (LoRA): the layers that get them, and their settings in a train state.

A linear layer with weight W [rows, columns] computes with W + alpha / rank * B A, where A is [rank,
columns] and B is [rows, rank]. Training changes A and B but not W. The module imports no torch, so
`prepare` can check adapters before a run takes a GPU; `planish.models.lora` builds them.

Source: LoRA, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from planish.base.errors import ConfigError
from planish.models.config import ModelConfig
from planish.models.experts import is_expert

KEY = "lora"
"""Key of the settings in the JSON part of a train state; absent if all weights train."""
DOWN, UP, SCALE = "lora_A", "lora_B", "lora_scale"
"""Names of tensors: `<layer>.lora_A.weight` (A) and `<layer>.lora_B.weight` (B) beside
`<layer>.weight`, and one `lora_scale`, which is `alpha / rank`, for the whole model."""

_LAYER = re.compile(r"(?:.+\.)?layers\.\d+\..+")


class Adapters(NamedTuple):
    """Rank, scale and layers of the adapters."""

    rank: int
    """Number of columns of B, above 0."""
    alpha: float
    target_modules: tuple[str, ...]
    """Last parts of the names of layers; empty: every linear layer except those of experts."""

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / self.rank

    def to_json(self) -> dict[str, Any]:
        """Return the settings in JSON form."""
        return {**self._asdict(), "target_modules": list(self.target_modules)}


def configured(config: ModelConfig) -> Adapters | None:
    """Return the adapters of a configuration; None if all weights train."""
    if not config.lora_rank:
        return None
    targets = tuple(sorted(set(config.lora_target_modules)))
    return Adapters(config.lora_rank, config.lora_alpha, targets)


def find_layers(
    shapes: Mapping[str, Sequence[int]], wanted: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Return the layers that get adapters, with rows and columns of their weights.

    `shapes` has linear layers and experts, by their names in memory or on disk. `wanted` is like
    `Adapters.target_modules`.

    Raises:
        ConfigError: a name matches no linear layer, or names experts.
    """
    layers: dict[str, tuple[int, int]] = {}
    of_experts: set[str] = set()
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if _LAYER.fullmatch(layer) is None:
            continue
        if is_expert(name) or ".experts." in name:
            of_experts.add(layer.rpartition(".")[2])
        # transformers implements a router without a linear layer.
        elif len(shape) == 2 and layer != name and not layer.endswith(".gate"):
            layers[layer] = (shape[0], shape[1])
    known = {layer.rpartition(".")[2] for layer in layers}
    absent = sorted(set(wanted) - known)
    if absent or not known:
        experts = sorted(of_experts.intersection(absent))
        what = f"{experts} of routed experts, which take no adapters" if experts else f"{absent}"
        raise ConfigError(
            "`model.lora_target_modules` must name linear layers of the model's decoder layers, "
            f"which has {sorted(known)}, got {what}"
            + ("; name some of these" if known else "; set `model.lora_rank = 0` for this model")
        )
    return {
        layer: shape
        for layer, shape in layers.items()
        if not wanted or layer.rpartition(".")[2] in wanted
    }


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a train state belongs to adapters.

    Example:
        >>> is_adapter("layers.0.q_proj.lora_A.weight"), is_adapter("layers.0.q_proj.weight")
        (True, False)
    """
    return not {DOWN, UP, SCALE}.isdisjoint(name.split("."))


def num_trained(layers: Mapping[str, tuple[int, int]], rank: int) -> int:
    """Return the number of parameters in all adapters."""
    return sum(rank * (rows + columns) for rows, columns in layers.values())


def check_same(info: Mapping[str, Any], adapters: Adapters | None, *, pin: str) -> None:
    """Refuse a train state whose adapters differ from those of the configuration.

    `info` is the JSON part of the state at `pin`.

    Raises:
        ConfigError: rank, alpha or layers differ, or only one side has adapters.
    """
    held, wanted = info.get(KEY), adapters.to_json() if adapters else None
    if held != wanted:
        there, here = (
            ", ".join(f"{name} {value}" for name, value in (settings or {}).items())
            or "all weights"
            for settings in (held, wanted)
        )
        raise ConfigError(
            "`model.lora_rank`, `lora_alpha` and `lora_target_modules` must be those of the train "
            f"state that is loaded, {there} in {pin!r}, got {here}; undo the change, or start a "
            "new root from the policy alone (`model=<policy folder>`)"
        )
