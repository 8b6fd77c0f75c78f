"""Write a checkpoint anew.  python -m planish.reshard --help."""

from __future__ import annotations

from planish.reshard.stage import run
from planish.stage import stage_main

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
