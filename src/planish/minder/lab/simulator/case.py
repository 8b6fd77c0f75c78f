"""What the simulator gives: traces of one job, and what is true of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planish.minder.detect.frame import Frame, Samples

DETECTABLE_SECONDS = 285
"""A fault that shows in no metric for so long can be named by no detector of four minutes."""


@dataclass(frozen=True)
class Truth:
    """What is wrong in a case.

    Example:
        >>> Truth().faulty, Truth(("node-003",), "nic-dropout", 100, 700).faulty
        (False, True)
    """

    machines: tuple[str, ...] = ()
    """Faulty machines, sorted; empty for a healthy job."""
    kind: str = ""
    """Key of `FAULTS`; empty for a healthy job."""
    onset: int = 0
    """Unix second at which the fault begins."""
    halt: int = 0
    """Unix second at which the whole job stops; that after the trace for a job that goes on."""
    visible: Mapping[str, int] = field(default_factory=dict)
    """Metric to the seconds for which it shows the fault on a machine; `silent` for silence."""
    detectable: bool = False
    """Visible for at least `DETECTABLE_SECONDS` in one metric of the frame, or silent."""

    @property
    def faulty(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.machines)


@dataclass(frozen=True)
class Case:
    """One job, simulated or recorded."""

    frame: Frame
    """Its traces, aligned."""
    truth: Truth
    stages: Mapping[str, str] = field(default_factory=dict)
    """Machine to pipeline stage; empty for a job without stages."""
    seed: int = 0
    samples: Samples = field(default_factory=dict)
    """As the machines sent them, only when asked for."""
    name: str = ""
    """Of the file of a recorded job."""
    board: str = ""
    """Model of the boards of a recorded job; empty when not known."""
