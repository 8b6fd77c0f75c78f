"""What is measured, in order of importance: a run that is stopped has measured the first phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PEERS = ("dcp_s3torch", "dcp_s3torch_async", "dcp_s3fs")
"""Systems that need CKPT_PEER_PYTHON."""
ON_STORE = ("ours", "dcp_s3torch")
PACE_SECONDS = 20.0
"""Over which `ours_paced` spreads its uploads."""
START_SECONDS = 15.0
GIGABYTES = {"W1": 0.7, "W2": 1.4, "W2-tp": 1.4, "W3": 1.4, "W4": 0.02, "W5": 1.1}
"""Of each workload as a whole."""


@dataclass(frozen=True)
class Phase:
    """Systems that take turns at one thing on one workload."""

    name: str
    kind: Literal["save", "load", "loss"]
    workload: str
    systems: tuple[str, ...]
    world: int = 4
    place: str = "tmpfs"
    source: str = ""
    """Phase whose last checkpoints are loaded."""
    scale: float = 1.0
    """Of the workload; FSDP2 and ZeRO-1 have 120 M parameters, and all systems share 24 GB."""
    is_extra: bool = False
    """Measured only when it is asked for."""

    def seconds(self, scale: float, turns: int) -> float:
        """Return about how long it takes on two idle cores."""
        gigabytes = GIGABYTES[self.workload] * self.scale * scale
        each = {"save": 2.5 + 4.5 * gigabytes, "load": 1.0 + 4.0 * gigabytes, "loss": 30.0}
        waited = PACE_SECONDS * turns * ("ours_paced" in self.systems)
        return START_SECONDS + turns * len(self.systems) * each[self.kind] + waited


PHASES = (
    Phase(
        "W1 save", "save", "W1",
        ("ours", "dcp_s3torch", "dcp_async", "dcp_async_reused", "ours_sync"),
    ),
    Phase("W1 load", "load", "W1", ON_STORE, source="W1 save"),
    Phase("W1 save, paced", "save", "W1", ("ours_paced",)),
    Phase(
        "W2 save", "save", "W2",
        ("ours", "dcp_s3torch", "dcp_async", "dcp_async_reused", "ours_sync"), scale=0.5,
    ),
    Phase("W2 load 4 to 2", "load", "W2", ON_STORE, world=2, source="W2 save", scale=0.5),
    Phase("W3 save", "save", "W3", ("ours", "dcp_gather_async", "dcp_gather"), scale=0.5),
    Phase("W4 save", "save", "W4", ("ours", "dcp_s3torch")),
    Phase("W1 save behind training", "save", "W1", ("ours", "dcp_s3torch_async")),
    Phase("W2 load 4 to 8", "load", "W2", ON_STORE, world=8, source="W2 save", scale=0.5),
    Phase("W2 load 4 to 1", "load", "W2", ON_STORE, world=1, source="W2 save", scale=0.5),
    Phase("W2 load FSDP2 to TP", "load", "W2-tp", ON_STORE, source="W2 save", scale=0.5),
    Phase(
        "W1 save, others", "save", "W1",
        ("ours", "dcp_file", "dcp_async_process", "dcp_s3fs", "bytecheckpoint",
         "torch_save"), is_extra=True,
    ),
    Phase(
        "W1 load, others", "load", "W1",
        ("ours", "dcp_s3fs", "bytecheckpoint", "torch_save"), source="W1 save, others",
        is_extra=True,
    ),
    Phase(
        "W1 save on disk", "save", "W1", ("ours", "dcp_file", "dcp_s3torch"), place="disk",
        is_extra=True,
    ),
    Phase(
        "W1 load from disk", "load", "W1", ON_STORE, place="disk", source="W1 save on disk",
        is_extra=True,
    ),
    Phase("W4 load", "load", "W4", ON_STORE, source="W4 save", is_extra=True),
    Phase("W5 save", "save", "W5", ("ours", "dcp_async_reused", "dcp_s3torch"), is_extra=True),
    Phase("W5 load", "load", "W5", ON_STORE, source="W5 save", is_extra=True),
    Phase("W1 save on 2 ranks", "save", "W1", ("ours",), world=2, is_extra=True),
    Phase("W1 rank lost", "loss", "W1", ("ours", "dcp_async"), is_extra=True),
)  # fmt: skip
