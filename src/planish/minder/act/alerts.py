"""Alerts: the faults that the calls for a job have found, and since when they last.

Rules in `monitoring/rules` turn an alert into one of Prometheus, and Alertmanager sends that to
people. This module makes one alert from the findings of many calls. A book reads no clock, so a
replay and the service raise the same alerts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from planish.minder.detect.result import Result

AlertKind = Literal["dissimilar", "silent", "job_wide", "outage", "broken"]
_Key = tuple[str, str]
"""Subject ("machine" or the kind of the event) and machine of an alert."""

_NAMES = {
    "job_wide": "MinderJobWide",
    "outage": "MinderTelemetryOutage",
    "broken": "MinderTelemetryBroken",
}
TELEMETRY = ("outage", "broken")
"""Kinds of alerts about the exporters; they blame no machine."""
_WHOLE_JOB: _Key = ("job_wide", "")


@dataclass(frozen=True)
class Alert:
    """One machine that stays unlike its peers, or an event of the whole job."""

    id: str
    """16 hexadecimal digits, a hash of job, machine or event, and start; a restart keeps it."""
    job: str
    machine: str
    """Node name; empty for an event of the whole job."""
    kind: AlertKind
    metric: str
    since: float
    """Unix seconds at which the machine began to differ."""
    seen: float
    """Unix seconds after the last second in which the machine differed."""
    score: float = 0.0
    """Mean normal score over the run."""
    machines: tuple[str, ...] = ()
    """All machines concerned, for `job_wide` and `outage`."""
    ended: str = ""
    """Reason why the alert has ended; empty while it is open."""

    @property
    def name(self) -> str:
        """Value of the label `alertname`."""
        return _NAMES.get(self.kind, "MinderFaultyMachine")

    @property
    def cause(self) -> str:
        """Kind and metric in words."""
        return f"{self.kind} {self.metric}".strip()

    @property
    def state(self) -> str:
        """`firing` or `resolved`."""
        return "resolved" if self.ended else "firing"


class AlertBook:
    """The open alerts of one job over many calls."""

    def __init__(self, window_seconds: int, alerts: Iterable[Alert] = ()) -> None:
        """Start with open alerts. An alert ends once its run has left the window of a call."""
        self._window_seconds = window_seconds
        self._open = {_key(alert.kind, alert.machine): alert for alert in alerts}

    def alerts(self) -> list[Alert]:
        """Return the open alerts, sorted by kind and machine."""
        return [self._open[key] for key in sorted(self._open)]

    def update(self, result: Result, members: Collection[str]) -> list[Alert]:
        """Return the alerts that a result begins and those that it ends.

        A result without a verdict (skipped, outage, too few machines) ends no alert about a
        machine. An alert about a machine that is not in `members` ends, since the machine has left
        the job.
        """
        named = self._named(result)
        changed = [alert for key, alert in named.items() if key not in self._open]
        self._open |= named
        for key, alert in self._open.copy().items():
            if alert.machine and alert.machine not in members:
                changed.append(self._end(key, "the machine has left the job"))
            elif key in named:
                continue
            elif alert.kind in TELEMETRY:
                changed.append(self._end(key, "not seen any more"))
            elif self._is_judged(alert, result) and result.end - alert.seen >= self._window_seconds:
                changed.append(self._end(key, f"nothing seen for {self._window_seconds} s"))
        return changed

    def end(self) -> list[Alert]:
        """End all alerts because the job has ended; return them."""
        return [self._end(key, "the job has ended") for key in sorted(self._open)]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`."""
        return {"open": [asdict(alert) for alert in self.alerts()]}

    @classmethod
    def from_json(cls, window_seconds: int, raw: Mapping[str, Any]) -> AlertBook:
        """Restore a book from the values of `to_json`, also from those of an earlier version."""
        names = {item.name for item in fields(Alert)}
        alerts = []
        for item in raw["open"]:
            if item.get("state") != "candidate":
                plain = {name: value for name, value in item.items() if name in names}
                alerts.append(Alert(**{**plain, "machines": tuple(plain["machines"])}))
        return cls(window_seconds, alerts)

    def _named(self, result: Result) -> dict[_Key, Alert]:
        """Return the faults of a result as alerts; an open alert keeps its id and start."""
        named: dict[_Key, Alert] = {}
        event = self._open.get(_WHOLE_JOB)
        for alert in _alerts_of(result):
            key = _key(alert.kind, alert.machine)
            is_new_fault = key[0] == "machine" and key not in self._open
            if event is not None and is_new_fault and alert.machine in event.machines:
                # A run that began during the event belongs to it and blames no single machine.
                key = _WHOLE_JOB if alert.since <= event.seen else key
            old = named.get(key) or self._open.get(key)
            named[key] = alert if old is None else replace(old, seen=max(old.seen, alert.seen))
        return named

    @staticmethod
    def _is_judged(alert: Alert, result: Result) -> bool:
        """Return whether a result could have named the alert's machine again. A silent machine
        needs no peers.
        """
        is_heard = alert.kind == "silent" and result.status == "too_few_machines"
        return result.is_judged or is_heard

    def _end(self, key: _Key, reason: str) -> Alert:
        return replace(self._open.pop(key), ended=reason)


def _key(kind: str, machine: str) -> _Key:
    """Return the key of an alert within its job; a machine has at most one alert."""
    return "machine" if kind in ("dissimilar", "silent") else kind, machine


def _alerts_of(result: Result) -> Iterator[Alert]:
    """Yield an alert for each finding, and for each failure of the telemetry."""
    end = float(result.end)
    for f in result.findings:
        start = float(f.run_start)
        seen = start + f.duration_s
        yield _alert(result.job, f.kind, f.machine, f.metric, start, seen, f.score_mean, f.machines)
    broken = {name for machines in result.broken.values() for name in machines}
    # If the exporters of most machines stand still at once, they have one cause.
    lost = result.silent if result.status == "outage" else tuple(sorted(broken))
    if result.status == "outage" or 2 * len(broken) > result.n_machines:
        yield _alert(result.job, "outage", "", "", end, end, machines=lost)
        return
    for metric, machines in sorted(result.broken.items()):
        for machine in machines:
            yield _alert(result.job, "broken", machine, metric, end, end)


def _alert(
    job: str,
    kind: AlertKind,
    machine: str,
    metric: str,
    since: float,
    seen: float,
    score: float = 0.0,
    machines: tuple[str, ...] = (),
) -> Alert:
    """Return a new alert; its id is the same whenever the same run is found again."""
    identity = [job, _key(kind, machine)[0], machine, str(int(since))]
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()
    return Alert(digest[:16], job, machine, kind, metric, since, seen, score, machines)
