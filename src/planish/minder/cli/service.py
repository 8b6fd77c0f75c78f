"""Verbs of the service: serve, validate-config, breaker."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from planish.base import telemetry
from planish.base.errors import ConfigError
from planish.minder.cli.command import CLEAN, FAULT_FOUND

logger = logging.getLogger(__name__)

_START_SECONDS = 10.0
_MAX_HOURS = 31 * 24


def add_commands(verbs: Any) -> None:
    """Add the parsers of these verbs.

    Args:
        verbs: what `add_subparsers` returned.
    """
    serve = verbs.add_parser("serve", help="watch all jobs until SIGTERM")
    validate = verbs.add_parser(
        "validate-config", help="check configuration, models and queries; exit code 3 names the key"
    )
    validate.add_argument(
        "--offline", action="store_true", help="do not ask Prometheus to parse the queries"
    )
    breaker = verbs.add_parser("breaker", help="allow actions again after the breaker has opened")
    breaker.add_argument("what", choices=["reset"], help="reset: close it")
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
    for verb in (serve, validate, breaker, record):
        verb.add_argument(
            "--config", required=True, type=Path, metavar="FILE", help="TOML of the service"
        )


def run(options: argparse.Namespace) -> int:
    """Do one verb and return its exit code.

    Raises:
        ConfigError: options or settings can not be as they are.
        BackendUnavailable: a server that is needed does not answer.
    """
    from planish.minder.service.config import load_service_config

    settings = load_service_config(options.config)
    if options.verb == "validate-config":
        return _validate(settings, is_offline=options.offline)
    if options.verb == "breaker":
        return _reset(settings)
    if options.verb == "record":
        return _record(settings, options)
    return _serve(settings)


def _record(settings: Any, options: argparse.Namespace) -> int:
    """Write what Prometheus has of a job, of which no fault is known, to a file."""
    import numpy as np

    from planish.minder.detect.frame import Frame
    from planish.minder.lab.cases import Case, Truth, write_recorded
    from planish.minder.lab.files import ENDINGS
    from planish.minder.service.build import find_job
    from planish.minder.service.http import Deadline
    from planish.minder.service.prometheus import Prometheus
    from planish.minder.service.pull import Puller

    service = settings.minder.service
    seconds = int(3600 * options.hours) if 0 < options.hours <= _MAX_HOURS else 0
    if seconds < service.window_seconds or options.out.suffix not in ENDINGS:
        raise ConfigError(
            f"`--hours` must be {service.window_seconds} s to {_MAX_HOURS} h and `--out` end in "
            f"{ENDINGS}, got {options.hours} and `{options.out}`"
        )
    job = find_job(settings, options.job)
    prometheus = Prometheus(settings.prometheus)
    puller = Puller(prometheus, settings.sources, job.key)

    def deadline() -> Deadline:
        return Deadline.after(service.call_timeout_seconds)

    end = options.end and int(options.end)
    if end is None:
        end = int(prometheus.now(deadline())) - settings.prometheus.delay_seconds + 1
    pieces = []
    # In the pieces that a call pulls.
    for start in range(end - seconds, end, service.window_seconds):
        stop = min(end, start + service.window_seconds)
        pieces.append(puller.pull(job.machines, stop - start, deadline(), end=stop))
        options.progress("seconds", stop - end + seconds, seconds)
    values = {
        metric: np.concatenate([piece.values[metric] for piece in pieces])
        for metric in pieces[0].values
    }
    values = {metric: array for metric, array in values.items() if np.isfinite(array).any()}
    if not values:
        raise ConfigError(
            f"`--job` must name a job with samples in the {seconds} s before {end}, got none of "
            f"{sorted(settings.sources)} for {job.key!r}; check the queries with validate-config"
        )
    ts = np.concatenate([piece.ts for piece in pieces])
    frame = Frame(job.key, ts, pieces[0].machines, values)
    board = puller.board(job.machines, deadline(), end=end)
    write_recorded(options.out, Case(frame, Truth(), dict(job.stages), name=job.key, board=board))
    shares = {name: round(float(mask.mean()), 4) for name, mask in frame.mask.items()}
    facts = {"machines": frame.num_machines, "seconds": seconds, "board": board}
    sys.stdout.write(json.dumps({**facts, "measured": shares}) + "\n")
    return CLEAN


def run_once_live(options: argparse.Namespace) -> int:
    """Look once at a job of which Prometheus has the metrics; 2 if a machine is faulty.

    Raises:
        ConfigError: no configuration of the service, or no job of that name.
        BackendUnavailable: Prometheus does not answer as it must.
    """
    from planish.minder.service.build import run_once
    from planish.minder.service.config import ModelsConfig, load_service_config

    if not options.config or not options.job:
        raise ConfigError(
            "`--from-file` must be given, or `--config` of the service and `--job`, got neither"
        )
    settings = load_service_config(Path(options.config))
    if options.models:
        settings = replace(settings, models=ModelsConfig(folder=str(options.models)))
    result = run_once(settings, options.job, end=options.end and int(options.end))
    sys.stdout.write(result.to_json() + "\n")
    return FAULT_FOUND if result.findings else CLEAN


def _validate(settings: Any, *, is_offline: bool) -> int:
    from planish.minder.service.build import check_queries, models_of
    from planish.minder.service.http import Deadline, HttpClient
    from planish.minder.service.prometheus import Prometheus

    models = models_of(settings)
    if settings.alertmanager.url:
        HttpClient(settings.alertmanager)
    prometheus = Prometheus(settings.prometheus)
    if not is_offline:
        check_queries(settings, prometheus, Deadline.after(_START_SECONDS))
    sys.stdout.write(
        f"valid: {len(settings.sources)} metrics, {len(models.denoisers)} models, profile "
        f"{settings.minder.profile}\n"
    )
    return CLEAN


def _reset(settings: Any) -> int:
    from planish.minder.service.build import state_of

    state = state_of(settings)
    if state is None:
        raise ConfigError(
            "`server.state_file` or `kubernetes` must be given, got neither; without a state there "
            "is no breaker to close"
        )
    state.request_reset(time.time())
    sys.stdout.write("asked: the service closes the breaker within 5 s\n")
    return CLEAN


def _serve(settings: Any) -> int:
    """Watch until SIGTERM or SIGINT; return within 10 s of it."""
    from planish.base.errors import BackendUnavailable
    from planish.minder.service.build import build, check_queries
    from planish.minder.service.http import Deadline, StatusServer
    from planish.minder.service.prometheus import Prometheus

    telemetry.configure_logging(logging.INFO)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    service = build(settings)
    try:
        deadline = Deadline.after(_START_SECONDS, stop)
        check_queries(settings, Prometheus(settings.prometheus), deadline)
    except BackendUnavailable as error:
        # A monitor that starts before its Prometheus waits for it.
        logger.warning("queries_not_checked reason=%r", str(error)[:300])
    server = settings.server
    status = StatusServer(
        server.host,
        server.port,
        service.shared.metrics,
        is_healthy=service.is_healthy,
        is_ready=service.is_ready,
    )
    service.start()
    logger.info("serving host=%s port=%d", server.host, status.port)
    try:
        # Not for long at a time: a signal that another thread took is noticed at the next turn.
        while not stop.wait(0.5):
            pass
    finally:
        begun = time.monotonic()
        service.stop()
        status.close()
        logger.info("stopped seconds=%.1f", time.monotonic() - begun)
    return CLEAN
