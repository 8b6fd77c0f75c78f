"""Command line of the rollout stage: `python -m planish.rollout --help`."""

from __future__ import annotations

from planish.rollout.stage import run
from planish.stage import stage_main

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
