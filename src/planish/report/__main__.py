"""Command line of the report stage."""

from planish.report.stage import run
from planish.stage import stage_main

raise SystemExit(stage_main(run))
