"""Run the studies that are not finished: `python -m tests.benchmarks.studies --study NAME`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable

from tests.benchmarks.studies.schedule import Job, run_all
from tests.benchmarks.studies.writing import Study, write_study

MODULES = (
    "group_relative",
    "actor_critic",
    "truncation",
    "utilisation",
    "value_bias",
    "value_advantage",
)
"""Modules of this package that hold studies."""


def all_studies() -> dict[str, Study]:
    """Return every study by name."""
    found: dict[str, Study] = {}
    for name in MODULES:
        module = importlib.import_module(f"tests.benchmarks.studies.{name}")
        for study in module.STUDIES:
            found[study.name] = study
    return found


def jobs_of(studies: Iterable[Study], seeds: Iterable[int]) -> list[Job]:
    """Return the runs that studies read: all arms of one seed before the next seed."""
    arms = dict.fromkeys(arm for study in studies for arm in study.arms.values())
    return [Job(arm, seed) for seed in seeds for arm in arms]


def main() -> int:
    """Run what is missing, then write each study's JSON and picture."""
    studies = all_studies()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--study", nargs="+", default=list(studies), choices=list(studies))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    parser.add_argument("--only-run", action="store_true", help="make the runs, write no result")
    arguments = parser.parse_args()
    chosen = [studies[name] for name in arguments.study]
    failed = run_all(jobs_of(chosen, arguments.seeds), parallel=arguments.parallel)
    for study in chosen:
        if not arguments.only_run and not any(job.arm in study.arms.values() for job in failed):
            print(write_study(study, arguments.seeds))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
