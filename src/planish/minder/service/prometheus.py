"""Client of Prometheus: queries for one metric of one job, and their answers as arrays.

Each metric needs three queries. `values` gives its values. `seen` gives the seconds with a sample:
Prometheus repeats the last sample for five minutes, so a dead exporter would look constant.
`resets` gives the resets of a counter. `timestamp()` would tell more, but older servers evaluate it
a hundred times slower than a range.
"""

from __future__ import annotations

import json
import logging
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import Field

from planish.base.errors import BackendUnavailable, ConfigError
from planish.minder.detect.frame import F64
from planish.minder.detect.metrics_table import JOB_SELECTOR, Metric
from planish.minder.service.http import AccessConfig, Deadline, HttpClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

REFUSED = ("401", "403")
"""Status codes after which repeating the request does not help."""
MIN_RATE_SECONDS = 5
"""Range of a rate in seconds, if there is a sample every second."""
_MAX_POINTS = 11_000
"""Most points of one series that Prometheus returns in one answer."""
ANSWER_SAMPLES = 16
"""Number of loaded samples that count as much as one sample of the answer, so that an answer has at
most about 600,000 samples (20 MiB)."""
_TOO_LARGE = "422"
"""Status code of a query that loads too many samples."""
_FEW_SAMPLES = 1000
"""Number of samples below which a refused query is wrong, rather than too large."""
_POST_OVER_BYTES = 2000
"""Bytes of a query above which it is sent by POST."""
_AGGREGATIONS = {"mean": "avg", "min": "min", "max": "max", "sum": "sum"}


@dataclass(frozen=True)
class Queries:
    """PromQL for one metric of one job."""

    values: str
    seen: str
    """Query with a value for each second that has a sample."""
    resets: str
    """Query with a value above 0 where a counter was reset; empty for gauges."""


def queries_of(
    source: Metric, machines: Sequence[str], series_labels: Sequence[str], rate_seconds: int
) -> Queries:
    """Return the queries for some machines.

    `series_labels` are the labels that distinguish exporters of one machine. `rate_seconds` is the
    range of a counter's rate.
    """
    matcher = job_matcher(source, machines)
    series = source.series.replace(JOB_SELECTOR, matcher)
    selector = source.selector.replace(JOB_SELECTOR, matcher)
    by = ", ".join(dict.fromkeys([source.node_label, *series_labels]))
    value = f"rate({series}[{rate_seconds}s])" if source.kind == "counter" else f"({series})"
    if source.agg == "count":
        # A lost device's last value is repeated for five minutes, so only devices with a sample
        # count.
        values = f"count by ({by}) (count_over_time({selector}[{rate_seconds}s]))"
    elif source.agg == "spread":
        values = f"max by ({by}) ({value}) - min by ({by}) ({value})"
    else:
        values = f"{_AGGREGATIONS[source.agg]} by ({by}) ({value})"
    resets = f"sum by ({by}) (resets({selector}[{rate_seconds}s])) > 0"
    return Queries(
        values,
        f"max by ({by}) (count_over_time({selector}[1s]))",
        resets if source.kind == "counter" else "",
    )


def job_matcher(source: Metric, machines: Sequence[str]) -> str:
    """Return the label matcher that replaces `$job_selector`."""
    return node_matcher(source.node_label, machines, has_port=bool(source.node_regex))


def node_matcher(label: str, machines: Sequence[str], *, has_port: bool = False) -> str:
    """Return a matcher of a label whose value is one of the machines, with a port or domain if
    `has_port`.
    """
    names = "|".join(re.escape(name).replace("\\", "\\\\").replace('"', '\\"') for name in machines)
    if has_port:
        names = f"(?:{names})(?:[:./].*)?"
    return f'{label}=~"{names}"'


def check_source(source: Metric, key: str) -> None:
    """Check a query as far as that is possible without Prometheus.

    Raises:
        ConfigError: the query can not be right.
    """
    where = f"`{key}.promql`"
    if not source.selector:
        raise ConfigError(
            f"{where} must hold `{JOB_SELECTOR}` within the braces of a series, got "
            f"{source.series!r}"
        )
    if source.kind == "counter" and source.selector != source.series.strip():
        raise ConfigError(
            f"{where} must be one series and nothing else where `kind` is 'counter', got "
            f'{source.series!r}; write the rates yourself and set `kind = "gauge"`'
        )
    try:
        groups = re.compile(source.node_regex).groups
    except re.error as error:
        raise ConfigError(f"`{key}.node_regex` must be an expression: {error}") from None
    if source.node_regex and groups < 1:
        raise ConfigError(
            f"`{key}.node_regex` must hold one group, the machine, got {source.node_regex!r}"
        )


class PrometheusConfig(AccessConfig):
    """Prometheus with the metrics of the machines."""

    timeout_seconds: float = Field(default=30.0, gt=0.0)
    """Longest duration of one query in seconds."""
    delay_seconds: int = Field(default=2, ge=0)
    """Seconds before now at which a call's window ends, since samples need time to arrive."""
    late_seconds: int = Field(default=30, ge=0)
    """Seconds at the end of the last window that a call reads again, since some samples come
    late."""
    max_samples: int = Field(default=10_000_000, ge=1)
    """Most samples that one query may load, i.e. its series times their seconds. A longer span is
    split into pieces. Prometheus allows 50 million (`query.max-samples`), and counts some samples
    several times."""
    concurrency: int = Field(default=4, ge=1)
    """Queries of one call that run at the same time."""
    board_label: str = "modelName"
    """Label of the GPU series with the board's model, as dcgm-exporter sets it."""
    series_labels: tuple[str, ...] = Field(default=("job", "instance"), strict=False)
    """Labels that distinguish two exporters of one machine."""


@dataclass(frozen=True)
class Series:
    """One series of an answer."""

    labels: Mapping[str, str]
    ts: F64
    values: F64
    """Values at `ts`; NaN and infinities may occur."""

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """The labels without the metric's name, sorted."""
        return tuple(sorted((k, v) for k, v in self.labels.items() if k != "__name__"))


class Prometheus:
    """Client of one Prometheus; several threads may use it."""

    def __init__(
        self, config: PrometheusConfig, *, on_error: Callable[[str], None] = lambda code: None
    ) -> None:
        """Set the address. `on_error` is called with status or kind of each failed request."""
        self.config, self.on_error = config, on_error
        self._http = HttpClient(config, connections=4 * config.concurrency)
        self._logged: set[str] = set()
        self._max_samples = config.max_samples

    def now(self, deadline: Deadline) -> float:
        """Return the unix time of Prometheus in seconds."""

        def number(data: Any) -> float:
            try:
                return float(data["result"][1])
            except (KeyError, IndexError, TypeError, ValueError):
                raise self._invalid(f"`time()` must give a number, got {data!r:.80}") from None

        return self._ask("/api/v1/query", {"query": "time()"}, deadline, number)

    def check(self, query: str, key: str, deadline: Deadline) -> None:
        """Let Prometheus parse a query.

        Raises:
            ConfigError: the query is not PromQL.
        """
        try:
            self._ask("/api/v1/query", {"query": query}, deadline, lambda data: None)
        except BackendUnavailable as error:
            if error.code not in ("400", "422"):
                raise
            raise ConfigError(f"`{key}` must be PromQL that Prometheus takes: {error}") from None

    def query_range(
        self,
        query: str,
        start: int,
        end: int,
        deadline: Deadline,
        *,
        series: int = 1,
    ) -> list[Series]:
        """Return the value of a query at each unix second `start <= t < end`, one `Series` for each
        series.

        `series`, the number of series that the query reads, limits the span of one request. If the
        server refuses a request as too large, its span is halved, for later requests too.
        """
        pieces: dict[tuple[tuple[str, str], ...], list[Series]] = {}
        most, low = self._max_samples, start
        while low < end:
            step = min(_MAX_POINTS, most // max(1, series))
            last = min(end, low + max(1, step)) - 1
            fields = {"query": query, "start": str(low), "end": str(last), "step": "1s"}
            loaded = series * (last + 1 - low)
            try:
                matrix = self._ask("/api/v1/query_range", fields, deadline, self._matrix)
            except BackendUnavailable as error:
                if error.code != _TOO_LARGE or last == low or loaded < _FEW_SAMPLES:
                    raise
                most = loaded // 2
                continue
            if most < self._max_samples:
                logger.warning("smaller_queries samples=%d before=%d", most, self._max_samples)
                self._max_samples = most
            for item in matrix:
                pieces.setdefault(item.key, []).append(item)
            low = last + 1
        return [
            Series(
                items[0].labels,
                np.concatenate([item.ts for item in items]),
                np.concatenate([item.values for item in items]),
            )
            for items in pieces.values()
        ]

    def _ask(
        self, path: str, fields: Mapping[str, str], deadline: Deadline, read: Callable[[Any], T]
    ) -> T:
        """Return `read` of the data of one answer; every failure is counted."""
        deadline = deadline.sooner(self.config.timeout_seconds)
        try:
            seconds = max(1, int(deadline.left()))
            form = urllib.parse.urlencode({**fields, "timeout": f"{seconds}s"})
            if len(form) + len(path) > _POST_OVER_BYTES:
                status, body = self._http.request("POST", path, deadline=deadline, form=form)
            else:
                status, body = self._http.request("GET", f"{path}?{form}", deadline=deadline)
            return read(self._data(status, body))
        except BackendUnavailable as error:
            self.on_error(error.code)
            raise

    def _data(self, status: int, body: bytes) -> Any:
        """Return the data of an answer; each of its warnings is logged once."""
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if status != 200:
            reason = answer.get("error", "") if isinstance(answer, dict) else ""
            hint = "; check the token and the tenant" if str(status) in REFUSED else ""
            raise BackendUnavailable(
                f"Prometheus at `{self.config.url}` must answer with 200, got {status} "
                f"{str(reason)[:200]!r}{hint}",
                code=str(status),
            )
        if not isinstance(answer, dict) or answer.get("status") != "success":
            raise self._invalid(f"an answer must be JSON and a success, got {body[:80]!r}")
        for kind in ("warnings", "infos"):
            for text in map(str, answer.get(kind) or ()):
                if text not in self._logged and len(self._logged) < 1000:
                    self._logged.add(text)
                    logger.warning("prometheus %s=%r", kind, text[:300])
        return answer.get("data")

    def _matrix(self, data: Any) -> list[Series]:
        matrix = []
        try:
            if data["resultType"] != "matrix":
                raise ValueError(f"resultType is {data['resultType']!r}")
            for item in data["result"]:
                # Values are strings such as "NaN" or "+Inf".
                pairs: Sequence[tuple[float, str]] = item["values"]
                ts = np.fromiter((pair[0] for pair in pairs), np.float64, len(pairs))
                values = np.fromiter((float(pair[1]) for pair in pairs), np.float64, len(pairs))
                labels = {str(key): str(value) for key, value in item["metric"].items()}
                matrix.append(Series(labels, ts, values))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self._invalid(
                f"a range must be a matrix of times and values, got {error!r:.120}"
            ) from None
        return matrix

    def _invalid(self, message: str) -> BackendUnavailable:
        return BackendUnavailable(f"Prometheus at `{self.config.url}`: {message}", code="invalid")
