"""Update the policy on one rollout batch.  python -m planish.train --help."""

from __future__ import annotations

from planish.stage import stage_main
from planish.train.stage import run

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
