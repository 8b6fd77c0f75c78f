"""Log lines and metrics: one format for lines, one declaration for each metric.

Metrics are plain sums in memory. The Prometheus client library is imported only when a client reads
them. This module reads no environment variable and starts nothing by itself.
"""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import operator
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

from planish.base.pages import PageServer, StatusPage

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
"""Format of a log line: time, level, module, then `event key=value key=value`."""

_BARE = re.compile(r"[^\s\"=\x00-\x1f]+")
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
REPLY_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the buckets of `_SHORT`."""


Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class DeclaredMetric:
    """A declared metric: the name of its time series, and its kind."""

    name: str
    """`planish_<part>_<noun>_<unit>`; counters end in `_total`."""
    kind: Kind
    """A counter, a gauge, or a histogram of durations."""
    help: str
    labels: tuple[str, ...] = ()
    """Names of labels; their values are bounded, never ids or paths."""


_COUNTERS = {
    "planish_checkpoint_bytes_total": "Bytes sent to or read from the store.",
    "planish_checkpoint_failures_total": "Saves and loads that failed.",
    "planish_checkpoint_retries_total": "Store requests of checkpoints repeated.",
    "planish_checkpoint_stragglers_total": "Ranks far slower than the median.",
    "planish_rollout_expert_rows_total": (
        "Rows that an expert computed, on engines whose experts are apart."
    ),
    "planish_rollout_groups_total": "Groups judged by dynamic sampling.",
    "planish_rollout_rank_frame_bytes_total": (
        "Bytes between attention and expert ranks, as the attention rank sends and receives them."
    ),
    "planish_rollout_rank_frames_total": "Frames between attention and expert ranks.",
    "planish_rollout_rank_busy_seconds_total": "Seconds in which a rank of an engine computed.",
    "planish_rollout_rank_rows_total": (
        "Rows that a rank computed: tokens of attention, rows of all experts and layers of experts."
    ),
    "planish_rollout_rank_wait_seconds_total": (
        "Seconds of iterations in which a rank waited for rows of others."
    ),
    "planish_reward_idle_iterations_total": "Iterations that could teach nothing.",
    "planish_rollout_requests_total": "Requests that an engine has ended, by how.",
    "planish_rollout_tokens_total": "Response tokens sampled.",
    "planish_stage_failures_total": "Tasks that ended with an error.",
    "planish_stage_nonfinite_total": "Results that were NaN or infinite.",
    "planish_store_read_bytes_total": "Bytes read.",
    "planish_store_retries_total": "Requests sent again.",
    "planish_store_written_bytes_total": "Bytes written.",
    "planish_train_nonfinite_steps_total": (
        "Optimizer steps left out because a gradient was NaN or infinite."
    ),
    "planish_train_rank_compute_seconds_total": (
        "Seconds in which a rank computed in layers, where it waits for no other rank."
    ),
    "planish_train_rank_tokens_total": "Tokens of each pass of a layer, padding included.",
    "planish_train_rank_passes_total": "Forward passes of a layer.",
    "planish_train_steps_total": "Optimizer steps.",
    "planish_train_tokens_total": "Response tokens trained on.",
}
_GAUGES = {
    "planish_checkpoint_inflight_saves": "Saves that go on in the background.",
    "planish_checkpoint_last_commit_timestamp_seconds": (
        "Unix time at which this process last saw a save become visible."
    ),
    "planish_checkpoint_last_committed_step": "Training step of the last save that became visible.",
    "planish_rank_phase": "Always 1; says what a rank does now.",
    "planish_rank_slowness_ratio": (
        "Seconds of a slow rank for the same work over the median of the others."
    ),
    "planish_reward_accuracy_ratio": "Mean accuracy of the scored responses.",
    "planish_reward_kept_ratio": "Rollouts that train, of all that were scored.",
    "planish_reward_mean": "Mean reward of the scored responses.",
    "planish_reward_seconds": "How long the scoring took.",
    "planish_reward_truncated_ratio": "Responses that reached the length limit.",
    "planish_reward_verifier_errors": "Responses that the verifier failed on.",
    "planish_reward_verifier_timeouts": "Responses that could not be judged in time: wrong.",
    "planish_rollout_accuracy_ratio": "Mean accuracy of the generated responses.",
    "planish_rollout_busy_slots": "Responses in the engine now.",
    "planish_rollout_dropped_groups": "Groups dropped so far.",
    "planish_rollout_expert_imbalance_ratio": (
        "Rows of the busiest expert over the mean, averaged over layers."
    ),
    "planish_rollout_kept_groups": "Groups kept so far; with windows, responses that have theirs.",
    "planish_rollout_rank_bubble_ratio": "Share of iterations in which a rank did not compute.",
    "planish_rollout_rank_cache_bytes": "Keys and values that a rank holds.",
    "planish_rollout_rank_queue": "Requests of an attention rank; frames that wait at an expert's.",
    "planish_rollout_remaining_seconds": "Seconds until the shard is full at the pace so far.",
    "planish_rollout_response_tokens": "Mean length of the generated responses.",
    "planish_rollout_slot_utilisation_ratio": (
        "Sampled tokens per decode step and row of the engine."
    ),
    "planish_rollout_tokens_per_second": "Response tokens sampled per second since the start.",
    "planish_rollout_update_seconds": "How long the last change of an engine's weights took.",
    "planish_rollout_weight_version": "Policy version of an engine's weights.",
    "planish_stage_info": "Always 1; says what this process works on.",
    "planish_stage_iteration": "Iteration of the task; 0 outside iterations.",
    "planish_stage_iteration_limit_seconds": "How long an iteration may last before it is stalled.",
    "planish_stage_progress_timestamp_seconds": "Unix time at which this process last got ahead.",
    "planish_stage_start_timestamp_seconds": "Unix time at which the task began.",
    "planish_train_entropy": "Mean entropy of the policy per token, in nats.",
    "planish_train_explained_variance_ratio": (
        "Share of the variance of the returns that the critic explains."
    ),
    "planish_train_grad_norm": "Norm of the last gradient of the policy.",
    "planish_train_loss": "Loss of the last mini-batch of the policy.",
    "planish_train_rank_last_step": "Training step that a rank has finished last.",
    "planish_train_routing_disagreement_ratio": (
        "Share of the experts chosen in the rollout that the trainer's routers would not choose."
    ),
    "planish_train_value_loss": "Loss of the last mini-batch of the critic.",
}
_HISTOGRAMS = {
    "planish_checkpoint_stage_seconds": "One stage of one state on this rank.",
    "planish_checkpoint_stall_seconds": "How long a save held up the training that called it.",
    "planish_records_read_seconds": "Reading a record set.",
    "planish_records_write_seconds": "Writing a record set.",
    "planish_rollout_rank_reply_seconds": (
        "From the last rows of a layer that an attention rank sends to the last reply for them."
    ),
    "planish_rollout_step_seconds": "One step of an engine, with the prompts that begin in it.",
}
_SHORT = ("planish_rollout_rank_reply_seconds", "planish_rollout_step_seconds")
"""Histograms of durations that may be far below a second."""
_LABELS: dict[str, tuple[str, ...]] = {
    "planish_checkpoint_bytes_total": ("op", "state"),
    "planish_checkpoint_failures_total": ("op", "reason"),
    "planish_checkpoint_retries_total": ("code",),
    "planish_checkpoint_stage_seconds": ("op", "stage", "state"),
    "planish_checkpoint_stragglers_total": ("op", "stage"),
    "planish_rank_phase": ("phase", "rank"),
    "planish_rank_slowness_ratio": ("metric", "node", "rank"),
    "planish_records_read_seconds": ("schema",),
    "planish_records_write_seconds": ("schema",),
    "planish_rollout_expert_rows_total": ("expert", "layer"),
    "planish_rollout_groups_total": ("fate",),
    **dict.fromkeys(
        ("planish_rollout_rank_frame_bytes_total", "planish_rollout_rank_frames_total"),
        ("kind", "rank"),
    ),
    **dict.fromkeys(
        (
            "planish_rollout_rank_reply_seconds",
            "planish_rollout_tokens_per_second",
            "planish_train_rank_compute_seconds_total",
            "planish_train_rank_last_step",
            "planish_train_rank_passes_total",
            "planish_train_rank_tokens_total",
        ),
        ("rank",),
    ),
    **dict.fromkeys(
        (
            "planish_rollout_rank_bubble_ratio",
            "planish_rollout_rank_busy_seconds_total",
            "planish_rollout_rank_cache_bytes",
            "planish_rollout_rank_queue",
            "planish_rollout_rank_rows_total",
            "planish_rollout_rank_wait_seconds_total",
        ),
        ("rank", "role"),
    ),
    "planish_rollout_requests_total": ("status",),
    "planish_stage_failures_total": ("code",),
    "planish_stage_info": ("rank", "stage"),
    "planish_store_read_bytes_total": ("scheme",),
    "planish_store_retries_total": ("scheme",),
    "planish_store_written_bytes_total": ("scheme",),
    "planish_train_nonfinite_steps_total": ("part",),
    "planish_train_steps_total": ("part",),
}

_TABLES: Mapping[Kind, Mapping[str, str]] = {
    "counter": _COUNTERS,
    "gauge": _GAUGES,
    "histogram": _HISTOGRAMS,
}

METRICS: tuple[DeclaredMetric, ...] = tuple(
    sorted(
        (
            DeclaredMetric(name, kind, text, _LABELS.get(name, ()))
            for kind, table in _TABLES.items()
            for name, text in table.items()
        ),
        key=lambda metric: metric.name,
    )
)
"""Every metric of this program, sorted by name."""

_BY_NAME = {metric.name: metric for metric in METRICS}
_BOUNDS = {name: REPLY_SECONDS if name in _SHORT else _SECONDS for name in _HISTOGRAMS}


@dataclass
class _Series:
    total: float = 0.0
    counts: list[int] = field(default_factory=list)


_lock = threading.Lock()
_series: dict[tuple[str, tuple[str, ...]], _Series] = {}


def count(name: str, amount: float = 1.0, **labels: str) -> None:
    """Add `amount` (0 or more) to a counter of `METRICS`."""
    assert amount >= 0, f"a counter only grows, got {amount}"
    with _lock:
        _find(name, "counter", labels).total += amount


def set_level(name: str, value: float, **labels: str) -> None:
    """Set a gauge of `METRICS`."""
    with _lock:
        _find(name, "gauge", labels).total = value


def mark_progress() -> None:
    """Record progress of this process: a step, a mini-batch, a decoded token."""
    set_level("planish_stage_progress_timestamp_seconds", time.time())


def forget(name: str) -> None:
    """Remove all series of a metric."""
    with _lock:
        for key in [key for key in _series if key[0] == name]:
            del _series[key]


def totals(name: str) -> tuple[float, int]:
    """Return the sum over all series of a metric, and the number of durations in a histogram."""
    with _lock:
        found = [series for (key, _), series in _series.items() if key == name]
        return sum(series.total for series in found), sum(sum(s.counts) for s in found)


def observe(name: str, seconds: float, **labels: str) -> None:
    """Add one duration to a histogram of `METRICS`."""
    with _lock:
        series = _find(name, "histogram", labels)
        series.total += seconds
        series.counts[bisect.bisect_left(_BOUNDS[name], seconds)] += 1


def observe_counts(name: str, counts: Sequence[int], seconds: float, **labels: str) -> None:
    """Add durations that another process has counted by bucket; their sum is `seconds`."""
    with _lock:
        series = _find(name, "histogram", labels)
        series.total += seconds
        series.counts[:] = map(operator.add, series.counts, counts)


def _find(name: str, kind: str, labels: dict[str, str]) -> _Series:
    metric = _BY_NAME[name]
    assert metric.kind == kind, f"`{name}` is a {metric.kind}, not a {kind}"
    assert labels.keys() == set(metric.labels), f"`{name}` has the labels {metric.labels}"
    key = name, tuple(labels[n] for n in metric.labels)
    if key not in _series:
        buckets = len(_BOUNDS[name]) + 1 if kind == "histogram" else 0
        _series[key] = _Series(counts=[0] * buckets)
    return _series[key]


@contextmanager
def timed(name: str, **labels: str) -> Iterator[None]:
    """Observe the duration of the block, also if it raises."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        observe(name, time.perf_counter() - begun, **labels)


class _Collector:
    def collect(self) -> Iterator[Any]:
        from prometheus_client import core

        with _lock:
            state = {key: (s.total, list(s.counts)) for key, s in sorted(_series.items())}
        kinds: dict[Kind, Any] = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        for metric in METRICS:
            family = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
            for (name, values), (total, counts) in state.items():
                if name != metric.name:
                    continue
                if metric.kind == "histogram":
                    bounds = [*(str(bound) for bound in _BOUNDS[name]), "+Inf"]
                    sums = [float(n) for n in itertools.accumulate(counts)]
                    family.add_metric(values, list(zip(bounds, sums, strict=True)), total)
                else:
                    family.add_metric(values, total)
            yield family


def metrics_text() -> str:
    """Return all metrics in the text format that Prometheus scrapes."""
    from prometheus_client import generate_latest
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Collector())
    return generate_latest(registry).decode()


class MetricsServer(PageServer):
    """Server of this process's metrics on `/metrics`, in threads, until `close`."""

    def __init__(self, port: int, address: str = "0.0.0.0") -> None:
        """Start to listen; port 0 picks a free one, see `self.port`.

        Raises:
            OSError: another process listens on the port.
        """
        self._asked = threading.Event()
        super().__init__(address, port, {"/metrics": self._page})

    def _page(self, _: object) -> StatusPage:
        self._asked.set()
        return StatusPage(200, metrics_text().encode(), "text/plain; version=0.0.4; charset=utf-8")

    @property
    def was_scraped(self) -> bool:
        """True if a client has read the metrics since the server started."""
        return self._asked.is_set()

    def wait_for_scrape(self, limit_seconds: float) -> bool:
        """Wait until a client reads the current metrics; return whether one did."""
        self._asked.clear()
        return self._asked.wait(limit_seconds)


def event(name: str, /, **facts: Any) -> str:
    """Return one log line: `name key=value key=value`.

    Floats keep six digits; text with spaces, quotes or `=` is quoted; units belong in the key.

    Example:
        >>> event("saved", step=192, seconds=0.84, uri="file:///a b")
        'saved step=192 seconds=0.84 uri="file:///a b"'
    """
    return " ".join([name, *(f"{key}={_value(value)}" for key, value in facts.items())])


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


_SECRET = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]*://)[^/\s'\"?#]+(?=@)"
    r"|(?P<name>[?&;](?:[\w-]*(?:token|secret|signature|password|credential)[\w-]*"
    r"|[\w-]*key(?:id)?|sig|auth)=)[^&;#\s'\"]+"
    r"|\bhf_[A-Za-z0-9]{30,}",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Return text without the user part and the credentials of URLs, and without hub tokens.

    Example:
        >>> redact("https://me:pw@a.org/x?id=3&token=abc")
        'https://***@a.org/x?id=3&token=***'
        >>> redact("hf://org/name@v2 s3://bucket/a@b")
        'hf://org/name@v2 s3://bucket/a@b'
    """
    return _SECRET.sub(lambda found: f"{found['before'] or found['name'] or ''}***", text)


def first_line(error: BaseException) -> str:
    """Return the start of another package's error message, without credentials."""
    return redact(str(error)).strip().partition("\n")[0][:200]


class LogFormatter(logging.Formatter):
    """Formatter that removes the credentials of addresses from log lines."""

    def __init__(self, line: str = LOG_FORMAT) -> None:
        super().__init__(line)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return redact(super().format(record))


def configure_logging(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send log lines of this process to `stream`, standard error by default; once per process."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LogFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
