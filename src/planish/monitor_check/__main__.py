"""Look for a faulty machine.  python -m planish.monitor_check --help."""

from __future__ import annotations

from planish.monitor_check.stage import run
from planish.stage import stage_main

if __name__ == "__main__":
    raise SystemExit(stage_main(run))
