"""Random streams of a rank: restored exactly under an unchanged layout, else derived anew."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class RandomStreams:
    """The generators of this process: Python, NumPy, torch, and the accelerator's where there is.

    Example:
        >>> RandomStreams(seed=1, coordinate={"dp": 0}, layout={"dp": 2}).outcome
        'absent'
    """

    seed: int
    """Of the run."""
    step: int = 0
    """Optimizer steps done: streams that are derived differ from step to step."""
    coordinate: Mapping[str, int] = field(default_factory=dict)
    """Axis of the layout -> this rank's index on it."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Axis of the layout -> its size."""
    outcome: str = "absent"
    """What the last load did: `exact`, `reseeded`, or `absent` before any."""

    def capture(self) -> dict[str, Any]:
        """Return the state of every generator and where it belongs."""
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        streams: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": (kind, np.asarray(keys), int(position), int(has_gauss), float(cached)),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            streams["cuda"] = torch.cuda.get_rng_state()
        return {
            "coordinate": dict(self.coordinate),
            "layout": dict(self.layout),
            "streams": streams,
        }

    def restore(self, saved: Mapping[str, Any]) -> str:
        """Set the generators; returns `exact` or `reseeded`.

        Exact needs the saved layout and coordinate, and the same kinds of generators.
        """
        streams = saved.get("streams", {})
        here = (dict(self.coordinate), dict(self.layout))
        same = (saved.get("coordinate"), saved.get("layout")) == here
        if same and ("cuda" in streams) == torch.cuda.is_available():
            version, keys, gauss = streams["python"]
            random.setstate((version, tuple(keys), gauss))
            np.random.set_state(tuple(streams["numpy"]))
            torch.set_rng_state(torch.as_tensor(streams["torch"], dtype=torch.uint8))
            if "cuda" in streams:
                torch.cuda.set_rng_state(torch.as_tensor(streams["cuda"], dtype=torch.uint8))
            self.outcome = "exact"
        else:
            self.derive()
            self.outcome = "reseeded"
        return self.outcome

    def derive(self) -> None:
        """Begin new streams from (seed, step, coordinate)."""
        place = zlib.crc32(repr(sorted(self.coordinate.items())).encode())
        words = np.random.SeedSequence([self.seed, self.step, place]).generate_state(6, np.uint32)
        wide = [int(words[k]) << 32 | int(words[k + 1]) for k in (0, 2)]
        random.seed(wide[0])
        np.random.seed(words[4:])
        torch.manual_seed(wide[1] >> 1)
