"""Remove older checkpoints.  python -m planish.checkpoint_retain --help."""

from __future__ import annotations

from planish.checkpoint_retain.stage import run
from planish.stage import stage_main

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
