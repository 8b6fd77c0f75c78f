"""Check a wish to reshard.  python -m planish.reshard_prepare --help."""

from __future__ import annotations

from planish.reshard_prepare.stage import run
from planish.stage import stage_main

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
