"""Log lines and metrics: one format, and every metric declared once.

Metrics are plain sums in memory until `serve_metrics` or `metrics_text` is called; only then is
the Prometheus client imported. Nothing here reads the environment or starts by itself.
"""

from __future__ import annotations

import bisect
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.registry import CollectorRegistry

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
"""Time, level, module, then `event key=value key=value`."""

_BARE = re.compile(r"[^\s\"=\x00-\x1f]+")
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


@dataclass(frozen=True)
class Metric:
    """One time series name."""

    name: str
    """`planish_<part>_<noun>_<unit>`; counters end in `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    """A sum that only grows, a level that is set, or durations in buckets."""
    help: str
    """One line for the dashboard."""
    labels: tuple[str, ...] = ()
    """Names of labels; their values are bounded, never ids or paths."""


METRICS: tuple[Metric, ...] = (
    Metric(
        *("planish_checkpoint_bytes_total", "counter", "Bytes sent to or read from the store."),
        ("op", "state"),
    ),
    Metric(
        *("planish_checkpoint_failures_total", "counter", "Saves and loads that failed."),
        ("op", "reason"),
    ),
    Metric("planish_checkpoint_inflight_saves", "gauge", "Saves that go on in the background."),
    Metric(
        *("planish_checkpoint_last_commit_timestamp_seconds", "gauge"),
        "Unix time at which this process last saw a save become visible.",
    ),
    Metric(
        *("planish_checkpoint_last_committed_step", "gauge"),
        "Training step of the last save that became visible.",
    ),
    Metric(
        *("planish_checkpoint_retries_total", "counter", "Store requests of checkpoints repeated."),
        ("code",),
    ),
    Metric(
        *("planish_checkpoint_stage_seconds", "histogram", "One stage of one state on this rank."),
        ("op", "stage", "state"),
    ),
    Metric(
        *("planish_checkpoint_stall_seconds", "histogram"),
        "How long a save held up the training that called it.",
    ),
    Metric(
        *("planish_checkpoint_stragglers_total", "counter", "Ranks far slower than the median."),
        ("op", "stage"),
    ),
    Metric("planish_records_read_seconds", "histogram", "Reading a record set.", ("schema",)),
    Metric("planish_records_write_seconds", "histogram", "Writing a record set.", ("schema",)),
    Metric("planish_store_read_bytes_total", "counter", "Bytes read.", ("scheme",)),
    Metric("planish_store_retries_total", "counter", "Requests sent again.", ("scheme",)),
    Metric("planish_store_written_bytes_total", "counter", "Bytes written.", ("scheme",)),
)
"""Every metric of this program, sorted by name."""

_BY_NAME = {metric.name: metric for metric in METRICS}


@dataclass
class _Series:
    """The state of one metric under one set of label values."""

    total: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(_SECONDS) + 1))


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


def observe(name: str, seconds: float, **labels: str) -> None:
    """Add one duration to a histogram of `METRICS`."""
    with _lock:
        series = _find(name, "histogram", labels)
        series.total += seconds
        series.counts[bisect.bisect_left(_SECONDS, seconds)] += 1


def _find(name: str, kind: str, labels: dict[str, str]) -> _Series:
    metric = _BY_NAME[name]
    assert metric.kind == kind, f"`{name}` is a {metric.kind}, not a {kind}"
    assert labels.keys() == set(metric.labels), f"`{name}` has the labels {metric.labels}"
    return _series.setdefault((name, tuple(labels[n] for n in metric.labels)), _Series())


@contextmanager
def timed(name: str, **labels: str) -> Iterator[None]:
    """Observe how long the block takes, also when it raises.

    Example:
        >>> with timed("planish_records_read_seconds", schema="rollouts/1"):
        ...     pass
    """
    begun = time.perf_counter()
    try:
        yield
    finally:
        observe(name, time.perf_counter() - begun, **labels)


class _Collector:
    """Hands the sums to the Prometheus client when it asks."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client import core

        with _lock:
            state = {key: (s.total, list(s.counts)) for key, s in sorted(_series.items())}
        for metric in METRICS:
            family: Any
            kinds = {
                "counter": core.CounterMetricFamily,
                "gauge": core.GaugeMetricFamily,
                "histogram": core.HistogramMetricFamily,
            }
            family = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
            for (name, values), (total, counts) in state.items():
                if name != metric.name:
                    continue
                if metric.kind == "histogram":
                    family.add_metric(values, _cumulative(counts), total)
                else:
                    family.add_metric(values, total)
            yield family


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in _SECONDS), "+Inf"]
    return [(bound, float(sum(counts[: n + 1]))) for n, bound in enumerate(bounds)]


def _registry() -> CollectorRegistry:
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Collector())
    return registry


def metrics_text() -> str:
    """Return all metrics in the text format that Prometheus scrapes."""
    from prometheus_client import generate_latest

    return generate_latest(_registry()).decode()


def serve_metrics(port: int, address: str = "0.0.0.0") -> WSGIServer:
    """Serve the metrics on `http://<address>:<port>/metrics` from a thread.

    Args:
        port: TCP port, 0 for any free one.
        address: network address to listen on; scrapers come from other machines.

    Returns:
        The server; call `shutdown()` to end it.
    """
    from prometheus_client import start_http_server

    server, _ = start_http_server(port, address, registry=_registry())
    return server


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


def configure_logging(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send log lines of this process to `stream`, standard error by default; once per process."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
