"""Metrics of one task for the monitoring server: its stage, its progress, its scalars.

They are off unless `PLANISH_METRICS_PORT` is set, which depends on the machine of a task and not on
its configuration. A server offers the metrics to scrapers; nothing is pushed.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from types import TracebackType

from planish.base import telemetry
from planish.base.errors import ConfigError

logger = logging.getLogger(__name__)

PORT_VARIABLE = "PLANISH_METRICS_PORT"
"""First TCP port to try; several processes of one machine take the ports after it."""

LAST_SCRAPE_VARIABLE = "PLANISH_METRICS_LAST_SCRAPE_SECONDS"
"""Longest wait of a finished task for a scrape of its last numbers. A task that ran longer than
this and was never scraped does not wait."""

ITERATION_LIMIT_VARIABLE = "PLANISH_ITERATION_LIMIT_SECONDS"
"""Time limit of an iteration under the timeouts of its profile."""

LOCAL_RANK_VARIABLE = "LOCAL_RANK"

ITERATION_LIMIT_SECONDS = 7200.0
MAX_LIMIT_SECONDS = 366 * 86400
NUM_PORTS = 16
LAST_SCRAPE_SECONDS = 20.0

SCALARS: Mapping[str, Mapping[str, str]] = {
    "rollout": {
        "accuracy_mean": "planish_rollout_accuracy_ratio",
        "response_length_mean": "planish_rollout_response_tokens",
        "slot_utilisation": "planish_rollout_slot_utilisation_ratio",
    },
    "reward": {
        "accuracy_mean": "planish_reward_accuracy_ratio",
        "num_verifier_errors": "planish_reward_verifier_errors",
        "num_verifier_timeouts": "planish_reward_verifier_timeouts",
        "reward_mean": "planish_reward_mean",
        "truncated_fraction": "planish_reward_truncated_ratio",
    },
    "train": {
        "entropy": "planish_train_entropy",
        "explained_variance": "planish_train_explained_variance_ratio",
        "routing_disagreement": "planish_train_routing_disagreement_ratio",
    },
}
"""Stage to its published scalars, each with the name of its gauge."""


PHASES = {
    "rollout": "sampling",
    "evaluate": "sampling",
    "reward": "judging",
    "sft": "training",
    "train": "training",
    "checkpoint": "saving",
}
"""Stage to the phase of its ranks."""

phase = ""
"""Current phase of this rank, the last argument of `show_phase`."""
own_rank = ""
"""Rank of this process in its whole task; empty if it equals the launcher's `RANK`."""

_is_served = False
"""True if a task of this process serves metrics, also for the tasks inside it."""


def show_phase(name: str) -> None:
    """Publish the phase of this rank: sampling, waiting, judging, training or saving."""
    global phase
    phase = name
    telemetry.forget("planish_rank_phase")
    telemetry.set_level("planish_rank_phase", 1, phase=name, rank=this_rank())


def this_rank() -> str:
    """Return the rank of this process in its whole task."""
    return own_rank or os.environ.get("RANK", "0")


class StageMetrics:
    """The metrics of one task, served from `open` until the block ends."""

    def __init__(self, stage: str, iteration: int, rank: int | None = None) -> None:
        """Store the facts; `open` starts to serve.

        `rank` is the rank of a process under a launcher. The launcher has the first port; process
        `i` of a machine has the port `i + 1` after it.
        """
        self._stage, self._iteration, self._rank = stage, iteration, rank
        self._server: telemetry.MetricsServer | None = None
        self._has_news = False
        self._opened_s = 0.0
        self._began = time.monotonic()
        self._shows_phase = False

    def __enter__(self) -> StageMetrics:
        return self

    def open(self) -> None:
        """Start to serve, if the environment names a port.

        Of parallel tasks in one process, only that of the main thread serves metrics.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        now = time.time()
        # Inside the task of a rank, the launcher sets RANK.
        rank = str(self._rank or os.environ.get("RANK", 0))
        telemetry.set_level("planish_stage_info", 1, stage=self._stage, rank=rank)
        telemetry.set_level("planish_stage_iteration", self._iteration)
        limit = _number(ITERATION_LIMIT_VARIABLE, ITERATION_LIMIT_SECONDS, most=MAX_LIMIT_SECONDS)
        telemetry.set_level("planish_stage_iteration_limit_seconds", limit)
        telemetry.set_level("planish_stage_start_timestamp_seconds", now)
        telemetry.count("planish_stage_nonfinite_total", 0)
        telemetry.mark_progress()
        if self._stage in PHASES:
            self._shows_phase = True
            show_phase(PHASES[self._stage])
        self.serve()

    def serve(self) -> None:
        """Start to serve the metrics of this process, unless an outer task serves them."""
        global _is_served
        port = int(_number(PORT_VARIABLE, 0))
        if not port or _is_served:
            return
        first = port
        if self._rank is not None:
            first += 1 + int(os.environ.get(LOCAL_RANK_VARIABLE, self._rank))
        for port in range(first, first + NUM_PORTS):
            try:
                self._server = telemetry.MetricsServer(port)
                self._opened_s, _is_served = time.monotonic(), True
            except OSError:
                continue
            logger.info("serving metrics port=%d", port)
            return
        # Other tasks of this machine use the ports. The task runs on without metrics.
        logger.warning("no free port for metrics first=%d tried=%d", first, NUM_PORTS)

    def publish(self, scalars: Mapping[str, float]) -> None:
        """Publish the scalars of the outcome, and count those that are not finite."""
        bad = sum(not math.isfinite(value) for value in scalars.values())
        telemetry.count("planish_stage_nonfinite_total", bad)
        for name, gauge in SCALARS.get(self._stage, {}).items():
            if math.isfinite(scalars.get(name, math.nan)):
                telemetry.set_level(gauge, scalars[name])
        if self._stage == "reward" and scalars.get("num_rollouts"):
            kept = scalars.get("num_kept_rollouts", 0.0) / scalars["num_rollouts"]
            telemetry.set_level("planish_reward_kept_ratio", kept)
        if self._stage == "reward":
            without = bool(scalars.get("iterations_without_signal"))
            telemetry.count("planish_reward_idle_iterations_total", int(without))
            telemetry.set_level("planish_reward_seconds", time.monotonic() - self._began)
        telemetry.mark_progress()
        self._has_news = True

    def fail(self, code: int) -> None:
        """Count a failed task."""
        telemetry.count("planish_stage_failures_total", code=str(code))
        self._has_news = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for a scrape of the last numbers, then stop serving."""
        global _is_served
        if self._shows_phase:
            show_phase("waiting")
        if self._server is None:
            return
        limit = _number(LAST_SCRAPE_VARIABLE, LAST_SCRAPE_SECONDS)
        left = limit
        if not self._server.was_scraped:
            # A task that ran this long without a scrape has no scraper.
            left -= time.monotonic() - self._opened_s
        if self._has_news and left > 0 and not self._server.wait_for_scrape(left):
            logger.warning("last metrics were not scraped waited_seconds=%g", limit)
        self._server.close()
        _is_served = False


def _number(variable: str, default: float, *, most: int = 65535) -> float:
    text = os.environ.get(variable, "")
    try:
        value = float(text or default)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise ConfigError(
            f"`{variable}` must be a number from 0 to {most}, got {text!r}; set it for the task, "
            "or leave it out"
        )
    return value
