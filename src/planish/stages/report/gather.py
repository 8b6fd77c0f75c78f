"""Collect the facts of a run from its root; what is missing is listed and never raised.

No drawing here, and no wording beyond what is missing.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from planish import store
from planish.base.errors import AccessRefused, ObjectMissing, PlanishError, StoreUnavailable
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.reports import EvalReport, UpdateReport, read_best, read_report
from planish.run.avoid import avoided
from planish.stages.report.facts import Evaluation, MachineAlert, ReportFacts, Saved, TaskLog
from planish.stages.report.happenings import happenings
from planish.stages.report.samples import sample_comparisons
from planish.stages.report.words import one_line
from planish.store.documents import read_json

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_ITERATION = re.compile(r"/iterations/(\d{1,9})/")
_UNPRINTABLE = re.compile(r"[^a-zA-Z0-9_ -]")
_STATES = {"running", "done", "failed"}
OWN_STAGE = "report"
"""Log entries of this stage say nothing about the run."""


class Reader:
    """Reads from one run root; collects in `missing` what could not be read.

    Example:
        >>> reader = Reader("file:///no/such/run")
        >>> reader.json("file:///no/such/run/run.json", "the configuration"), len(reader.missing)
        (None, 1)
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.missing: list[str] = []
        self.failure: PlanishError | None = None
        """Why the store is not asked any more; None while it answers."""

    def attempt(self, what: str, read: Callable[[], ResultT], default: ResultT) -> ResultT:
        """Return what `read` returns, or note the fault and return `default`.

        After the store has once refused or failed to answer it is not asked again, since each
        call would wait for its whole retry policy.
        """
        if self.failure:
            return default
        try:
            return read()
        except ObjectMissing:
            self.missing.append(f"{what}: not written")
        except (StoreUnavailable, AccessRefused) as error:
            self.failure = error
            self.missing.append(f"everything under the run root: {one_line(str(error))}")
        except (PlanishError, OSError) as error:
            self.missing.append(f"{what}: {one_line(str(error))}")
        except Exception as error:
            # The exit task reports what it can even when a file is hostile; the fault is listed.
            logger.warning("unreadable what=%s", what, exc_info=True)
            self.missing.append(f"{what}: {one_line(f'{type(error).__name__}: {error}')}")
        return default

    def json(self, uri: str, what: str) -> Any:
        """Return the JSON value at `uri`, None when it can not be read."""
        return self.attempt(what, lambda: read_json(uri), None)

    def list(self, uri: str, what: str) -> list[str]:
        """Return the URIs below the folder `uri`, none when it can not be listed."""
        return self.attempt(what, lambda: store.list_uris(f"{uri.rstrip('/')}/"), [])


def gather(root: str, state: str = "", *, curves_only: bool = False) -> ReportFacts:
    """Read everything that the report shows; never raises for a missing or damaged file.

    Args:
        root: URI of the run.
        state: final state of the run as the scheduler gives it.
        curves_only: read configuration, stage logs, updates and evaluations, and nothing else.
    """
    reader = Reader(root)
    facts = ReportFacts(root=reader.root, state=state)
    run = reader.json(layout.run_file(reader.root), "the configuration (run.json)")
    facts.run = run if isinstance(run, dict) else {}
    facts.tasks = _tasks(reader)
    _read_updates(reader, facts)
    facts.sets = _evaluations(reader)
    facts.evaluations = facts.sets.pop("", [])
    if facts.evaluations and store.exists(layout.best_policy(reader.root)):
        facts.best = reader.attempt("the best policy", partial(read_best, reader.root), None)
    if facts.evaluations and store.exists(layout.control(reader.root)):
        facts.control = scalars(reader.json(layout.control(reader.root), "the control"))
    if not curves_only:
        _read_the_rest(reader, facts)
    facts.missing = reader.missing
    facts.failure = reader.failure
    return facts


def _read_the_rest(reader: Reader, facts: ReportFacts) -> None:
    """Fill in what no curve is drawn from."""
    facts.policies = _saved(reader, "policy", layout.policy(reader.root, 0))
    facts.states = _saved(reader, "state", layout.state(reader.root, 0))
    report = layout.curation_report(reader.root)
    facts.curation = reader.attempt(
        "the curation report",
        lambda: store.read(report).decode("utf-8", "replace"),
        "",
    )
    facts.alerts = _alerts(reader, facts.tasks)
    events = [
        (scalars(event), {str(k): v for k, v in event.items() if isinstance(v, str)})
        for uri in reader.list(layout.events(reader.root), "the events")
        if isinstance(event := reader.json(uri, f"event {_tail(uri)}"), dict)
    ]
    facts.happenings = happenings(events, facts.tasks, facts.alerts)
    facts.avoided = reader.attempt("the avoided nodes", partial(avoided, reader.root), [])
    facts.comparisons = sample_comparisons(reader, facts)


def scalars(raw: object) -> dict[str, float]:
    """Keep the finite numbers of a mapping, as floats."""
    if not isinstance(raw, Mapping):
        return {}
    return {str(key): float(value) for key, value in raw.items() if _is_finite(value)}


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _number(raw: Mapping[str, Any], key: str) -> float:
    """Return a finite number; 0 where there is none."""
    value = raw.get(key)
    return float(value) if _is_finite(value) and value is not None else 0.0


def _tail(uri: str) -> str:
    return uri.rpartition("/")[2]


def _tasks(reader: Reader) -> list[TaskLog]:
    """Read the log entries of the stages, by their begin."""
    tasks = []
    for uri in reader.list(layout.logs(reader.root), "the stage logs"):
        if not uri.endswith(".json"):
            continue
        raw = reader.json(uri, f"stage log {_tail(uri)}")
        if raw is None:
            continue
        if not isinstance(raw, dict) or raw.get("state") not in _STATES:
            reader.missing.append(f"stage log {_tail(uri)}: not a stage log")
            continue
        if raw.get("stage") != OWN_STAGE:
            tasks.append(
                TaskLog(
                    stage=_UNPRINTABLE.sub("?", str(raw.get("stage", "?")))[:40],
                    iteration=int(_number(raw, "iteration")),
                    shard=int(_number(raw, "shard")),
                    state=str(raw["state"]),
                    start_seconds=_number(raw, "start_seconds"),
                    seconds=max(0.0, _number(raw, "seconds")),
                    startup_seconds=max(0.0, _number(raw, "startup_seconds")),
                    already_done=raw.get("already_done") is True,
                    metrics=scalars(raw.get("metrics")),
                    error=str(raw.get("error", "")),
                )
            )
    if not tasks:
        reader.missing.append("stage logs: no stage has begun")
    return sorted(tasks, key=lambda task: (task.start_seconds, task.stage, task.shard))


def _read_updates(reader: Reader, facts: ReportFacts) -> None:
    """Fill in the updates, and whether an operator stopped the run."""
    uris = reader.list(f"{reader.root}/iterations", "the iterations")
    numbers = {int(match[1]) for uri in uris if (match := _ITERATION.search(uri))}
    stopped = {n for n in numbers if layout.stopped_file(reader.root, n) in set(uris)}
    facts.is_stopped = bool(stopped)
    for number in sorted(numbers - stopped):
        uri = layout.update(reader.root, number)
        report = reader.attempt(
            f"update of iteration {number}", partial(read_report, UpdateReport, uri), None
        )
        if report is not None:
            measured = scalars(report.scalars)
            norms = [step["grad_norm"] for step in report.minibatches if "grad_norm" in step]
            if norms:
                measured.update(scalars({"grad_norm_max": max(norms)}))
            facts.updates[number] = measured
    if not facts.updates:
        reader.missing.append("updates: no iteration has trained")


def _evaluations(reader: Reader) -> dict[str, list[Evaluation]]:
    """Read the evaluations of each set of prompts, by version; those held out have no name."""
    evaluations: dict[str, list[Evaluation]] = {}
    for uri in reader.list(f"{reader.root}/evals", "the evaluations"):
        place = layout.parse_evaluation(reader.root, uri)
        if place is None:
            continue
        name, version = place
        what = f"evaluation of policy {version}" + (f" on {name}" if name else "")
        report = reader.attempt(what, partial(read_report, EvalReport, uri), None)
        if report is not None:
            sources = {one_line(k): scalars(v) for k, v in report.sources.items()}
            found = Evaluation(version, scalars(report.scalars), sources)
            evaluations.setdefault(one_line(name, limit=80), []).append(found)
    if not evaluations:
        reader.missing.append("evaluation: no policy has been evaluated")
    for own in evaluations.values():
        own.sort(key=lambda evaluation: evaluation.version)
    return evaluations


def _saved(reader: Reader, kind: str, example: str) -> list[Saved]:
    """Find finished sets whose folders are numbered like `example`."""
    folder = example.rpartition("/")[0]
    sets = []
    for uri in reader.list(folder, f"the folder of each {kind}"):
        match = re.fullmatch(r"(?:step-)?(\d{1,12})/manifest\.json", uri[len(folder) + 1 :])
        if match is None:
            continue
        place = uri.rpartition("/")[0]
        manifest = reader.attempt(f"{kind} {int(match[1])}", partial(read_manifest, place), None)
        if manifest is not None:
            sets.append(Saved(kind, int(match[1]), place, manifest.sha256))
    return sorted(sets, key=lambda saved: saved.number)


def _alerts(reader: Reader, tasks: Sequence[TaskLog]) -> list[MachineAlert]:
    """Return the alerts whose evidence overlaps the time of the run."""
    begin = min((task.start_seconds for task in tasks), default=0.0)
    alerts = []
    for uri in reader.list(layout.alerts(reader.root), "the alerts"):
        raw = reader.json(uri, f"alert {_tail(uri)}")
        if not isinstance(raw, dict):
            if raw is not None:
                reader.missing.append(f"alert {_tail(uri)}: not an alert")
            continue
        machines = raw.get("machines")
        reports = raw.get("history")
        history = tuple(
            (_number(told, "second"), str(told.get("action", "")))
            for told in (reports if isinstance(reports, list) else ())
            if isinstance(told, dict)
        )
        # The end of an alert is reported without an action; what was done before it stays true.
        done = [action for _, action in history if action]
        whole_job = f"{len(machines)} machines" if isinstance(machines, list) else "?"
        alert = MachineAlert(
            machine=str(raw.get("machine", "?")) or whole_job,
            metric=str(raw.get("metric", "?")),
            score=_number(raw, "score"),
            first_second=_number(raw, "first_second"),
            last_second=_number(raw, "last_second"),
            action=str(raw.get("action", "")) or (done[-1] if done else ""),
            kind=str(raw.get("kind", "")),
            state=str(raw.get("state", "")),
            stage=str(raw.get("stage", "")),
            iteration=int(_number(raw, "iteration")),
            history=history,
        )
        if alert.last_second == 0.0 or alert.last_second >= begin:
            alerts.append(alert)
    return sorted(alerts, key=lambda alert: (alert.first_second, alert.machine, alert.metric))
