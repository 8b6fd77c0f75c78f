"""Tasks and arms: the settings of each run of the studies."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planish.base.config import merge

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
RUNS = (REPOSITORY / "runs").resolve() / "studies"

SHARED = ("model", "curate", "sft")
"""Sections that decide prompts and initial policy: equal for all arms of a task."""


@dataclass(frozen=True)
class Arm:
    """One way of training; runs of an arm differ in the seed only."""

    task: str
    """Name of a TOML file beside this module."""
    name: str
    """Unique within the task."""
    overrides: tuple[str, ...] = ()
    """`section.key=value` over the settings of the task."""
    iterations: int = 0
    """Rollout batches; 0 takes the task's."""
    evaluate_every: int = 0
    """Iterations between evaluations; 0 takes the task's."""

    def definition(self, seed: int) -> dict[str, Any]:
        """Return everything that decides the outcome of a run, as JSON."""
        tables = task_tables(self.task)
        study = tables.pop("study")
        return {
            "tables": merge(tables, overrides=[*self.overrides, f"run.seed={seed}"]),
            "iterations": self.iterations or study["iterations"],
            "evaluate_every": self.evaluate_every or study["evaluate_every"],
        }

    def to_json(self) -> dict[str, Any]:
        """Return the arm as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Arm:
        """Read what `to_json` wrote."""
        return cls(**{**raw, "overrides": tuple(raw["overrides"])})


def task_tables(task: str) -> dict[str, dict[str, Any]]:
    """Return the raw tables of a task, `[study]` among them."""
    return tomllib.loads((HERE / f"{task}.toml").read_text("utf-8"))


def result_file(arm: Arm, seed: int) -> Path:
    """Return where the JSON of a finished run lies."""
    return RUNS / arm.task / arm.name / f"seed{seed}.json"


def run_root(arm: Arm, seed: int) -> Path:
    """Return the run root of an arm."""
    return RUNS / arm.task / arm.name / f"seed{seed}"


def base_root(task: str, seed: int) -> Path:
    """Return the run root with the prompts and the initial policy of all arms."""
    return RUNS / task / "base" / f"seed{seed}"
