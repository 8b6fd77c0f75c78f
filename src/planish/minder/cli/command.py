"""The command line `planish minder VERB`: which verbs there are, and their exit codes.

Each part brings verbs: `add_commands(verbs)` adds their parsers and `run(options)` does one and
returns the exit code; `options.progress(what, done, total)` shows how far it has come. Parts import
nothing heavy before a verb is known.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import NoReturn

from planish.base.errors import (
    BackendUnavailable,
    ClusterError,
    PeerLost,
    PlanishError,
    StoreUnavailable,
)

CLEAN = 0
FAULT_FOUND = 2
BAD_INPUT = 3
BACKEND_UNAVAILABLE = 4

PARTS = ("traces", "service")
"""Modules of this package that bring verbs."""

Progress = Callable[[str, int, int], None]
"""Called with what goes on, steps done and steps in all (0: unknown)."""


class _Parser(argparse.ArgumentParser):
    """A parser whose wrong arguments are bad input: 2 means that a fault was found."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every verb and its options to the parser of `planish minder`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    for part in PARTS:
        known = set(verbs.choices)
        importlib.import_module(f"planish.minder.cli.{part}").add_commands(verbs)
        for name in set(verbs.choices) - known:
            verbs.choices[name].set_defaults(part=part)


def run(options: argparse.Namespace, progress: Progress) -> int:
    """Do what the parsed options ask for and return the exit code.

    A `PlanishError` becomes one line on standard error, and the code 4 where a server does not
    answer, else 3.
    """
    options.progress = progress
    try:
        code: int = importlib.import_module(f"planish.minder.cli.{options.part}").run(options)
    except PlanishError as error:
        sys.stderr.write(f"planish minder: {' '.join(str(error).split())}\n")
        return BACKEND_UNAVAILABLE if isinstance(error, _UNAVAILABLE) else BAD_INPUT
    return code


_UNAVAILABLE = (StoreUnavailable, PeerLost, ClusterError, BackendUnavailable)
