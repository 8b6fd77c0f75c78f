"""The command line `planish minder VERB`: verbs and their options.

Heavy packages are imported only for the verb that runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from planish.base.errors import (
    BackendUnavailable,
    ClusterError,
    PeerLost,
    PlanishError,
    StoreUnavailable,
    named_error,
)
from planish.base.telemetry import redact
from planish.minder.cli import BACKEND_UNAVAILABLE, BAD_INPUT

_SERVICE_VERBS = {
    "serve": "watch all jobs until SIGTERM",
    "validate-config": "check configuration, models and queries; exit code 3 names the key",
    "record": "write what Prometheus has of a job to a file",
}
"""Verbs that need the configuration of the service; the other verbs read recorded traces."""
_TRACE_VERBS = {
    "run-once": "look at a trace, or ask Prometheus; exit code 2 if a machine is faulty",
    "replay": "look at a trace as the service would, minute by minute",
    "train": "train the models on healthy traces",
    "calibrate": "fit limits, thresholds and floors to the traces of a site",
    "evaluate": "score the detector on labelled traces",
}
_UNAVAILABLE = (StoreUnavailable, PeerLost, ClusterError, BackendUnavailable)

Progress = Callable[[str, int, int], None]
"""Function that is called with the name of the work, steps done and steps in all (0: unknown)."""


class _Parser(argparse.ArgumentParser):
    """A parser that ends with BAD_INPUT for wrong arguments, since code 2 means that a fault was
    found.
    """

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every verb and its options to the parser of `planish minder`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    parsers = {
        verb: verbs.add_parser(verb, help=text)
        for verb, text in (_TRACE_VERBS | _SERVICE_VERBS).items()
    }

    def option(of: str, name: str, text: str, **facts: Any) -> None:
        for verb in of.split():
            parsers[verb].add_argument(name, help=text, **facts)

    option("run-once", "--end", "unix seconds; default: its end", type=float, metavar="T")
    option("run-once", "--job", "name of the job; default: that of the file", default="")
    every = "between two calls; default: as configured, 60"
    option("replay", "--every", every, type=int, default=0, metavar="SECONDS")
    file: dict[str, Any] = {"type": Path, "metavar": "F"}
    kinds = "npz, CSV or Parquet with ts, machine, metric, value"
    option("run-once", "--from-file", kinds, **file)
    option("replay", "--from-file", kinds, required=True, **file)
    option("train", "out", "folder that gets the models", type=Path)
    healthy = "traces of healthy jobs, at least two"
    option("train", "--from-file", healthy, nargs="+", required=True, **file)
    option("train", "--seconds", "of CPU time at most, for each metric", type=float, default=150.0)
    tables = "gets the tables; default: site.toml beside `--config`, where every verb reads them"
    option("calibrate", "--out", tables, type=Path, metavar="TOML")
    option("calibrate", "--min-precision", "default 0.9", type=float, default=0.9, metavar="P")
    scored = "calibrate evaluate"
    traces = "recorded traces or folders of them; what is known of `a.npz` stands in `a.json`"
    option(scored, "--traces", traces, type=Path, nargs="+", required=True, metavar="PATH")
    option(scored, "--workers", "processes (default 1)", type=int, default=1, metavar="N")
    option(scored, "--json", "gets every figure", type=Path, metavar="FILE")
    judging = f"run-once replay {scored}"
    option(judging, "--models", "default: those of this package", type=Path, metavar="DIR")
    every_trace = " ".join(_TRACE_VERBS)
    option(every_trace, "--config", "settings; default: built in", type=Path, metavar="TOML")
    profiles = ("default", "paper")
    option(every_trace, "--profile", "wins over the settings", choices=profiles)
    option(every_trace, "--metrics", "wins over the settings", metavar="A,B")

    unchecked = "do not ask Prometheus to parse the queries"
    option("validate-config", "--offline", unchecked, action="store_true")
    option("record", "--job", "its name or key", required=True, metavar="J")
    option("record", "--hours", "default 1", type=float, default=1.0, metavar="H")
    option("record", "--end", "unix seconds; default: now", type=float, metavar="T")
    out = "ends in .npz, .csv or .parquet; a .json beside it has room for the label of a fault"
    option("record", "--out", out, type=Path, required=True, metavar="FILE")
    needed: dict[str, Any] = {"required": True, "type": Path, "metavar": "FILE"}
    option(" ".join(_SERVICE_VERBS), "--config", "TOML of the service", **needed)


def run(options: argparse.Namespace, progress: Progress) -> int:
    """Run the verb of the parsed options and return the exit code.

    A `PlanishError` is printed as one line on standard error. The exit code is then 4 if a server
    did not answer, else 3.
    """
    options.progress = progress
    try:
        if options.verb in _SERVICE_VERBS:
            from planish.minder.cli import service

            return service.run(options)
        from planish.minder.cli import traces

        return traces.run(options)
    except (PlanishError, ModuleNotFoundError) as error:
        known = named_error(error)
        sys.stderr.write(f"planish minder: {redact(' '.join(str(known).split()))}\n")
        return BACKEND_UNAVAILABLE if isinstance(known, _UNAVAILABLE) else BAD_INPUT
