"""The command line of the package: `planish show <uri>` and `planish doctor`.

Stages have their own (`python -m planish.<stage>`), the pipeline too (`python -m pipelines.demo`).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from planish import __version__, telemetry
from planish.errors import PlanishError, exit_code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="planish", description=__doc__.splitlines()[0])
    top.add_argument("--version", action="version", version=f"planish {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="print a record set, policy, report or run root")
    show.add_argument("uri", help="file:// or s3:// URI, pinned URI, or local path")
    show.add_argument(
        "--rows", type=int, default=1, metavar="N", help="rows of a record set in full (default 1)"
    )
    commands.add_parser("doctor", help="say which extras, devices and servers are present")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error is one line on standard error."""
    options = parser().parse_args(arguments)
    telemetry.configure_logging(logging.WARNING)
    # A pipe has no width of its own: rows must not be folded at 80 characters there.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, soft_wrap=False)
    try:
        if options.command == "doctor":
            from planish.doctor import doctor

            return doctor(console)
        from planish.show.command import show

        show(options.uri, console, rows=options.rows)
    except PlanishError as error:
        sys.stderr.write(f"planish: {' '.join(str(error).split())}\n")
        return exit_code(error)
    except BrokenPipeError:
        # The reader has seen enough; nothing more can be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
