"""Read a checkpoint back.  python -m planish.checkpoint_verify --help."""

from __future__ import annotations

from planish.checkpoint_verify.stage import run
from planish.stage import stage_main

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
