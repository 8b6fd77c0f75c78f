"""Collect the facts of a run from its root. No drawing, no wording beyond what is missing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from planish.records import layout
from planish.records.io import read_manifest
from planish.records.reports import EvalReport, UpdateReport, read_report
from planish.run.avoid import AvoidedNode, avoided
from planish.stages.report.facts import Alert, Evaluation, RunFacts, Saved, Task
from planish.stages.report.reading import Reader
from planish.stages.report.samples import sample_comparisons
from planish.stages.report.words import one_line

_ITERATION = re.compile(r"/iterations/(\d{1,9})/")
_VERSION = re.compile(r"/(?P<version>\d{1,9})/(?P<name>[^/]+)\.json$")
_UNPRINTABLE = re.compile(r"[^a-zA-Z0-9_ -]")
_STATES = {"running", "done", "failed"}
OWN_STAGE = "report"
"""Log entries of this stage say nothing about the run."""


def gather(root: str) -> RunFacts:
    """Read everything that the report shows; never raises for a missing or damaged file."""
    reader = Reader(root)
    facts = RunFacts(root=reader.root)
    run = reader.json(layout.run_file(reader.root), "the configuration (run.json)")
    facts.run = run if isinstance(run, dict) else {}
    facts.tasks = _tasks(reader)
    facts.is_stopped = _read_updates(reader, facts)
    facts.evaluations = _evaluations(reader)
    facts.policies = _saved(reader, "policy", layout.policy(reader.root, 0))
    facts.states = _saved(reader, "state", layout.state(reader.root, 0))
    facts.curation = reader.text(layout.curation_report(reader.root), "the curation report")
    facts.alerts = _alerts(reader, facts.tasks)
    facts.avoided = _avoided(reader)
    facts.comparisons = sample_comparisons(reader, facts)
    facts.missing = reader.missing
    facts.failure = reader.failure
    return facts


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


def _tasks(reader: Reader) -> list[Task]:
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
        task = _task(raw)
        if task.stage != OWN_STAGE:
            tasks.append(task)
    if not tasks:
        reader.missing.append("stage logs: no stage has begun")
    return sorted(tasks, key=lambda task: (task.start_seconds, task.stage, task.shard))


def _task(raw: Mapping[str, Any]) -> Task:
    return Task(
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


def _tail(uri: str) -> str:
    return uri.rpartition("/")[2]


def _read_updates(reader: Reader, facts: RunFacts) -> bool:
    """Fill in the updates; return whether an operator stopped the run."""
    uris = reader.list(f"{reader.root}/iterations", "the iterations")
    numbers = {int(found[1]) for uri in uris if (found := _ITERATION.search(uri))}
    present = set(uris)
    stopped = {n for n in numbers if layout.stopped_file(reader.root, n) in present}
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
    return bool(stopped)


def _evaluations(reader: Reader) -> list[Evaluation]:
    found = []
    for uri in reader.list(f"{reader.root}/evals", "the evaluations"):
        match = _VERSION.search(uri)
        if match is None or match["name"] == "manifest":
            continue
        report = reader.attempt(
            f"evaluation of policy {int(match['version'])}",
            partial(read_report, EvalReport, uri),
            None,
        )
        if report is not None:
            sources = {one_line(k): scalars(v) for k, v in report.sources.items()}
            found.append(Evaluation(int(match["version"]), scalars(report.scalars), sources))
    if not found:
        reader.missing.append("evaluation: no policy has been evaluated")
    return sorted(found, key=lambda evaluation: evaluation.version)


def _saved(reader: Reader, kind: str, example: str) -> list[Saved]:
    """Find finished sets whose folders are numbered like `example`."""
    folder = example.rpartition("/")[0]
    found = []
    for uri in reader.list(folder, f"the folder of each {kind}"):
        match = re.fullmatch(r"(?:step-)?(\d{1,12})/manifest\.json", uri[len(folder) + 1 :])
        if match is None:
            continue
        place = uri.rpartition("/")[0]
        digest = reader.attempt(f"{kind} {int(match[1])}", partial(_digest, place), "")
        if digest:
            found.append(Saved(kind, int(match[1]), place, digest))
    return sorted(found, key=lambda saved: saved.number)


def _digest(uri: str) -> str:
    return read_manifest(uri).sha256


def _alerts(reader: Reader, tasks: Sequence[Task]) -> list[Alert]:
    """Return the alerts whose evidence overlaps the time of the run."""
    begin = min((task.start_seconds for task in tasks), default=0.0)
    found = []
    for uri in reader.list(layout.alerts(reader.root), "the alerts"):
        raw = reader.json(uri, f"alert {_tail(uri)}")
        if not isinstance(raw, dict):
            if raw is not None:
                reader.missing.append(f"alert {_tail(uri)}: not an alert")
            continue
        alert = Alert(
            machine=str(raw.get("machine", "?")) or _machines(raw),
            metric=str(raw.get("metric", "?")),
            score=_number(raw, "score"),
            first_second=_number(raw, "first_second"),
            last_second=_number(raw, "last_second"),
            action=str(raw.get("action", "")),
            kind=str(raw.get("kind", "")),
            state=str(raw.get("state", "")),
            stage=str(raw.get("stage", "")),
            iteration=int(_number(raw, "iteration")),
        )
        if alert.last_second == 0.0 or alert.last_second >= begin:
            found.append(alert)
    return sorted(found, key=lambda alert: (alert.first_second, alert.machine, alert.metric))


def _avoided(reader: Reader) -> list[AvoidedNode]:
    return reader.attempt("the avoided nodes", partial(avoided, reader.root), [])


def _machines(raw: Mapping[str, Any]) -> str:
    """Return how many machines an alert of the whole job is about."""
    machines = raw.get("machines")
    return f"{len(machines)} machines" if isinstance(machines, list) else "?"
