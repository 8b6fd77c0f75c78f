"""Which expert rank holds which experts of each sparse layer.

A layout changes between iterations only, and its version is in every frame.

Source: MegaScale-Infer, arXiv 2504.02263, section 6 (expert load balance by redundancy).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planish.engines.disagg.placement import Placement, place


@dataclass(frozen=True)
class ExpertLayout:
    """Placements of all layers; expert ranks are its nodes, from 0.

    Example:
        >>> layout = ExpertLayout.of([[1.0, 1.0], [5.0, 1.0]], num_nodes=2, num_redundant=0)
        >>> layout.held(0), ExpertLayout.parse(layout.plain()) == layout
        ([(0,), (0,)], True)
    """

    version: int
    """Grows with each change."""
    layers: tuple[Placement, ...]
    """Of each sparse layer."""

    @classmethod
    def of(
        cls,
        loads: Sequence[Sequence[float]],
        *,
        num_nodes: int,
        num_redundant: int,
        version: int = 0,
    ) -> ExpertLayout:
        """Return a layout for some loads.

        Args:
            loads: [layers][experts] rows of each expert; all equal where nothing is known.
            num_nodes: expert ranks; they divide the experts of a layer.
            num_redundant: replicas that each holds besides its part.
            version: of the layout.
        """
        slots = len(loads[0]) // num_nodes + num_redundant
        return cls(version, tuple(place(layer, num_nodes, slots) for layer in loads))

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.layers[0].num_experts

    def held(self, node: int) -> list[tuple[int, ...]]:
        """Return the experts of a node, by layer."""
        return [placement.experts[node] for placement in self.layers]

    def plain(self) -> dict[str, Any]:
        """Return this as JSON holds it."""
        return asdict(self)

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> ExpertLayout:
        """Return what `plain` was given."""
        layers = [
            Placement(*(tuple(map(tuple, layer[name])) for name in ("experts", "shares")))
            for layer in plain["layers"]
        ]
        return cls(int(plain["version"]), tuple(layers))
