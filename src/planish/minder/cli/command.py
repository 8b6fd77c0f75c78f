"""The command line `planish minder VERB`: the verbs with their options.

Nothing heavy is imported before a verb is known.
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

_SERVICE_VERBS = ("serve", "validate-config", "record")
"""Verbs that need the configuration of the service; the others work on recorded traces."""
_UNAVAILABLE = (StoreUnavailable, PeerLost, ClusterError, BackendUnavailable)

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
    _add_trace_verbs(verbs)
    _add_service_verbs(verbs)


def _add_trace_verbs(verbs: Any) -> None:
    run_once = verbs.add_parser(
        "run-once", help="look at a trace, or ask Prometheus; exit code 2 if a machine is faulty"
    )
    run_once.add_argument("--end", type=float, metavar="T", help="unix seconds; default: its end")
    run_once.add_argument("--job", default="", help="name of the job; default: that of the file")
    replay = verbs.add_parser(
        "replay", help="look at a trace as the service would, minute by minute"
    )
    replay.add_argument(
        "--every",
        type=int,
        default=0,
        metavar="SECONDS",
        help="between two calls; default: as configured, 60",
    )
    for verb in (run_once, replay):
        verb.add_argument(
            "--from-file",
            type=Path,
            required=verb is replay,
            metavar="F",
            help="npz, CSV or Parquet with ts, machine, metric, value",
        )
    train = verbs.add_parser("train", help="train the models on healthy traces")
    train.add_argument("out", type=Path, help="folder that gets the models")
    train.add_argument(
        "--from-file",
        type=Path,
        nargs="+",
        required=True,
        metavar="F",
        help="traces of healthy jobs, at least two",
    )
    train.add_argument(
        "--seconds", type=float, default=150.0, help="of CPU time at most, for each metric"
    )
    calibrate = verbs.add_parser(
        "calibrate", help="fit limits, thresholds and floors to the traces of a site"
    )
    calibrate.add_argument(
        "--out",
        type=Path,
        metavar="TOML",
        help="gets the tables; default: site.toml beside `--config`, where every verb reads them",
    )
    calibrate.add_argument(
        "--min-precision", type=float, default=0.9, metavar="P", help="default 0.9"
    )
    evaluate = verbs.add_parser("evaluate", help="score the detector on labelled traces")
    for verb in (calibrate, evaluate):
        verb.add_argument(
            "--traces",
            type=Path,
            nargs="+",
            required=True,
            metavar="PATH",
            help="recorded traces or folders of them; what is known of `a.npz` stands in `a.json`",
        )
        verb.add_argument(
            "--workers", type=int, default=1, metavar="N", help="processes (default 1)"
        )
        verb.add_argument("--json", type=Path, metavar="FILE", help="gets every figure")
    for verb in (run_once, replay, calibrate, evaluate):
        verb.add_argument(
            "--models", type=Path, metavar="DIR", help="default: those of this package"
        )
    for verb in (run_once, replay, train, calibrate, evaluate):
        verb.add_argument("--config", type=Path, metavar="TOML", help="settings; default: built in")
        verb.add_argument("--profile", choices=("default", "paper"), help="wins over the settings")
        verb.add_argument("--metrics", metavar="A,B", help="wins over the settings")


def _add_service_verbs(verbs: Any) -> None:
    serve = verbs.add_parser("serve", help="watch all jobs until SIGTERM")
    validate = verbs.add_parser(
        "validate-config", help="check configuration, models and queries; exit code 3 names the key"
    )
    validate.add_argument(
        "--offline", action="store_true", help="do not ask Prometheus to parse the queries"
    )
    record = verbs.add_parser("record", help="write what Prometheus has of a job to a file")
    record.add_argument("--job", required=True, metavar="J", help="its name or key")
    record.add_argument("--hours", type=float, default=1.0, metavar="H", help="default 1")
    record.add_argument("--end", type=float, metavar="T", help="unix seconds; default: now")
    record.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="ends in .npz, .csv or .parquet; a .json beside it has room for the label of a fault",
    )
    for verb in (serve, validate, record):
        verb.add_argument(
            "--config", required=True, type=Path, metavar="FILE", help="TOML of the service"
        )


def run(options: argparse.Namespace, progress: Progress) -> int:
    """Do what the parsed options ask for and return the exit code.

    A `PlanishError` becomes one line on standard error, and the code 4 where a server does not
    answer, else 3. The verb reports how far it has come by `options.progress`.
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
