"""Export the policy of a train state.  python -m planish.checkpoint_stage --help."""

from __future__ import annotations

from planish.checkpoint_stage.stage import run
from planish.stage import stage_main

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
