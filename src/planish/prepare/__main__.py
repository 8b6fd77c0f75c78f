"""Command line of the prepare stage: python -m planish.prepare --help."""

from planish.prepare.stage import run
from planish.stage import stage_main

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
