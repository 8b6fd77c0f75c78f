"""Replay simulated or recorded jobs through several detectors, as the service would look at them.

Seeds of training, calibration and evaluation never meet, see `SEEDS`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from planish.minder.lab.cases import Case, read_case
from planish.minder.lab.evaluate import Progress, in_processes, outcome_of
from planish.minder.lab.score import CaseOutcome
from tests.minder_lab.simulator import simulate
from tests.minder_lab.simulator.sampling import thinned
from tests.minder_lab.variants import Variant, build

SEEDS = {"train": 1_000_000, "calibrate": 2_000_000, "evaluate": 3_000_000}
"""First seed of each use; a million apart."""

Wanted = tuple[int, str | None] | Path
"""A case: seed and fault of a simulated job, or the file of a recorded one."""


@dataclass(frozen=True)
class Plan:
    """Which detectors look at the cases."""

    variants: tuple[str, ...]
    models: Path
    """Folder of the models of single metrics."""
    comparison: Path
    """Folder of what only comparisons need."""
    config: Mapping[str, Any] | None = None
    """Tables that the default profile starts from."""
    every: int = 1
    """Seconds between two samples of a simulated machine."""
    missing: float = 0.0
    """Share of the samples of simulated jobs that are lost."""

    def build(self) -> dict[str, Variant]:
        """Return the detectors."""
        return {
            name: build(name, self.models, base=self.config, comparison=self.comparison)
            for name in self.variants
        }


def cases(first: int, faults: int, normal: int) -> list[Wanted]:
    """Return seeds and faults of cases: those with a fault first.

    Example:
        >>> cases(3_000_000, 1, 2)
        [(3000000, 'any'), (3000001, None), (3000002, None)]
    """
    kinds: list[str | None] = ["any"] * faults + [None] * normal
    return [(first + i, kind) for i, kind in enumerate(kinds)]


def case_of(wanted: Wanted, plan: Plan) -> Case:
    """Return a case; a recorded one is read."""
    if isinstance(wanted, Path):
        return read_case(wanted)
    case = simulate(wanted[0], fault=wanted[1])
    if plan.every == 1 and not plan.missing:
        return case
    rng = np.random.default_rng([wanted[0], plan.every])
    return replace(case, frame=thinned(case.frame, rng, every=plan.every, missing=plan.missing))


def evaluate(
    plan: Plan, wanted: Sequence[Wanted], *, workers: int = 1, progress: Progress = lambda *_: None
) -> dict[str, list[CaseOutcome]]:
    """Return variant to its outcomes, in the order of the cases."""
    judge = functools.partial(one_case, plan=plan)
    found = list(in_processes(judge, wanted, workers=workers, progress=progress))
    return {name: [outcomes[name] for outcomes in found] for name in plan.variants}


def one_case(wanted: Wanted, plan: Plan) -> dict[str, CaseOutcome]:
    """Replay one case through all variants."""
    case, variants = case_of(wanted, plan), plan.build()
    metrics = tuple(dict.fromkeys(m for v in variants.values() for m in v.config.detect.metrics))
    return {
        name: outcome_of(
            case, variant.models, variant.config, metrics=metrics, detector=variant.make()
        )
        for name, variant in variants.items()
    }
