"""One task of several iterations as plain data; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from planish.stages.train.ranks.job import TrainJob


@dataclass(frozen=True)
class Block(TrainJob):
    """Iterations `iteration`, `iteration + 1`, ...; pins are those before the first of them."""

    count: int = 1
    """Iterations of the block."""
    earlier_pin: str = ""
    """Policy before `policy_pin`, which samples first if rollouts are ahead; "" if they are not."""

    @property
    def last(self) -> int:
        """Number of the last iteration."""
        return self.iteration + self.count - 1
