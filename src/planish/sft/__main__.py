"""Command line of the sft stage."""

from __future__ import annotations

from planish.sft.stage import run
from planish.stage import stage_main

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
