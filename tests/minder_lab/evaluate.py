"""Replay simulated or recorded jobs through several detectors, as the service would look at them.

Seeds of training, calibration and evaluation never meet, see `SEEDS`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from planish.minder.lab.cases import Case, read_case
from planish.minder.lab.evaluate import Progress, outcome_of
from planish.minder.lab.score import CaseOutcome
from tests.minder_lab.simulator import simulate
from tests.minder_lab.simulator.sampling import thinned
from tests.minder_lab.variants import Variant, build

SEEDS = {"train": 1_000_000, "calibrate": 2_000_000, "evaluate": 3_000_000}
"""First seed of each use; a million apart."""

Wanted = tuple[int, str | None] | Path
"""A case: seed and fault of a simulated job, or the file of a recorded one."""
Judged = TypeVar("Judged")
Judge = Callable[[Wanted, Mapping[str, Variant], "Plan"], Judged]
"""Says something of a case."""


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
    plan: Plan,
    wanted: Sequence[Wanted],
    *,
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[str, list[CaseOutcome]]:
    """Replay every case through every variant.

    Returns:
        Variant to the outcomes, in the order of the cases.
    """
    found: dict[str, list[CaseOutcome]] = {name: [] for name in plan.variants}
    for outcomes in each_case(plan, wanted, one_case, workers=workers, progress=progress):
        for name, outcome in outcomes.items():
            found[name].append(outcome)
    return found


def each_case(
    plan: Plan,
    wanted: Sequence[Wanted],
    judge: Judge[Judged],
    *,
    workers: int,
    progress: Progress | None,
) -> Iterator[Judged]:
    """Yield what is said of each case, in their order; `judge` is a function of a module."""
    for done, judged in enumerate(_each(plan, wanted, judge, workers), 1):
        if progress:
            progress(done, len(wanted))
        yield judged


def _each(
    plan: Plan, wanted: Sequence[Wanted], judge: Judge[Judged], workers: int
) -> Iterator[Judged]:
    if workers <= 1:
        variants = plan.build()
        for one in wanted:
            yield judge(one, variants, plan)
        return
    # torch does not survive a fork once it has computed.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (plan, judge)) as pool:
        yield from pool.map(_next, wanted)


_worker: dict[str, Any] = {}
"""Of a worker process: its plan, detectors and what is done with them."""


def _begin(plan: Plan, judge: Judge[Any]) -> None:
    _worker.update(plan=plan, variants=plan.build(), judge=judge)


def _next(wanted: Wanted) -> Any:
    return _worker["judge"](wanted, _worker["variants"], _worker["plan"])


def one_case(wanted: Wanted, variants: Mapping[str, Variant], plan: Plan) -> dict[str, CaseOutcome]:
    """Replay one case through all variants."""
    case = case_of(wanted, plan)
    metrics = tuple(dict.fromkeys(m for v in variants.values() for m in v.config.detect.metrics))
    return {
        name: outcome_of(
            case, variant.models, variant.config, metrics=metrics, detector=variant.make()
        )
        for name, variant in variants.items()
    }
