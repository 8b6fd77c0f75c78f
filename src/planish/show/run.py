"""Tables of a run root: configuration, iterations, policies, evaluations and stage attempts."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from planish import store
from planish.base.errors import PlanishError, RecordError
from planish.records import EvalReport, UpdateReport, layout, read_manifest, read_report
from planish.records.reports import read_best
from planish.records.rewards import nothing_learnt
from planish.show.text import cell, table
from planish.stages.report.gather import gather
from planish.store.documents import read_json

_REPORT_PARTS = {"update/1": UpdateReport, "eval/1": EvalReport}
_MAX_ROWS = 200
_MAX_LINES = 2_000
_INDENTED_BYTES = 1 << 20


def run_tables(root: str) -> list[RenderableType]:
    """Return the tables on the run at `root`, from one listing and its small files.

    Its course comes first, its settings come last.
    """
    names = store.list_uris(root)
    run = read_json(layout.run_file(root))
    facts = [[key, value] for key, value in sorted(run.items()) if key != "config"]
    config = run.get("config")
    sections = sorted(config.items()) if isinstance(config, dict) else []
    return [
        *_course(root),
        *_other_tables(root, names),
        table(root, "", "", rows=facts, width=100),
        table("configuration", "section", "values", rows=[[k, v] for k, v in sections], width=400),
    ]


def _course(root: str) -> list[RenderableType]:
    """Return accuracy, reward and loss by iteration, and why an iteration taught nothing."""
    facts = gather(root, curves_only=True)
    evaluated = {version: each.scalars["accuracy"] for version, each in facts.evaluations.items()}
    series = {
        "accuracy": facts.series("reward/accuracy_mean"),
        "reward": facts.series("reward/reward_mean"),
        "loss": facts.series("update/loss"),
        "groups kept": facts.series("rollout/ds/kept_frac"),
        "cut off": facts.series("update/truncated_fraction"),
        "entropy": facts.series("update/entropy"),
        "k3": facts.series("update/mismatch_k3"),
        "held-out accuracy after": evaluated,
    }
    numbers = sorted({number for values in series.values() for number in values})
    rows: list[list[Any]] = [
        [n, *(values.get(n, "-") for values in series.values())] for n in numbers
    ]
    told: list[list[Any]] = [
        [t.iteration, line] for t in facts.tasks if (line := nothing_learnt(t.metrics))
    ]
    tables = [
        ("iterations", ("iteration", *series), rows, 60),
        ("without a signal", ("iteration", "why"), told, 400),
    ]
    return [
        table(title, *heads, rows=rows[-_MAX_ROWS:], width=width)
        for title, heads, rows, width in tables
        if rows
    ]


def _other_tables(root: str, names: list[str]) -> list[RenderableType]:
    """Return the tables of sets outside iterations, evaluations, and log entries of stages."""
    sets: list[list[Any]] = []
    evaluations: list[list[Any]] = []
    tasks: list[list[Any]] = []
    for name in names:
        place = name.removeprefix(f"{root}/")
        folder = place.removesuffix("/manifest.json")
        if folder != place and place.split("/")[0] in ("policies", "states", "prompts"):
            manifest = read_manifest(name.removesuffix("/manifest.json"))
            attributes = {k: v for k, v in manifest.attributes.items() if k != "config_sha256"}
            sets.append([folder, manifest.schema, attributes])
        elif place.startswith("evals/") and place.endswith(".json"):
            # other small files are in the folder of the reports too
            with contextlib.suppress(RecordError):
                evaluations.append([place, _scalars_line(read_report(EvalReport, name).scalars)])
        elif name.startswith(f"{layout.logs(root)}/") and name.endswith(".json"):
            entry = read_json(name)
            fields = ("iteration", "stage", "shard", "state", "seconds", "already_done")
            tasks.append([*(entry.get(f, "-") for f in fields), entry.get("error") or ""])
    columns = ("iteration", "stage", "shard", "state", "seconds", "already done", "error")
    if layout.best_policy(root) in names:
        best = read_best(root)
        compared = ", ".join(map(str, best.evaluated))
        evaluations.append(
            [
                "policies/best.json",
                f"accuracy {best.accuracy:.4g}, best of the policies {compared}: {best.pin}",
            ]
        )
    tables = [
        ("policies and states", ("folder", "schema", "attributes"), sets, 100),
        ("evaluations", ("file", "scalars"), evaluations, 300),
        ("stages", columns, tasks[-_MAX_ROWS:], 100),
    ]
    return [
        table(title, *heads, rows=rows, width=width) for title, heads, rows, width in tables if rows
    ]


def _scalars_line(scalars: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in sorted(scalars.items()))


def _lines(text: str) -> list[RenderableType]:
    """Return the first lines of a text, and a line that says how much is left out."""
    lines = io.StringIO(text, newline=None)
    shown = list(itertools.islice(lines, _MAX_LINES))
    left = sum(map(len, lines))
    more = [Text(f"... {left} characters more")] if left > 0 else []
    return [*(cell(line.rstrip("\n"), width=400) for line in shown), *more]


def document_tables(uri: str, data: bytes) -> list[RenderableType]:
    """Return a report as tables, and any other JSON or text as it is."""
    try:
        raw: Any = json.loads(data)
    except (ValueError, RecursionError):
        return _lines(data.decode("utf-8", "replace"))
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if not isinstance(schema, str) or schema not in _REPORT_PARTS:
        text = data.decode("utf-8", "replace")
        # Indentation makes a large document many times larger.
        with contextlib.suppress(RecursionError):
            if len(data) <= _INDENTED_BYTES:
                text = json.dumps(raw, indent=2, sort_keys=True)
        return _lines(text)
    report: UpdateReport | EvalReport = read_report(_REPORT_PARTS[schema], uri)
    tables: list[RenderableType] = [
        table(uri, "", "", rows=sorted([k, v] for k, v in report.attributes.items()), width=100),
        table("scalars", "name", "value", rows=sorted([k, v] for k, v in report.scalars.items())),
    ]
    rows: list[list[Any]]
    if isinstance(report, EvalReport):
        rows = [
            [source, _scalars_line(scores)] for source, scores in sorted(report.sources.items())
        ]
        return [*tables, table("sources", "source", "scalars", rows=rows, width=300)]
    names = sorted({name for entry in report.minibatches for name in entry})
    rows = [
        [n, *(entry.get(name, "-") for name in names)] for n, entry in enumerate(report.minibatches)
    ]
    return [*tables, table("mini-batches", "", *names, rows=rows[:_MAX_ROWS])]


def folder_tables(uri: str) -> list[RenderableType]:
    """Return tables of the sets and objects below a folder that is not itself a set."""
    rows: list[list[Any]] = []
    for name in store.list_uris(uri):
        if name.endswith("/manifest.json"):
            folder = name.removesuffix("/manifest.json")
            try:
                manifest = read_manifest(folder)
                rows.append([folder.removeprefix(f"{uri}/"), manifest.schema, manifest.num_rows])
            except PlanishError as error:
                rows.append([folder.removeprefix(f"{uri}/"), "damaged", str(error)])
    if not rows:
        rows = [[name.removeprefix(f"{uri}/"), "", ""] for name in store.list_uris(uri)]
    return [table(uri, "set", "schema", "rows", rows=rows[:_MAX_ROWS], width=100)] if rows else []
