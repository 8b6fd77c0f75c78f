"""Recorded traces and what is known of them: a file of samples, and one of facts beside it.

    traces/a.npz     as `planish minder record` or `simulate` writes it; or CSV, or Parquet
    traces/a.json    {"truth": {"machines": ["n3"], "kind": "ecc-error",
                                "onset": 1700000400, "halt": 1700000900},
                      "stages": {}, "board": "NVIDIA H100 80GB HBM3"}

A trace without such a file, or without machines in its truth, is of a healthy job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planish.base.errors import ConfigError, RecordError
from planish.minder.detect.frame import Frame
from planish.minder.lab.files import ENDINGS, read_frame, write_frame
from planish.minder.lab.simulator.case import DETECTABLE_SECONDS, Case, Truth


def facts_path(path: Path) -> Path:
    """Return where the facts of a trace are."""
    return path.with_suffix(".json")


def facts_of(case: Case) -> dict[str, Any]:
    """Return the facts of a case as plain values."""
    return {"truth": asdict(case.truth), "stages": dict(case.stages), "board": case.board}


def write_recorded(path: Path, case: Case) -> None:
    """Write a trace of which nothing bad is known, and facts in which a fault can be labelled.

    Raises:
        ConfigError: a name with another ending.
    """
    write_frame(path, case.frame)
    truth = {"machines": [], "kind": "", "onset": 0, "halt": 0}
    text = json.dumps({**facts_of(case), "truth": truth}, indent=1)
    facts_path(path).write_text(text + "\n", "utf-8")


def trace_files(places: Sequence[Path]) -> list[Path]:
    """Return the traces among files and folders, by name.

    Raises:
        ConfigError: there is none.
    """
    found: set[Path] = set()
    for place in places:
        inside = place.rglob("*") if place.is_dir() else [place]
        found |= {path for path in inside if not place.is_dir() or path.suffix in ENDINGS}
    if not found:
        raise ConfigError(
            f"`--traces` must name files or folders with files that end in {ENDINGS}, got "
            f"{[str(place) for place in places]}"
        )
    return sorted(found)


def read_case(path: Path) -> Case:
    """Read a trace with its facts.

    Raises:
        ConfigError: no such trace.
        RecordError: trace or facts are damaged, or a machine or second is not of the trace.
    """
    frame, place = read_frame(path), facts_path(path)
    try:
        raw = json.loads(place.read_text("utf-8")) if place.exists() else {}
        truth = _truth(raw.get("truth") or {}, frame)
        stages = {str(name): str(stage) for name, stage in (raw.get("stages") or {}).items()}
        board = str(raw.get("board") or "")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"`{place}` must hold the facts of a trace, got {error}") from None
    return Case(frame, truth, stages, name=path.stem, board=board)


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
    # Whoever labels by hand has seen it, wherever it showed.
    visible = raw.get("visible", dict.fromkeys(frame.values, halt - onset))
    return Truth(
        machines=machines,
        kind=str(raw.get("kind") or "unknown"),
        onset=onset,
        halt=halt,
        visible={str(name): int(seconds) for name, seconds in visible.items()},
        detectable=bool(raw.get("detectable", halt - onset >= DETECTABLE_SECONDS)),
    )
