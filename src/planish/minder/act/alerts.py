"""Which faults the calls of a job name, and since when.

Prometheus waits and holds by `monitoring/rules`, and Alertmanager tells people; here is only what
makes the findings of many calls one alert. An `AlertBook` reads no clock and asks no server, so
that a replay and the service raise the same alerts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from planish.minder.detect.result import Result

AlertKind = Literal["dissimilar", "silent", "job_wide", "outage", "broken"]
_Key = tuple[str, str]
"""Subject and machine of an alert."""

_NAMES = {
    "job_wide": "MinderJobWide",
    "outage": "MinderTelemetryOutage",
    "broken": "MinderTelemetryBroken",
}
_TELEMETRY = ("outage", "broken")
_WHOLE_JOB: _Key = ("job_wide", "")


@dataclass(frozen=True)
class Alert:
    """One machine that stays unlike its peers, or an event of the whole job.

    Example:
        >>> Alert("0f", "job", "node-3", "silent", "", since=100.0, seen=400.0).name
        'MinderFaultyMachine'
    """

    id: str
    """16 hexadecimal digits from job, machine, kind and start: equal after a restart."""
    job: str
    """Key of its job."""
    machine: str
    """Node name; empty for an event of the whole job."""
    kind: AlertKind
    metric: str
    """Metric that confirmed it; empty for silence and events of the whole job."""
    since: float
    """Unix seconds at which the machine began to differ."""
    seen: float
    """Unix seconds after the last one in which it differed."""
    score: float = 0.0
    """Mean normal score over the run."""
    machines: tuple[str, ...] = ()
    """All machines concerned, for `job_wide` and `outage`."""
    ended: str = ""
    """Why it has ended; empty while it is open."""

    @property
    def name(self) -> str:
        """Value of the label `alertname`."""
        return _NAMES.get(self.kind, "MinderFaultyMachine")

    @property
    def state(self) -> str:
        """`firing` or `resolved`."""
        return "resolved" if self.ended else "firing"


class AlertBook:
    """The open alerts of one job, call after call."""

    def __init__(self, window_seconds: int, alerts: Iterable[Alert] = ()) -> None:
        """Begin with the alerts that an earlier process left open.

        Args:
            window_seconds: history that a call looks at. An alert ends once its run has left it.
            alerts: that are open.
        """
        self._window_seconds = window_seconds
        self._open = {_key(alert.kind, alert.machine): alert for alert in alerts}

    def alerts(self) -> list[Alert]:
        """Return the open alerts, by kind and machine."""
        return [self._open[key] for key in sorted(self._open)]

    def update(self, result: Result, members: Collection[str]) -> list[Alert]:
        """Return the alerts that begin and those that end with the result of a call.

        A result without a verdict (skipped, outage, too few machines) ends no alert about a
        machine: only a call that compared it with its peers does.

        Args:
            result: of the call.
            members: machines that the job has now; alerts about others end.
        """
        named = self._faults(result) | self._telemetry(result)
        changed = [alert for key, alert in named.items() if key not in self._open]
        self._open |= named
        for key, alert in self._open.copy().items():
            if alert.machine and alert.machine not in members:
                changed.append(self._end(key, "the machine has left the job"))
            elif key in named:
                continue
            elif alert.kind in _TELEMETRY:
                changed.append(self._end(key, "the samples are back"))
            elif result.is_judged and result.end - alert.seen >= self._window_seconds:
                changed.append(self._end(key, f"nothing seen for {self._window_seconds} s"))
        return changed

    def end(self) -> list[Alert]:
        """Return all alerts as ended, because the job has ended."""
        return [self._end(key, "the job has ended") for key in sorted(self._open)]

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `from_json` takes."""
        return {"open": [asdict(alert) for alert in self.alerts()]}

    @classmethod
    def from_json(cls, window_seconds: int, raw: Mapping[str, Any]) -> AlertBook:
        """Continue from what `to_json` gave, also that of an earlier version.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        names = {item.name for item in fields(Alert)}
        alerts = []
        for item in raw["open"]:
            if item.get("state") != "candidate":
                plain = {name: value for name, value in item.items() if name in names}
                alerts.append(Alert(**{**plain, "machines": tuple(plain["machines"])}))
        return cls(window_seconds, alerts)

    def _faults(self, result: Result) -> dict[_Key, Alert]:
        """Return an alert for each finding; one that is open already goes on."""
        named: dict[_Key, Alert] = {}
        event = self._open.get(_WHOLE_JOB)
        for finding in result.findings:
            key = _key(finding.kind, finding.machine)
            seen = finding.run_start + finding.duration_s
            if (
                event is not None
                and key not in self._open
                and finding.machine in event.machines
                and finding.run_start <= event.seen
            ):
                # Runs of the event outlast it in the window; they blame no single machine.
                key = _WHOLE_JOB
            old = named.get(key) or self._open.get(key)
            if old is not None:
                named[key] = replace(old, seen=max(old.seen, seen))
                continue
            named[key] = _alert(
                result.job,
                finding.kind,
                finding.machine,
                finding.metric,
                since=finding.run_start,
                seen=seen,
                score=finding.score_mean,
                machines=finding.machines,
            )
        return named

    def _telemetry(self, result: Result) -> dict[_Key, Alert]:
        """Return alerts about the measuring itself, which are no faults of a machine."""
        faults: list[tuple[AlertKind, str, str, tuple[str, ...]]] = []
        if result.status == "outage":
            faults.append(("outage", "", "", result.silent))
        for metric, machines in sorted(result.broken.items()):
            faults += [("broken", machine, metric, ()) for machine in machines]
        named = {}
        for kind, machine, metric, machines in faults:
            old = self._open.get(_key(kind, machine))
            named[_key(kind, machine)] = (
                replace(old, seen=float(result.end))
                if old is not None
                else _alert(
                    result.job,
                    kind,
                    machine,
                    metric,
                    since=result.end,
                    seen=result.end,
                    machines=machines,
                )
            )
        return named

    def _end(self, key: _Key, reason: str) -> Alert:
        return replace(self._open.pop(key), ended=reason)


def _key(kind: str, machine: str) -> _Key:
    """Return what tells alerts of a job apart: a machine is faulty only once."""
    return "machine" if kind in ("dissimilar", "silent") else kind, machine


def _alert(
    job: str, kind: AlertKind, machine: str, metric: str, *, since: float, seen: float, **facts: Any
) -> Alert:
    """Return a new alert; its id is the same whenever the same run is found again."""
    identity = [job, _key(kind, machine)[0], machine, str(int(since))]
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()
    return Alert(digest[:16], job, machine, kind, metric, float(since), float(seen), **facts)
