"""Cases: recorded traces, each with a file of samples and a file of facts beside it.

    traces/a.npz     as `planish minder record` writes it; or CSV, or Parquet
    traces/a.json    {"truth": {"machines": ["n3"], "kind": "ecc-error",
                                "onset": 1700000400, "halt": 1700000900},
                      "stages": {}, "waiting": {"n1": [[1700000100, 1700000160]]},
                      "board": "NVIDIA H100 80GB HBM3"}

A trace without a file of facts, or without machines in its truth, is of a healthy job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planish.base.errors import ConfigError, RecordError
from planish.minder.detect.frame import Frame, Stretches
from planish.minder.lab.files import ENDINGS, read_frame, write_frame

DETECTABLE_SECONDS = 285
"""Shortest visible time in seconds of a fault that a detector with a continuity of four minutes can
name. Slow samples make it longer, see `growth` in `detect.runs`."""


@dataclass(frozen=True)
class Truth:
    """The fault of a case."""

    machines: tuple[str, ...] = ()
    """Faulty machines, sorted; empty for a healthy job."""
    kind: str = ""
    onset: int = 0
    """Unix second at which the fault begins."""
    halt: int = 0
    """Unix second at which the whole job stops or the trace ends."""
    visible: Mapping[str, int] = field(default_factory=dict)
    """Map from metric (or `silent`) to the seconds for which the fault shows in it on a machine."""
    detectable: bool = False
    """True if the fault shows for at least `DETECTABLE_SECONDS` in one metric or as silence."""

    @property
    def faulty(self) -> bool:
        """True if there is a fault."""
        return bool(self.machines)


@dataclass(frozen=True)
class Case:
    """The trace of one job, with its truth."""

    frame: Frame
    truth: Truth
    stages: Mapping[str, str] = field(default_factory=dict)
    """Map from machine to pipeline stage."""
    name: str = ""
    """Name of the file without its ending."""
    board: str = ""
    """Model of the GPU boards; empty if not known."""
    waiting: Stretches = field(default_factory=dict)
    """Stretches in which each machine only waits for others."""


def facts_path(path: Path) -> Path:
    """Return the path of a trace's file of facts."""
    return path.with_suffix(".json")


def facts_of(case: Case) -> dict[str, Any]:
    """Return the facts of a case as JSON values."""
    return {
        "truth": asdict(case.truth),
        "stages": dict(case.stages),
        "waiting": dict(case.waiting),
        "board": case.board,
    }


def write_recorded(path: Path, case: Case) -> None:
    """Write the trace of a job, and facts that call it healthy and in which people can label a
    fault.
    """
    write_frame(path, case.frame)
    truth = {"machines": [], "kind": "", "onset": 0, "halt": 0}
    text = json.dumps({**facts_of(case), "truth": truth}, indent=1)
    facts_path(path).write_text(text + "\n", "utf-8")


def trace_files(places: Sequence[Path]) -> list[Path]:
    """Return the traces among files and folders, sorted; ConfigError if there is none."""
    paths: set[Path] = set()
    for place in places:
        if place.is_dir():
            paths |= {path for path in place.rglob("*") if path.suffix in ENDINGS}
        else:
            paths.add(place)
    if not paths:
        raise ConfigError(
            f"`--traces` must name files or folders with files that end in {ENDINGS}, got "
            f"{[str(place) for place in places]}"
        )
    return sorted(paths)


def read_case(path: Path) -> Case:
    """Read a trace with its facts.

    Raises:
        ConfigError: there is no such trace.
        RecordError: trace or facts are damaged, or facts name a machine or second outside the
            trace.
    """
    frame, place = read_frame(path), facts_path(path)
    try:
        raw = json.loads(place.read_text("utf-8")) if place.exists() else {}
        truth = _truth(raw.get("truth") or {}, frame)
        stages = {str(name): str(stage) for name, stage in (raw.get("stages") or {}).items()}
        waiting = {
            str(name): [(int(start), int(stop)) for start, stop in stretches]
            for name, stretches in (raw.get("waiting") or {}).items()
        }
        board = str(raw.get("board") or "")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"`{place}` must hold the facts of a trace, got {error}") from None
    return Case(frame, truth, stages, name=path.stem, board=board, waiting=waiting)


def _truth(raw: Mapping[str, Any], frame: Frame) -> Truth:
    machines = tuple(sorted(map(str, raw.get("machines") or ())))
    if not machines:
        return Truth()
    first, last = int(frame.ts[0]), int(frame.ts[-1]) + 1
    onset = int(raw.get("onset") or first)
    halt = min(int(raw.get("halt") or last), last)
    unknown = sorted(set(machines) - set(frame.machines))
    if unknown or not first <= onset < halt:
        raise ValueError(
            f"a fault of {list(machines)} from {onset} to {halt}, where machines are "
            f"{list(frame.machines[:4])}... and seconds {first} to {last}"
        )
    # A label by hand does not name the metrics that show the fault, so all metrics count.
    visible = raw.get("visible", dict.fromkeys(frame.values, halt - onset))
    return Truth(
        machines=machines,
        kind=str(raw.get("kind") or "unknown"),
        onset=onset,
        halt=halt,
        visible={str(name): int(seconds) for name, seconds in visible.items()},
        detectable=bool(raw.get("detectable", halt - onset >= DETECTABLE_SECONDS)),
    )
