"""Verbs of the service: serve, validate-config, record."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from planish.base import telemetry
from planish.base.errors import BackendUnavailable, ConfigError
from planish.minder.cli import CLEAN, FAULT_FOUND
from planish.minder.detect.frame import Frame
from planish.minder.lab.cases import Case, Truth, write_recorded
from planish.minder.lab.files import ENDINGS
from planish.minder.service.build import (
    build,
    check_queries,
    find_job,
    models_of,
    run_once,
)
from planish.minder.service.config import ModelsConfig, ServiceSettings, load_service_config
from planish.minder.service.http import Deadline, HttpClient
from planish.minder.service.prometheus import Prometheus
from planish.minder.service.pull import Puller

logger = logging.getLogger(__name__)

_START_SECONDS = 10.0
_MAX_HOURS = 31 * 24


def run(options: argparse.Namespace) -> int:
    """Run one verb and return its exit code."""
    settings = load_service_config(options.config)
    if options.verb == "validate-config":
        return _validate(settings, is_offline=options.offline)
    if options.verb == "record":
        return _record(settings, options)
    return _serve(settings)


def _record(settings: ServiceSettings, options: argparse.Namespace) -> int:
    """Write the samples of a job in Prometheus to a trace file, labelled as healthy."""
    service = settings.service
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
    # Each piece is as long as the window of a call.
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
    waiting = puller.waiting(frame, deadline())
    case = Case(frame, Truth(), dict(job.stages), name=job.key, board=board, waiting=waiting)
    write_recorded(options.out, case)
    shares = {name: round(float(mask.mean()), 4) for name, mask in frame.mask.items()}
    facts = {"machines": frame.num_machines, "seconds": seconds, "board": board}
    sys.stdout.write(json.dumps({**facts, "measured": shares}) + "\n")
    return CLEAN


def run_once_live(options: argparse.Namespace) -> int:
    """Run one call for a job in Prometheus; the exit code is 2 if a machine is faulty."""
    if not options.config or not options.job:
        raise ConfigError(
            "`--from-file` must be given, or `--config` of the service and `--job`, got neither"
        )
    settings = load_service_config(Path(options.config))
    if options.models:
        settings = settings.model_copy(update={"models": ModelsConfig(folder=str(options.models))})
    result = run_once(settings, options.job, end=options.end and int(options.end))
    sys.stdout.write(result.to_json() + "\n")
    return FAULT_FOUND if result.findings else CLEAN


def _validate(settings: ServiceSettings, *, is_offline: bool) -> int:
    models = models_of(settings)
    if settings.alertmanager.url:
        HttpClient(settings.alertmanager)
    prometheus = Prometheus(settings.prometheus)
    if not is_offline:
        check_queries(settings, prometheus, Deadline.after(_START_SECONDS))
    sys.stdout.write(
        f"valid: {len(settings.sources)} metrics, {len(models.denoisers)} models, profile "
        f"{settings.profile}\n"
    )
    return CLEAN


def _serve(settings: ServiceSettings) -> int:
    """Watch jobs until SIGTERM or SIGINT; return within 10 s of the signal."""
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
    pages = service.serve_pages()
    service.start()
    logger.info("serving host=%s port=%d", settings.server.host, pages.port)
    try:
        # Python runs signal handlers only in this thread, so the thread wakes up twice a second.
        while not stop.wait(0.5):
            pass
    finally:
        begun = time.monotonic()
        service.stop()
        pages.close()
        logger.info("stopped seconds=%.1f", time.monotonic() - begun)
    return CLEAN
