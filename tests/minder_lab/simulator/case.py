"""What the simulator gives: a case with its seed and the raw samples."""

from dataclasses import dataclass, field

from planish.minder.detect.frame import Samples
from planish.minder.lab.cases import Case


@dataclass(frozen=True)
class SimulatedCase(Case):
    """One simulated job."""

    seed: int = 0
    samples: Samples = field(default_factory=dict)
    """As the machines sent them, only when asked for."""
