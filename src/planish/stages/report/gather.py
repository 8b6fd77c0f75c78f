"""Collect the facts of a run from its root; list missing files instead of raising.

This module draws nothing, and words only the list of missing files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from planish import store
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.refs import Ref
from planish.records.reports import EvalReport, UpdateReport, read_best, read_report
from planish.run.avoid import avoided
from planish.run.stage import read_run
from planish.stages.report.events import run_events
from planish.stages.report.facts import Evaluations, MachineAlert, ReportFacts, TaskLog
from planish.stages.report.reader import Reader
from planish.stages.report.samples import sample_comparisons
from planish.stages.report.text import one_line
from planish.store.documents import read_json

_ITERATION = re.compile(r"/iterations/(\d{1,9})/")
_SAVED = re.compile(r"(?:step-)?(\d{1,12})/manifest\.json")
OWN_STAGE = "report"
"""Stage whose log entries are not facts of the run."""


def gather(root: str, state: str = "", *, curves_only: bool = False) -> ReportFacts:
    """Read everything that the report shows; never raise for a missing or damaged file.

    `state` is the final state of the run as the scheduler gives it. With `curves_only` only
    configuration, stage logs, updates and evaluations are read.
    """
    reader = Reader(root)
    root = reader.root
    facts = ReportFacts(root=root, state=state, missing=reader.missing)
    facts.run = reader.attempt("the configuration (run.json)", partial(read_run, root), {})
    facts.tasks = [
        task
        for task in reader.documents(layout.logs(root), "stage log", _task)
        if task.stage != OWN_STAGE
    ]
    facts.tasks.sort(key=lambda task: (task.start_seconds, task.stage, task.shard))
    if not facts.tasks:
        reader.missing.append("stage logs: no stage has begun")
    _read_updates(reader, facts)
    facts.sets = _evaluations(reader)
    facts.evaluations = facts.sets.pop("", {})
    if facts.evaluations and store.exists(layout.best_policy(root)):
        facts.best = reader.attempt("the best policy", partial(read_best, root), None)
    if facts.evaluations and store.exists(layout.control(root)):
        facts.control = reader.attempt("the control", partial(read_json, layout.control(root)), {})
    if not curves_only:
        _read_the_rest(reader, facts)
    facts.failure = reader.failure
    return facts


def _read_the_rest(reader: Reader, facts: ReportFacts) -> None:
    """Fill in the facts without a curve."""
    root = reader.root
    facts.policies = _saved(reader, "policy", layout.policy(root, 0))
    facts.states = _saved(reader, "state", layout.state(root, 0))
    report = layout.curation_report(root)
    facts.curation = reader.attempt(
        "the curation report", lambda: store.read(report).decode("utf-8", "replace"), ""
    )
    alerts = reader.documents(layout.alerts(root), "alert", _alert)
    facts.alerts = sorted(
        (alert for alert in alerts if alert.last_second >= facts.began),
        key=lambda alert: (alert.first_second, alert.machine, alert.metric),
    )
    records = [*reader.documents(layout.events(root), "event", dict)]
    told = partial(run_events, records, facts.tasks, facts.alerts)
    facts.events = reader.attempt("the events", told, [])
    facts.avoided = reader.attempt("the avoided nodes", partial(avoided, root), [])
    facts.comparisons = sample_comparisons(reader, facts)


def scalars(raw: Mapping[str, float]) -> dict[str, float]:
    """Keep the finite numbers of a mapping."""
    return {key: value for key, value in raw.items() if math.isfinite(value)}


def _task(raw: dict[str, Any]) -> TaskLog:
    facts = {name: raw[name] for name in TaskLog.__annotations__ if name in raw}
    stage, metrics = one_line(raw["stage"], limit=40), scalars(raw.get("metrics", {}))
    return TaskLog(**{**facts, "stage": stage, "metrics": metrics})


def _alert(raw: dict[str, Any]) -> MachineAlert:
    facts = {name: raw[name] for name in MachineAlert.__annotations__ if name in raw}
    history = tuple((told["second"], told["action"]) for told in raw.get("history", ()))
    # The last report of an alert has no action; the last earlier action is still true.
    done = [action for _, action in history if action]
    machine = raw["machine"] or f"{len(raw['machines'])} machines"
    action = raw["action"] or (done[-1] if done else "")
    return MachineAlert(**{**facts, "machine": machine, "action": action, "history": history})


def _read_updates(reader: Reader, facts: ReportFacts) -> None:
    """Fill in the updates, and whether an operator stopped the run."""
    uris = set(reader.list(f"{reader.root}/iterations", "the iterations"))
    numbers = {int(match[1]) for uri in uris if (match := _ITERATION.search(uri))}
    stopped = {n for n in numbers if layout.stopped_file(reader.root, n) in uris}
    facts.is_stopped = bool(stopped)
    for number in sorted(numbers - stopped):
        read = partial(read_report, UpdateReport, layout.update(reader.root, number))
        report = reader.attempt(f"update of iteration {number}", read, None)
        if report is not None:
            norms = [step["grad_norm"] for step in report.minibatches if "grad_norm" in step]
            largest = {"grad_norm_max": max(norms)} if norms else {}
            facts.updates[number] = scalars(report.scalars | largest)
    if not facts.updates:
        reader.missing.append("updates: no iteration has trained")


def _evaluations(reader: Reader) -> dict[str, Evaluations]:
    """Read the evaluations of each set of prompts, by version; the held-out set has the name ""."""
    found: dict[str, dict[int, EvalReport]] = {}
    for uri in reader.list(f"{reader.root}/evals", "the evaluations"):
        if place := layout.parse_evaluation(reader.root, uri):
            name, version = place
            what = f"evaluation of policy {version}" + (f" on {name}" if name else "")
            report = reader.attempt(what, partial(read_report, EvalReport, uri), None)
            if report is not None:
                sources = {one_line(k): scalars(v) for k, v in report.sources.items()}
                own = found.setdefault(name, {})
                own[version] = EvalReport(scalars(report.scalars), sources, report.attributes)
    if not found:
        reader.missing.append("evaluation: no policy has been evaluated")
    return {name: dict(sorted(own.items())) for name, own in found.items()}


def _saved(reader: Reader, kind: str, example: str) -> dict[int, Ref]:
    """Return finished sets, by number, in the folders numbered like `example`."""
    folder = example.rpartition("/")[0]
    sets = {}
    for uri in reader.list(folder, f"the folder of each {kind}"):
        if match := _SAVED.fullmatch(uri.removeprefix(f"{folder}/")):
            place, number = uri.rpartition("/")[0], int(match[1])
            manifest = reader.attempt(f"{kind} {number}", partial(read_manifest, place), None)
            if manifest is not None:
                sets[number] = manifest.ref(place)
    return dict(sorted(sets.items()))
