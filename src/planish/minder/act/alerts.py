"""The life of an alert: candidate, firing, acted or suppressed, resolved.

An `AlertBook` follows the alerts of the jobs that it is shown. It reads no clock and asks no
server: the caller gives the time, so that a replay and the service raise the same alerts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from planish.minder.detect.config import MinderConfig
from planish.minder.detect.result import Candidate, Result

AlertKind = Literal["dissimilar", "silent", "job_wide", "outage", "broken"]
State = Literal["candidate", "firing", "acted", "suppressed", "resolved"]
_Key = tuple[str, str, str]
"""Job, subject and machine of an alert."""

ACTIVE: tuple[State, ...] = ("firing", "acted", "suppressed")
"""States in which people see the alert."""

_SUBJECT: dict[str, str] = {"dissimilar": "machine", "silent": "machine"}
"""Kinds that share one open alert for each machine."""

_NAMES = {
    "job_wide": "MinderJobWide",
    "outage": "MinderTelemetryOutage",
    "broken": "MinderTelemetryBroken",
}
_CLOSED_SECONDS = 86_400
"""How long a resolved run is remembered, so that its last windows do not raise it again."""


@dataclass(frozen=True)
class Alert:
    """One machine that stays unlike its peers, or an event of the whole job.

    Example:
        >>> alert = Alert("0f", "job", "node-3", "silent", "", "firing", since=100.0, seen=400.0)
        >>> alert.name, alert.is_active
        ('MinderFaultyMachine', True)
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
    state: State
    since: float
    """Unix seconds at which the machine began to differ."""
    seen: float
    """Unix seconds after the last one in which it differed."""
    fired: float = 0.0
    """Unix seconds of the call that confirmed it; 0 while it is a candidate."""
    score: float = 0.0
    """Mean normal score over the run."""
    duration_s: float = 0.0
    """How long it has differed."""
    machines: tuple[str, ...] = ()
    """All machines concerned, for `job_wide` and `outage`."""
    action: str = ""
    """What was done: cordon, evict; empty for nothing."""
    reason: str = ""
    """Why nothing was done, or why it was resolved."""
    run: dict[str, str] = field(default_factory=dict)
    """run_id, stage and iteration of the pipeline that the machine works for, where known."""

    @property
    def is_active(self) -> bool:
        """Whether people see it."""
        return self.state in ACTIVE

    @property
    def name(self) -> str:
        """Value of the label `alertname`."""
        return _NAMES.get(self.kind, "MinderFaultyMachine")


@dataclass(frozen=True)
class Change:
    """One step in the life of an alert."""

    alert: Alert
    """As it is now."""
    before: State | None
    """State before; None when it is new."""


class AlertBook:
    """The alerts of one or several jobs, call after call."""

    def __init__(self, config: MinderConfig) -> None:
        """Begin without alerts; `config.alerts` limits how long they are kept."""
        self.config = config.alerts
        self._open: dict[_Key, Alert] = {}
        self._closed: dict[_Key, float] = {}

    def alerts(self, job: str | None = None) -> list[Alert]:
        """Return all alerts that are not resolved, candidates included, by job and machine."""
        return [self._open[key] for key in sorted(self._open) if job in (None, key[0])]

    def update(self, now: int, result: Result, members: Sequence[str]) -> list[Change]:
        """Update the alerts of a job by the result of one call.

        A result without a verdict (skipped, outage, too few machines) resolves no machine: only a
        call that compared the machine and found it like its peers does.

        Args:
            now: unix seconds.
            result: of the call.
            members: machines that the job has now; alerts of others are resolved.
        """
        job = result.job
        changes = self._fire(now, result)
        changes += self._follow_candidates(result)
        changes += self._follow_telemetry(now, result)
        changes += self._resolve(now, result, set(members))
        for key, seen in list(self._closed.items()):
            if key[0] == job and now - seen > _CLOSED_SECONDS:
                del self._closed[key]
        return changes

    def end_job(self, job: str) -> list[Change]:
        """Resolve all alerts of a job that has ended, and forget the job."""
        changes: list[Change] = []
        for key in self._keys(job):
            changes += self._close(key, "the job has ended")
        self._closed = {key: seen for key, seen in self._closed.items() if key[0] != job}
        return changes

    def expire(self, job: str, now: int) -> list[Change]:
        """Resolve alerts beyond their maximum age; for a job whose calls fail at the moment."""
        changes: list[Change] = []
        for key in self._keys(job):
            alert = self._open[key]
            if alert.is_active and now - alert.fired >= self.config.max_age_seconds:
                changes += self._close(key, "it has been open for too long")
        return changes

    def acted(self, alert_id: str, action: str) -> list[Change]:
        """Note what was done about an alert."""
        return self._set(alert_id, state="acted", action=action, reason="")

    def suppressed(self, alert_id: str, reason: str) -> list[Change]:
        """Note that nothing is done about an alert, and why."""
        return self._set(alert_id, state="suppressed", reason=reason)

    def link(self, alert_id: str, run: Mapping[str, str]) -> None:
        """Note which pipeline run the machine works for."""
        self._set(alert_id, run=dict(run))

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `from_json` takes."""
        return {
            "open": [asdict(alert) for alert in self.alerts()],
            "closed": [[*key, seen] for key, seen in sorted(self._closed.items())],
        }

    @classmethod
    def from_json(cls, config: MinderConfig, raw: Mapping[str, Any]) -> AlertBook:
        """Continue from what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        book = cls(config)
        names = {item.name for item in fields(Alert)}
        for item in raw["open"]:
            plain = {name: value for name, value in item.items() if name in names}
            alert = Alert(**{**plain, "machines": tuple(plain.get("machines", ()))})
            book._open[_key(alert.job, alert.kind, alert.machine)] = alert
        for job, subject, machine, seen in raw["closed"]:
            book._closed[str(job), str(subject), str(machine)] = float(seen)
        return book

    def _keys(self, job: str) -> list[_Key]:
        return sorted(key for key in self._open if key[0] == job)

    def _set(self, alert_id: str, **values: Any) -> list[Change]:
        for key, alert in self._open.items():
            if alert.id == alert_id:
                new = replace(alert, **values)
                self._open[key] = new
                return [] if new.state == alert.state else [Change(new, alert.state)]
        return []

    def _fire(self, now: int, result: Result) -> list[Change]:
        """Open an alert for each finding that continues no earlier run."""
        changes = []
        for finding in result.findings:
            key = _key(result.job, finding.kind, finding.machine)
            seen = finding.run_start + finding.duration_s
            old = self._open.get(key)
            if old is not None and old.is_active:
                latest = max(seen, old.seen)
                self._open[key] = replace(old, seen=latest, duration_s=latest - old.since)
                continue
            if finding.run_start <= self._closed.get(key, float("-inf")):
                # The run was resolved; its last windows still lie in the frame.
                self._closed[key] = max(self._closed[key], seen)
                continue
            event_key = _key(result.job, "job_wide", "")
            event = self._open.get(event_key)
            if (
                event is not None
                and finding.kind != "job_wide"
                and finding.machine in event.machines
                and finding.run_start <= event.seen
            ):
                # The machine belongs to an open event of the whole job.
                self._open[event_key] = replace(event, seen=max(event.seen, seen))
                continue
            alert = _alert(
                key,
                finding.kind,
                finding.metric,
                since=min(finding.run_start, old.since if old else finding.run_start),
                seen=seen,
                fired=float(now),
                score=finding.score_mean,
                duration_s=finding.duration_s,
                machines=finding.machines,
            )
            self._open[key] = alert
            changes.append(Change(alert, old.state if old else None))
        return changes

    def _follow_candidates(self, result: Result) -> list[Change]:
        """Follow machines that differ, but not yet for long enough."""
        if result.status not in ("ok", "fault"):
            return []
        longest: dict[str, Candidate] = {}
        for candidate in result.candidates:
            best = longest.get(candidate.machine)
            if best is None or candidate.seconds > best.seconds:
                longest[candidate.machine] = candidate
        changes = []
        for machine, candidate in longest.items():
            key = _key(result.job, "dissimilar", machine)
            old = self._open.get(key)
            if (old is not None and old.is_active) or candidate.since <= self._closed.get(key, -1):
                continue
            self._open[key] = _alert(
                key,
                "dissimilar",
                candidate.metric,
                state="candidate",
                since=old.since if old else candidate.since,
                seen=result.end,
                score=candidate.score,
                duration_s=float(candidate.seconds),
            )
            if old is None:
                changes.append(Change(self._open[key], None))
        for key in self._keys(result.job):
            if self._open[key].state == "candidate" and key[2] not in longest:
                del self._open[key]
        return changes

    def _follow_telemetry(self, now: int, result: Result) -> list[Change]:
        """Raise faults of the measuring itself, which are no faults of a machine."""
        faults: list[tuple[AlertKind, str, str, tuple[str, ...]]] = []
        if result.status == "outage":
            faults.append(("outage", "", "", result.silent))
        for metric, names in sorted(result.broken.items()):
            faults += [("broken", machine, metric, ()) for machine in names]
        changes = []
        for kind, machine, metric, machines in faults:
            key = _key(result.job, kind, machine)
            old = self._open.get(key)
            if old is not None:
                self._open[key] = replace(old, seen=float(result.end))
                continue
            end, fired = result.end, float(now)
            self._open[key] = _alert(
                key, kind, metric, since=end, seen=end, fired=fired, machines=machines
            )
            changes.append(Change(self._open[key], None))
        return changes

    def _resolve(self, now: int, result: Result, members: set[str]) -> list[Change]:
        """Resolve what is alike again, has left or is too old."""
        changes: list[Change] = []
        has_compared = result.status in ("ok", "fault")
        for key in self._keys(result.job):
            alert = self._open[key]
            is_telemetry = alert.kind in ("outage", "broken")
            hold = self.config.keep_firing_seconds
            if is_telemetry:
                hold = self.config.telemetry_hold_seconds
            if alert.machine and alert.machine not in members:
                changes += self._close(key, "the machine has left the job")
            elif alert.state == "candidate":
                continue
            elif (has_compared or is_telemetry) and result.end - alert.seen >= hold:
                changes += self._close(key, f"nothing seen for {int(hold)} s")
        return changes + self.expire(result.job, now)

    def _close(self, key: _Key, reason: str) -> list[Change]:
        """Remove an alert from the open ones; a candidate leaves no trace."""
        alert = self._open.pop(key)
        if alert.state == "candidate":
            return []
        if alert.kind not in ("outage", "broken"):
            self._closed[key] = alert.seen
        return [Change(replace(alert, state="resolved", reason=reason), alert.state)]


def _key(job: str, kind: str, machine: str) -> _Key:
    return job, _SUBJECT.get(kind, kind), machine


def _alert(
    key: _Key,
    kind: AlertKind,
    metric: str,
    *,
    since: float,
    seen: float,
    state: State = "firing",
    **facts: Any,
) -> Alert:
    """Return a new alert; its id is the same whenever the same run is found again."""
    digest = hashlib.sha256("\0".join([*key, str(int(since))]).encode()).hexdigest()
    job, _, machine = key
    return Alert(digest[:16], job, machine, kind, metric, state, float(since), float(seen), **facts)
