"""The command line of every stage: `python -m planish.run STAGE --help`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from planish.run.stage import stage_main

STAGES = {
    "prepare": "planish.stages.prepare.stage",
    "curate": "planish.stages.curate.stage",
    "sft": "planish.stages.sft.stage",
    "rollout": "planish.stages.rollout.stage",
    "reward": "planish.stages.reward.stage",
    "train": "planish.stages.train.stage",
    "checkpoint": "planish.stages.export.stage",
    "evaluate": "planish.stages.evaluate.stage",
    "next": "planish.stages.next_run.stage",
    "report": "planish.stages.report.stage",
    "monitor_check": "planish.stages.monitor_check.stage",
    "reshard_prepare": "planish.stages.reshard.prepare",
    "reshard": "planish.stages.reshard.reshard",
    "checkpoint_verify": "planish.stages.reshard.verify",
    "checkpoint_retain": "planish.stages.reshard.retain",
}
"""Stage -> the module whose `run` does its work; imported when the stage is asked for."""


def stage_run(stage: str) -> Callable[..., Any]:
    """Return the `run` of a stage."""
    found: Callable[..., Any] = importlib.import_module(STAGES[stage]).run
    return found


def main(arguments: Sequence[str]) -> int:
    """Run one stage and return its exit code; 2 where there is no such stage."""
    stage = arguments[0] if arguments else ""
    if stage in STAGES:
        return stage_main(stage_run(stage), arguments[1:])
    is_help = stage in ("-h", "--help")
    usage = f"usage: python -m planish.run {{{','.join(STAGES)}}} [--help] ...\n"
    (sys.stdout if is_help else sys.stderr).write(usage)
    if not is_help:
        sys.stderr.write(f"a stage must be one of {', '.join(STAGES)}, got {stage!r}\n")
    return 0 if is_help else 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
