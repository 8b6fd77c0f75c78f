"""The command line of every stage: `python -m planish.run STAGE --help`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from planish.base.config import nearest
from planish.base.startup import spare_collections
from planish.run.stage import stage_main

STAGES = {
    "prepare": "planish.stages.prepare.stage",
    "curate": "planish.stages.curate.stage",
    "sft": "planish.stages.sft.stage",
    "rollout": "planish.stages.rollout.stage",
    "reward": "planish.stages.reward.stage",
    "train": "planish.stages.train.stage",
    "checkpoint": "planish.stages.export.stage",
    "iterate": "planish.stages.iterate.stage",
    "evaluate": "planish.stages.evaluate.stage",
    "evaluate_iteration": "planish.stages.evaluate.iteration",
    "next": "planish.stages.next_run.stage",
    "report": "planish.stages.report.stage",
    "monitor_check": "planish.stages.monitor_check.stage",
    "reshard": "planish.stages.reshard.stage",
}
"""Stage to the module with its `run`; the module is imported when the stage runs."""


def stage_run(stage: str) -> Callable[..., Any]:
    """Return the `run` of a stage."""
    spare_collections()
    run: Callable[..., Any] = importlib.import_module(STAGES[stage]).run
    return run


def main(arguments: Sequence[str]) -> int:
    """Run one stage and return its exit code; 2 for an unknown stage."""
    parser = argparse.ArgumentParser(
        prog="python -m planish.run", description="Run one stage of the pipeline."
    )
    parser.add_argument("stage", metavar="STAGE", help=f"one of {', '.join(STAGES)}")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="see `STAGE --help`")
    given = parser.parse_args(arguments)
    if given.stage not in STAGES:
        parser.error(
            f"a stage must be one of {', '.join(STAGES)}, got {given.stage!r}"
            f"{nearest(given.stage, STAGES)}"
        )
    return stage_main(stage_run(given.stage), given.options, prog=f"{parser.prog} {given.stage}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
