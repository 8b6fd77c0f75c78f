"""A client of the HTTP API of Prometheus: what it was asked, as numbers, or a clear failure."""

from __future__ import annotations

import json
import logging
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from pydantic import Field

from planish.base.errors import BackendUnavailable, ConfigError
from planish.minder.detect.frame import F64
from planish.minder.service.http_client import AccessConfig, Deadline, HttpClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

REFUSED = ("401", "403")
"""Codes that the next try will not change."""


class PrometheusConfig(AccessConfig):
    """Where the metrics of the machines are."""

    timeout_seconds: float = Field(default=30.0, gt=0.0)
    """For one query."""
    stale_after_seconds: float = Field(default=5.0, gt=0.0)
    """A value whose newest sample is older is none."""
    delay_seconds: int = Field(default=2, ge=0)
    """A call looks at seconds that are at least so old: samples need time to arrive."""
    late_seconds: int = Field(default=30, ge=0)
    """Seconds that are asked for again in the next call: some samples come late."""
    max_points: int = Field(default=11_000, ge=2)
    """Points of one series in one answer; Prometheus gives no more."""
    max_samples: int = Field(default=600_000, ge=1)
    """Of all series in one answer: longer stretches are asked for piece by piece."""
    post_over_bytes: int = Field(default=2000, ge=0)
    """Longer queries are sent by POST."""
    concurrency: int = Field(default=4, ge=1)
    """Queries of one call at the same time."""
    board_label: str = "modelName"
    """Label of the GPU series that tells the model of the board, as dcgm-exporter gives it."""
    series_labels: tuple[str, ...] = Field(default=("job", "instance"), strict=False)
    """Labels that tell two exporters of one machine apart."""


@dataclass(frozen=True)
class Series:
    """One series of an answer."""

    labels: Mapping[str, str]
    ts: F64
    """Unix seconds."""
    values: F64
    """As long; may hold NaN and infinities."""


@dataclass
class Counts:
    """What went wrong, and how often."""

    errors: Counter[str] = field(default_factory=Counter)
    """By HTTP status or kind of failure."""
    warnings: Counter[str] = field(default_factory=Counter)
    """`warnings` and `infos` of answers that were given all the same."""


class Prometheus:
    """Asks one Prometheus; may be used by several threads."""

    def __init__(self, config: PrometheusConfig) -> None:
        """Connect at the first question.

        Raises:
            ConfigError: the address can not be.
        """
        self.config = config
        self.counts = Counts()
        self._http = HttpClient(config, connections=4 * config.concurrency)
        self._told: set[str] = set()

    def now(self, deadline: Deadline) -> float:
        """Return the time of Prometheus, unix seconds."""

        def number(data: Any) -> float:
            try:
                return float(data["result"][1])
            except (KeyError, IndexError, TypeError, ValueError):
                raise self._invalid(f"`time()` must give a number, got {data!r:.80}") from None

        return self._ask("/api/v1/query", {"query": "time()"}, deadline, number)

    def check(self, query: str, key: str, deadline: Deadline) -> None:
        """Have Prometheus parse a query.

        Raises:
            ConfigError: it is no PromQL; names the key.
        """
        try:
            self._ask("/api/v1/query", {"query": query}, deadline, lambda data: None)
        except BackendUnavailable as error:
            if error.code not in ("400", "422"):
                raise
            raise ConfigError(f"`{key}` must be PromQL that Prometheus takes: {error}") from None

    def query_range(
        self, query: str, start: int, end: int, deadline: Deadline, *, series: int = 1
    ) -> list[Series]:
        """Return what a query gives in each second `start <= t < end`.

        Args:
            query: PromQL.
            start: unix seconds.
            end: second after the last.
            deadline: for all requests together.
            series: how many there will be about, for the size of one answer.

        Raises:
            BackendUnavailable: no valid answer in time.
        """
        config = self.config
        step = max(2, min(config.max_points, config.max_samples // max(1, series)))
        found: list[Series] = []
        for low in range(start, end, step):
            fields = {
                "query": query,
                "start": str(low),
                "end": str(min(end, low + step) - 1),
                "step": "1s",
            }
            found += self._ask("/api/v1/query_range", fields, deadline, self._matrix)
        return found

    def _ask(
        self, path: str, fields: Mapping[str, str], deadline: Deadline, read: Callable[[Any], T]
    ) -> T:
        """Return what `read` makes of the data of one answer; every failure is counted."""
        deadline = deadline.sooner(self.config.timeout_seconds)
        try:
            seconds = max(1, int(deadline.left()))
            asked = urllib.parse.urlencode({**fields, "timeout": f"{seconds}s"})
            if len(asked) + len(path) > self.config.post_over_bytes:
                status, body = self._http.request(
                    *("POST", path),
                    deadline=deadline,
                    body=asked.encode(),
                    content_type="application/x-www-form-urlencoded",
                )
            else:
                status, body = self._http.request("GET", f"{path}?{asked}", deadline=deadline)
            return read(self._data(status, body))
        except BackendUnavailable as error:
            self.counts.errors[error.code] += 1
            raise

    def _data(self, status: int, body: bytes) -> Any:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if status != 200:
            told = answer.get("error", "") if isinstance(answer, dict) else ""
            hint = "; check the token and the tenant" if str(status) in REFUSED else ""
            raise BackendUnavailable(
                f"Prometheus at `{self.config.url}` must answer with 200, got {status} "
                f"{str(told)[:200]!r}{hint}",
                code=str(status),
            )
        if not isinstance(answer, dict) or answer.get("status") != "success":
            raise self._invalid(f"an answer must be JSON and a success, got {body[:80]!r}")
        for kind in ("warnings", "infos"):
            for text in answer.get(kind) or ():
                self._tell(kind, str(text))
        return answer.get("data")

    def _tell(self, kind: str, text: str) -> None:
        """Count a warning, and log each one once."""
        self.counts.warnings[kind] += 1
        if text not in self._told and len(self._told) < 1000:
            self._told.add(text)
            logger.warning("prometheus %s=%r", kind, text[:300])

    def _matrix(self, data: Any) -> list[Series]:
        try:
            if data["resultType"] != "matrix":
                raise ValueError(f"resultType is {data['resultType']!r}")
            return [_series(one) for one in data["result"]]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self._invalid(
                f"a range must be a matrix of times and values, got {error!r:.120}"
            ) from None

    def _invalid(self, message: str) -> BackendUnavailable:
        return BackendUnavailable(f"Prometheus at `{self.config.url}`: {message}", code="invalid")


def _series(one: Mapping[str, Any]) -> Series:
    """Turn one series of JSON into arrays; values are text there, as "NaN" or "+Inf"."""
    pairs: Sequence[tuple[float, str]] = one["values"]
    ts = np.fromiter((pair[0] for pair in pairs), np.float64, len(pairs))
    values = np.fromiter((float(pair[1]) for pair in pairs), np.float64, len(pairs))
    labels = {str(key): str(value) for key, value in one["metric"].items()}
    return Series(labels, ts, values)
