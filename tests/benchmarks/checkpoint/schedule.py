"""What is measured, in order of importance: a run that is stopped has measured the first phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PEERS = ("dcp_s3torch", "dcp_s3torch_async", "dcp_s3fs")
"""Systems that need CKPT_PEER_PYTHON."""
ON_STORE = ("ours", "dcp_s3torch")


@dataclass(frozen=True)
class Phase:
    """Systems that take turns at one thing on one workload."""

    name: str
    kind: Literal["save", "load", "loss"]
    workload: str
    systems: tuple[str, ...]
    world: int = 4
    place: str = "tmpfs"
    quick: int = 3
    """Measured rounds of a quick run, at most."""
    source: str = ""
    """Phase whose last checkpoints are loaded."""


PHASES = (
    Phase(
        "W1 save", "save", "W1",
        ("ours", "dcp_file", "dcp_async", "dcp_async_reused", "dcp_s3torch", "ours_lazy",
         "ours_sync"), quick=7,
    ),
    Phase("W1 load", "load", "W1", ON_STORE, quick=7, source="W1 save"),
    Phase(
        "W2 save", "save", "W2",
        ("ours", "dcp_file", "dcp_async", "dcp_async_reused", "dcp_s3torch", "ours_sync"), quick=5,
    ),
    Phase("W2 load 4 to 2", "load", "W2", ON_STORE, world=2, quick=7, source="W2 save"),
    Phase("W3 save", "save", "W3", ("ours", "dcp_gather_async", "dcp_gather"), quick=5),
    Phase("W1 save behind training", "save", "W1", ("ours", "dcp_s3torch_async")),
    Phase(
        "W1 save, others", "save", "W1",
        ("ours", "dcp_async_process", "dcp_s3fs", "bytecheckpoint", "torch_save"),
    ),
    Phase(
        "W1 load, others", "load", "W1",
        ("ours", "dcp_s3fs", "bytecheckpoint", "torch_save"), source="W1 save, others",
    ),
    Phase("W2 load 4 to 8", "load", "W2", ON_STORE, world=8, source="W2 save"),
    Phase("W2 load 4 to 1", "load", "W2", ON_STORE, world=1, source="W2 save"),
    Phase("W2 load FSDP2 to TP", "load", "W2-tp", ON_STORE, source="W2 save"),
    Phase("W1 save on disk", "save", "W1", ("ours", "dcp_file", "dcp_s3torch"), place="disk"),
    Phase("W1 load from disk", "load", "W1", ON_STORE, place="disk", source="W1 save on disk"),
    Phase("W4 save", "save", "W4", ("ours", "dcp_file", "dcp_async", "dcp_s3torch")),
    Phase("W4 load", "load", "W4", ON_STORE, source="W4 save"),
    Phase("W5 save", "save", "W5", ("ours", "dcp_async_reused", "dcp_s3torch")),
    Phase("W5 load", "load", "W5", ON_STORE, source="W5 save"),
    Phase("W1 save on 2 ranks", "save", "W1", ("ours",), world=2),
    Phase("W1 rank lost", "loss", "W1", ("ours", "dcp_async")),
)  # fmt: skip
