"""The life of an alert: candidate, firing, acted or suppressed, resolved.

One book follows the alerts of the jobs that it is shown. It knows no clock and no server: the
caller says what time it is, so that a replay and the service give the same alerts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from planish.minder.detect.config import MinderConfig
from planish.minder.detect.result import Candidate, Finding, Result

AlertKind = Literal["dissimilar", "silent", "job_wide", "outage", "broken"]
State = Literal["candidate", "firing", "acted", "suppressed", "resolved"]

ACTIVE: tuple[State, ...] = ("firing", "acted", "suppressed")
"""States of an alert that people are told of."""

_SUBJECT: dict[str, str] = {"dissimilar": "machine", "silent": "machine"}
"""Kinds that are one and the same trouble of a machine: only one of them is open at a time."""

_CLOSED_SECONDS = 86_400
"""How long a resolved run is remembered, so that its last windows do not raise it again."""


def alert_name(kind: str) -> str:
    """Return the name under which people know alerts of a kind."""
    return {
        "job_wide": "MinderJobWide",
        "outage": "MinderTelemetryOutage",
        "broken": "MinderTelemetryBroken",
    }.get(kind, "MinderFaultyMachine")


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
    machine: str
    """Node name; empty for an event of the whole job."""
    kind: AlertKind
    metric: str
    """What confirmed it; empty for silence and events of the whole job."""
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
    """All that are concerned, for `job_wide` and `outage`."""
    action: str = ""
    """What was done: cordon, evict; empty for nothing."""
    reason: str = ""
    """Why nothing was done, or why it was resolved."""
    run: dict[str, str] = field(default_factory=dict)
    """run_id, stage and iteration of the pipeline that the machine works for, where known."""

    @property
    def is_active(self) -> bool:
        """Whether people are told of it."""
        return self.state in ACTIVE

    @property
    def name(self) -> str:
        """Value of the label `alertname`."""
        return alert_name(self.kind)


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
        """Begin without alerts; `config.alerts` says how long they are kept."""
        self.config = config.alerts
        self._open: dict[tuple[str, str, str], Alert] = {}
        self._closed: dict[tuple[str, str, str], float] = {}

    def alerts(self, job: str | None = None) -> list[Alert]:
        """Return all alerts that are not resolved, candidates included, by job and machine."""
        return [self._open[key] for key in sorted(self._open) if job in (None, key[0])]

    def update(self, now: int, result: Result, members: Sequence[str]) -> list[Change]:
        """Take in the answer of one call.

        An answer that says nothing (skipped, outage, too few machines) resolves no machine: only
        one that looked and found it alike does.

        Args:
            now: unix seconds.
            result: of the call.
            members: machines that the job has now; alerts of others are resolved.
        """
        job = result.job
        changes = self._fire(now, result)
        changes += self._candidates(result)
        changes += self._telemetry(now, result)
        changes += self._resolve(now, result, set(members))
        for key, seen in list(self._closed.items()):
            if key[0] == job and now - seen > _CLOSED_SECONDS:
                del self._closed[key]
        return changes

    def end_job(self, job: str, now: int, reason: str = "the job has ended") -> list[Change]:
        """Resolve everything of a job that is no more, and forget it."""
        changes = [self._close(key, now, reason) for key in self._keys(job)]
        self._closed = {key: seen for key, seen in self._closed.items() if key[0] != job}
        return [change for change in changes if change is not None]

    def expire(self, job: str, now: int) -> list[Change]:
        """Resolve what is too old; for a job of which nothing can be learnt at the moment."""
        changes = []
        for key in self._keys(job):
            alert = self._open[key]
            if alert.is_active and now - alert.fired >= self.config.max_age_seconds:
                changes.append(self._close(key, now, "it has been open for too long"))
        return [change for change in changes if change is not None]

    def acted(self, alert_id: str, action: str) -> list[Change]:
        """Note that something was done about an alert."""
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
        """Go on from what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        book = cls(config)
        names = {one.name for one in fields(Alert)}
        for item in raw["open"]:
            plain = {name: value for name, value in item.items() if name in names}
            alert = Alert(**{**plain, "machines": tuple(plain.get("machines", ()))})
            book._open[_key(alert)] = alert
        for job, subject, machine, seen in raw["closed"]:
            book._closed[str(job), str(subject), str(machine)] = float(seen)
        return book

    def _keys(self, job: str) -> list[tuple[str, str, str]]:
        return sorted(key for key in self._open if key[0] == job)

    def _set(self, alert_id: str, **values: Any) -> list[Change]:
        for key, alert in self._open.items():
            if alert.id == alert_id:
                new = replace(alert, **values)
                self._open[key] = new
                return [] if new.state == alert.state else [Change(new, alert.state)]
        return []

    def _fire(self, now: int, result: Result) -> list[Change]:
        """Open an alert for each finding that belongs to no run known before."""
        changes = []
        for finding in result.findings:
            key = (result.job, _SUBJECT.get(finding.kind, finding.kind), finding.machine)
            seen = finding.run_start + finding.duration_s
            old = self._open.get(key)
            if old is not None and old.is_active:
                latest = max(seen, old.seen)
                self._open[key] = replace(old, seen=latest, duration_s=latest - old.since)
                continue
            if self._is_known(key, finding) or self._is_of_all(result.job, finding, seen):
                continue
            changes.append(self._open_alert(key, now, finding))
        return changes

    def _is_known(self, key: tuple[str, str, str], finding: Finding) -> bool:
        """Tell whether a finding goes on with a run that was resolved; follow it if so."""
        if finding.run_start > self._closed.get(key, float("-inf")):
            return False
        self._closed[key] = max(self._closed[key], finding.run_start + finding.duration_s)
        return True

    def _is_of_all(self, job: str, finding: Finding, seen: float) -> bool:
        """Tell whether a machine is one of those of an event of the whole job that is open."""
        key = (job, "job_wide", "")
        event = self._open.get(key)
        if event is None or finding.machine not in event.machines or finding.kind == "job_wide":
            return False
        if finding.run_start > event.seen:
            return False
        self._open[key] = replace(event, seen=max(event.seen, seen))
        return True

    def _open_alert(self, key: tuple[str, str, str], now: int, finding: Finding) -> Change:
        before = self._open.pop(key, None)
        since = min(finding.run_start, before.since if before else finding.run_start)
        alert = Alert(
            id=_identity(*key, str(int(since))),
            job=key[0],
            machine=finding.machine,
            kind=finding.kind,
            metric=finding.metric,
            state="firing",
            since=float(since),
            seen=float(finding.run_start + finding.duration_s),
            fired=float(now),
            score=finding.score_mean,
            duration_s=finding.duration_s,
            machines=finding.machines,
        )
        self._open[key] = alert
        return Change(alert, before.state if before else None)

    def _candidates(self, result: Result) -> list[Change]:
        """Follow machines that differ, but not yet for long enough."""
        if result.status not in ("ok", "fault"):
            return []
        longest: dict[str, Candidate] = {}
        for one in result.candidates:
            best = longest.get(one.machine)
            if best is None or one.seconds > best.seconds:
                longest[one.machine] = one
        changes = []
        for machine, one in longest.items():
            key = (result.job, "machine", machine)
            old = self._open.get(key)
            if (old is not None and old.is_active) or one.since <= self._closed.get(key, -1.0):
                continue
            begun = float(old.since if old else one.since)
            alert = Alert(
                *(_identity(*key, str(int(begun))), result.job, machine, "dissimilar", one.metric),
                *("candidate", begun, float(result.end)),
                score=one.score,
                duration_s=float(one.seconds),
            )
            self._open[key] = alert
            if old is None:
                changes.append(Change(alert, None))
        for key in self._keys(result.job):
            if self._open[key].state == "candidate" and key[2] not in longest:
                del self._open[key]
        return changes

    def _telemetry(self, now: int, result: Result) -> list[Change]:
        """Raise what is wrong with the measuring rather than with a machine."""
        found: list[tuple[AlertKind, str, str, tuple[str, ...]]] = []
        if result.status == "outage":
            found.append(("outage", "", "", result.silent))
        for metric, machines in sorted(result.broken.items()):
            found += [("broken", machine, metric, ()) for machine in machines]
        changes = []
        for kind, machine, metric, machines in found:
            key = (result.job, kind, machine)
            old = self._open.get(key)
            if old is not None:
                self._open[key] = replace(old, seen=float(result.end))
                continue
            alert = Alert(
                *(_identity(*key, str(result.end)), result.job, machine, kind, metric, "firing"),
                *(float(result.end), float(result.end), float(now)),
                machines=machines,
            )
            self._open[key] = alert
            changes.append(Change(alert, None))
        return changes

    def _resolve(self, now: int, result: Result, members: set[str]) -> list[Change]:
        """Resolve what is alike again, gone or too old."""
        changes = []
        has_looked = result.status in ("ok", "fault")
        for key in self._keys(result.job):
            alert = self._open[key]
            telemetry = alert.kind in ("outage", "broken")
            hold = self.config.telemetry_hold_seconds
            if not telemetry:
                hold = self.config.keep_firing_seconds
            if alert.machine and alert.machine not in members:
                changes.append(self._close(key, now, "the machine has left the job"))
            elif alert.state == "candidate":
                continue
            elif (has_looked or telemetry) and result.end - alert.seen >= hold:
                changes.append(self._close(key, now, f"nothing seen for {int(hold)} s"))
        changes += self.expire(result.job, now)
        return [change for change in changes if change is not None]

    def _close(self, key: tuple[str, str, str], now: int, reason: str) -> Change | None:
        """Take an alert off; a candidate goes without a word."""
        alert = self._open.pop(key)
        if alert.state == "candidate":
            return None
        if alert.kind not in ("outage", "broken"):
            self._closed[key] = alert.seen
        return Change(replace(alert, state="resolved", reason=reason), alert.state)


def _key(alert: Alert) -> tuple[str, str, str]:
    return alert.job, _SUBJECT.get(alert.kind, alert.kind), alert.machine


def _identity(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
