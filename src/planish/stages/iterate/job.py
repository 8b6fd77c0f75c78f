"""One task of several iterations as plain data; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from planish.stages.train.ranks.job import TrainJob


class Pins(NamedTuple):
    """What a block hands to the next."""

    policy_pin: str
    """Pinned URI of the policy that samples next."""
    state_pin: str
    """The same for the train state."""


@dataclass(frozen=True)
class Block(TrainJob):
    """Iterations `iteration`, `iteration + 1`, ...; pins are those before the first of them."""

    count: int = 1
    """Iterations of the block."""
    offset: int = 0
    """Iterations before this run."""
