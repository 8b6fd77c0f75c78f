"""The queries by which one metric of one job is asked from Prometheus.

Three for each metric: its values, the seconds in which there was a sample at all (Prometheus
repeats the last sample for five minutes, so a dead exporter would look constant), and, for
counters, where they were reset. `timestamp()` would tell more, but older servers evaluate it a
hundred times slower than a range.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from planish.base.errors import ConfigError
from planish.minder.detect.metrics_table import JOB_SELECTOR, Aggregation, Kind, Metric

_SELECTOR = re.compile(r"[a-zA-Z_:][\w:]*\{[^{}]*" + re.escape(JOB_SELECTOR) + r"[^{}]*\}")
_AGGREGATIONS = {"mean": "avg", "min": "min", "max": "max", "sum": "sum"}
_CLOSING = {"(": ")", "{": "}", "[": "]"}
MIN_RATE_SECONDS = 5
"""Range of a rate at one sample a second."""


@dataclass(frozen=True)
class Source:
    """Where Prometheus has one metric.

    Example:
        >>> Source("cpu_usage", 'node_load1{$job_selector}').selector
        'node_load1{$job_selector}'
    """

    name: str
    """Canonical name of the metric."""
    series: str
    """PromQL of one value for each device or machine; holds `$job_selector`."""
    node_label: str = "node"
    """Label of the series that names the machine. What an exporter says of itself (`Hostname` of
    the GPU exporter) may be its pod: the scrape configuration sets `node`."""
    node_regex: str = ""
    """First group of this expression is the machine, as `([^:]+).*` to drop a port; empty for the
    whole label."""
    kind: Kind = "gauge"
    scale: float = 1.0
    offset: float = 0.0
    agg: Aggregation = "mean"
    nonnegative: bool = True
    required: bool = False
    """A call without this metric has failed."""

    @classmethod
    def of(cls, metric: Metric) -> Source:
        """Return the source that a metric has by default."""
        return cls(
            *(metric.name, metric.series),
            kind=metric.kind,
            scale=metric.scale,
            offset=metric.offset,
            agg=metric.agg,
            nonnegative=metric.nonnegative,
        )

    @property
    def selector(self) -> str:
        """The first series of the query that is chosen by job; it tells how fresh all is."""
        found = _SELECTOR.search(self.series)
        return found.group() if found else ""

    def machine_of(self, label: str) -> str:
        """Return the machine that a label's value names; empty where it names none.

        Example:
            >>> Source("m", "", node_regex="([^:]+):[0-9]+").machine_of("n1:9100")
            'n1'
        """
        if not self.node_regex:
            return label
        found = re.fullmatch(self.node_regex, label)
        return found.group(1) if found and found.groups() else ""


@dataclass(frozen=True)
class Queries:
    """PromQL for one metric of one job."""

    values: str
    seen: str
    """A value for each second that has a sample."""
    resets: str
    """More than 0 where a counter was reset; empty for gauges."""


def queries_of(
    source: Source, machines: Sequence[str], series_labels: Sequence[str], rate_seconds: int
) -> Queries:
    """Return the queries for some machines.

    Args:
        source: the metric.
        machines: of the job.
        series_labels: labels besides the machine's that tell exporters apart; devices of one
            exporter are aggregated by the server.
        rate_seconds: range of a counter's rate.
    """
    matcher = job_matcher(source, machines)
    series = source.series.replace(JOB_SELECTOR, matcher)
    selector = source.selector.replace(JOB_SELECTOR, matcher)
    by = ", ".join(dict.fromkeys([source.node_label, *series_labels]))
    each = f"rate({series}[{rate_seconds}s])" if source.kind == "counter" else f"({series})"
    if source.agg == "spread":
        values = f"max by ({by}) ({each}) - min by ({by}) ({each})"
    else:
        values = f"{_AGGREGATIONS[source.agg]} by ({by}) ({each})"
    resets = f"sum by ({by}) (resets({selector}[{rate_seconds}s])) > 0"
    return Queries(
        values,
        f"max by ({by}) (count_over_time({selector}[1s]))",
        resets if source.kind == "counter" else "",
    )


def job_matcher(source: Source, machines: Sequence[str]) -> str:
    """Return what stands for `$job_selector`: a matcher of the label that names machines.

    Example:
        >>> job_matcher(Source("m", "m{$job_selector}"), ["n1", "n2"])
        'node=~"n1|n2"'
    """
    names = "|".join(re.escape(name).replace("\\", "\\\\").replace('"', '\\"') for name in machines)
    if source.node_regex:
        names = f"(?:{names})(?:[:./].*)?"
    return f'{source.node_label}=~"{names}"'


def check_source(source: Source, key: str) -> None:
    """Refuse a query that can not be right; only Prometheus itself knows the rest.

    Raises:
        ConfigError: names the key.
    """
    where = f"`{key}.promql`"
    if not source.selector:
        raise ConfigError(
            f"{where} must hold `{JOB_SELECTOR}` within the braces of a series, got "
            f"{source.series!r}"
        )
    fault = _unbalanced(source.series)
    if fault:
        raise ConfigError(f"{where} must be PromQL, got {source.series!r}: {fault}")
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


def _unbalanced(query: str) -> str:
    """Return which bracket or quote of a query has no partner; empty when all have."""
    open_ones: list[str] = []
    quote = ""
    escaped = False
    for letter in query:
        if quote:
            if letter == quote and not escaped:
                quote = ""
            escaped = letter == "\\" and not escaped
        elif letter in "\"'`":
            quote = letter
        elif letter in _CLOSING:
            open_ones.append(_CLOSING[letter])
        elif letter in _CLOSING.values() and (not open_ones or open_ones.pop() != letter):
            return f"unexpected {letter!r}"
    if quote:
        return f"no closing {quote}"
    return f"no closing {open_ones[-1]!r}" if open_ones else ""
