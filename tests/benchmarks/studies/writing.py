"""A study: its arms, how its runs are read, and the JSON and picture that come of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.facts import RESULTS, write_result
from tests.benchmarks.studies.arms import Arm
from tests.benchmarks.studies.reading import (
    RULE,
    Interval,
    Run,
    Runs,
    interval,
    read_run,
    verdict,
)
from tests.benchmarks.studies.runner import is_finished

MEASURED = "measured-cpu"
SIMULATED = "simulated"


@dataclass(frozen=True)
class Direction:
    """One thing that a paper says goes up or down, and what was seen here."""

    statement: str
    """What is compared: `A - B in X`, or `A / B in X`."""
    published: str
    """What the paper says of it, with its figures where there are any."""
    difference: Interval
    """Here, seed by seed; what `ratio_interval` makes of ratios."""
    sign: int = 1
    """1 where the paper says more, -1 where it says less."""
    is_ratio: bool = False
    """Ratios are compared on a log scale."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON with the verdict."""
        compared = self.difference
        if self.is_ratio:
            compared = interval(math.log(ratio) for ratio in compared.values)
        return {
            "statement": self.statement,
            "published": self.published,
            "ratio" if self.is_ratio else "difference": self.difference.to_json(),
            "published_sign": self.sign,
            "seen": verdict(compared, sign=self.sign),
        }


@dataclass(frozen=True)
class Findings:
    """What a study has found."""

    figures: dict[str, Any]
    """Values for the JSON; an `Interval` anywhere inside is written as JSON."""
    directions: Sequence[Direction]
    """Published directions."""
    draw: Callable[[Any], None]
    """Draws on a matplotlib figure."""
    size: tuple[float, float] = (9.0, 3.6)
    """Of the picture, inches."""


@dataclass(frozen=True)
class Study:
    """One question."""

    name: str
    """On the command line; the files are `study_<name>` with underscores."""
    title: str
    """The question in words; the title of the picture."""
    source: str
    """Paper and section whose statements are examined."""
    read: Callable[[Runs], Findings]
    """Makes findings of the runs."""
    arms: Mapping[str, Arm] = field(default_factory=dict)
    """Label to arm; empty where `read` measures by itself."""
    label: str = MEASURED
    """`measured-cpu` or `simulated`."""
    may_lack: frozenset[str] = frozenset()
    """Arms that are left out, and named so, while some of their runs are not finished."""
    remark: str = ""
    """What a reader must know of how the runs came about; empty for nothing."""


def plain(value: Any) -> Any:
    """Return nested figures as JSON."""
    if isinstance(value, Interval):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def write_study(study: Study, seeds: Iterable[int]) -> Path:
    """Read the runs of a study, write its JSON and its picture; returns the path of the JSON."""
    seeds = list(seeds)
    arms = {
        label: arm
        for label, arm in study.arms.items()
        if label not in study.may_lack or all(is_finished(arm, seed) for seed in seeds)
    }
    runs: dict[str, list[Run]] = {
        label: [read_run(arm, seed) for seed in seeds] for label, arm in arms.items()
    }
    found = study.read(runs)
    result: dict[str, Any] = {
        "question": study.title,
        "source": study.source,
        "figures": plain(found.figures),
        "directions": [direction.to_json() for direction in found.directions],
        "rule": RULE,
        **({"remark": study.remark} if study.remark else {}),
    }
    if runs:
        result["seeds"] = seeds
        result["arms"] = {
            label: {"overrides": list(arm.overrides), "task": arm.task}
            for label, arm in arms.items()
        }
        result["arms_not_finished"] = sorted(set(study.arms) - set(arms))
        result["commits_of_runs"] = sorted(
            {run.raw["commit"] for row in runs.values() for run in row}
        )
    file = f"study_{study.name.replace('-', '_')}"
    draw_picture(study, found, RESULTS / f"{file}.svg")
    command = ["--study", study.name, "--seeds", *map(str, seeds)]
    return write_result(file, study.label, result, "tests.benchmarks.studies", command)


def draw_picture(study: Study, found: Findings, path: Path) -> None:
    """Draw the picture of a study; equal findings give equal bytes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "planish"
    from matplotlib.figure import Figure

    figure = Figure(figsize=found.size, layout="constrained")
    found.draw(figure)
    figure.suptitle(f"{study.title} ({study.label})", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
