"""Command line of the next stage: python -m planish.next_run --help."""

from planish.next_run.stage import run
from planish.stage import stage_main

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
