"""Metrics of the monitor about itself and its findings, in its own registry.

The series of a job are removed with the job, so that no alert keeps firing for it.
"""

from __future__ import annotations

import platform
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from planish import __version__
from planish.minder.act.alerts import Alert
from planish.minder.act.kube.objects import JobInfo, PodInfo, timestamp
from planish.minder.detect.frame import Frame
from planish.minder.detect.metrics_table import METRICS
from planish.minder.detect.result import Result

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.6, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds; 3.6 is the mean duration of a call in the paper (section 6.4)."""
TOP = 3
"""Number of machines of each metric whose score is exported."""
_MOST_NODES = 20
"""Most nodes that the alert of a whole job lists."""
_MACHINE_KINDS = ("dissimilar", "silent")
_Levels = dict[tuple[str, ...], float]
"""Values of a gauge by label values."""

GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "last_success_timestamp_seconds": ("Unix time of the last call that was done.", ("job_name",)),
    "machine_faulty": (
        "1 while an alert is open for the machine, or for the whole job (no node).",
        ("job_name", "namespace", "node", "kind"),
    ),
    "alert_info": (
        "1 for each open alert: what it is about. Nodes are all those of an alert without a node.",
        ("job_name", "namespace", "node", "kind", "nodes", "metric", "since", "run_id", "stage"),
    ),
    "machine_score": (
        "Normal score of the machines that are most unlike the others now.",
        ("job_name", "node", "metric"),
    ),
    "candidate_seconds": (
        "For how long the machine has been unlike the others.",
        ("job_name", "node", "metric"),
    ),
    "metric_usable": ("1 if the last call could use the metric.", ("job_name", "metric")),
    "missing_ratio": ("Share of seconds without a sample.", ("job_name", "metric")),
    "silent_machines": ("Machines that give no metrics.", ("job_name",)),
    "sample_interval_seconds": ("Median time between samples.", ("metric",)),
    "clipped_ratio": ("Share of values beyond the limits of the metric.", ("job_name", "metric")),
    "model_info": (
        "1 for each model in use; its origin is the package or the site.",
        ("metric", "version", "quality", "denoiser", "origin"),
    ),
    "leading": ("1 while this replica is the one that watches.", ()),
    "jobs": ("Jobs that are watched.", ()),
    "last_discovery_timestamp_seconds": (
        "Unix time of the last search for jobs that was answered; before, of the start.",
        (),
    ),
    "build_info": ("1, with the version of the monitor.", ("version", "python")),
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "calls": ("Calls by what came of them.", ("job_name", "outcome")),
    "metric_skipped": ("Calls that could not use a metric.", ("metric", "reason")),
    "actions": ("Actions by what came of them.", ("action", "result", "dry_run")),
    "evictions_blocked": ("Evictions that disruption budgets held back for good.", ()),
    "prometheus_errors": ("Questions to Prometheus that failed.", ("code",)),
    "duplicate_series": ("Series that lay over another one of the same machine.", ()),
}


class OwnMetrics:
    """All metrics of the monitor, `minder_*`."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self.registry: CollectorRegistry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self.registry, "namespace": "minder"}
        self._counters: dict[str, Any] = {
            name: Counter(name, text, labels, **make) for name, (text, labels) in COUNTERS.items()
        }
        self._durations: Any = Histogram(
            "call_duration_seconds",
            "How long the stages of a call took.",
            ("stage",),
            buckets=BUCKETS,
            **make,
        )
        self._lock = threading.Lock()
        self._gauges: dict[str, dict[str, _Levels]] = defaultdict(dict)
        """Gauges by job; "" for gauges of no job."""
        self.set("build_info", 1.0, __version__, platform.python_version())
        self.registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Yield all gauges; the registry calls this."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            for name, (text, labels) in GAUGES.items():
                family = GaugeMetricFamily(f"minder_{name}", text, labels=labels)
                for gauges in self._gauges.values():
                    for values, level in gauges.get(name, {}).items():
                        family.add_metric(values, level)
                yield family

    def text(self) -> bytes:
        """Return the text of the page `/metrics`."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)

    def count(self, name: str, *labels: str) -> None:
        """Add 1 to a counter; `name` is without `minder_` and `_total`."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc()

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge that belongs to no job; `name` is without `minder_`."""
        with self._lock:
            self._gauges[""].setdefault(name, {})[labels] = value

    def took(self, stage: str, seconds: float) -> None:
        """Observe the duration of one stage of a call: pull, preprocess, denoise, detect or
        total.
        """
        self._durations.labels(stage).observe(seconds)

    def pulled(self, frame: Frame, intervals: Mapping[str, float]) -> None:
        """Export how complete the samples of a job are."""
        missing = {
            name: 1.0 - float(mask.mean()) if mask.size else 1.0
            for name, mask in frame.mask.items()
            if name in METRICS
        }
        self._replace(frame.job, missing_ratio=_by_metric(frame.job, missing))
        for name, seconds in intervals.items():
            self.set("sample_interval_seconds", seconds, name)

    def called(self, result: Result, now: float, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Export the result of a call; `scores` maps metric to machine to normal score."""
        job = result.job
        usable = dict.fromkeys(result.model_ids, 1.0) | dict.fromkeys(result.skipped, 0.0)
        highest: _Levels = {}
        for metric, by_machine in scores.items():
            best = sorted(by_machine.items(), key=lambda pair: (-pair[1], pair[0]))[:TOP]
            highest |= {(job, machine, metric): score for machine, score in best}
        self._replace(
            job,
            last_success_timestamp_seconds={(job,): now},
            silent_machines={(job,): float(len(result.silent))},
            metric_usable=_by_metric(job, usable),
            machine_score=highest,
            candidate_seconds={
                (job, item.machine, item.metric): float(item.seconds) for item in result.candidates
            },
            clipped_ratio=_by_metric(job, result.clipped),
        )
        for metric, reason in result.skipped.items():
            self.count("metric_skipped", metric, reason)

    def alerts(
        self,
        job: str,
        namespace: str,
        machines: Sequence[str],
        alerts: Sequence[tuple[Alert, PodInfo | JobInfo]],
    ) -> None:
        """Export the open alerts of a job, with the run and stage of each machine.

        The alerting rules read these series.
        """
        levels: _Levels = {
            (job, namespace, machine, kind): 0.0 for machine in machines for kind in _MACHINE_KINDS
        }
        infos: _Levels = {}
        for alert, work in alerts:
            identity = (job, namespace, alert.machine, alert.kind)
            levels[identity] = 1.0
            nodes, more = ", ".join(alert.machines[:_MOST_NODES]), len(alert.machines) - _MOST_NODES
            nodes += f" and {more} more" if more > 0 else ""
            since = timestamp(alert.since)
            infos[*identity, nodes, alert.metric, since, work.run_id, work.stage] = 1.0
        self._replace(job, machine_faulty=levels, alert_info=infos)

    def end_job(self, job: str) -> None:
        """Remove all series of a job."""
        with self._lock:
            self._gauges.pop(job, None)
        for labels in list(self._counters["calls"]._metrics):
            if labels[0] == job:
                self._counters["calls"].remove(*labels)

    def _replace(self, job: str, **gauges: _Levels) -> None:
        """Replace all series that one job has in some gauges."""
        with self._lock:
            self._gauges[job] |= gauges


def _by_metric(job: str, values: Mapping[str, float]) -> _Levels:
    return {(job, metric): value for metric, value in values.items()}
