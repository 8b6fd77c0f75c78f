"""Command line of the reward stage."""

from __future__ import annotations

from planish.reward.stage import run
from planish.stage import stage_main

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
