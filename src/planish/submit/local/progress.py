"""Progress of a run: one line for each ended task, read from the run root."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from planish import store
from planish.records import layout
from planish.records.rewards import nothing_learnt
from planish.stages.curate.problem import MUCH
from planish.stages.report.facts import TaskLog
from planish.submit.root import open_alerts

POLL_SECONDS = 0.3
SAMPLING = re.compile(
    r"sampling kept=(\d+) goal=(\d+) dropped=(\d+) tokens_per_second=(\d+) slots=(\d+) "
    r"seconds_left=(\w+)|generating done=(\d+) goal=(\d+) tokens_per_second=(\d+)"
)
"""Log line that a rollout task or an evaluation writes every few seconds."""

WARNINGS = re.compile(r"^## Warnings\n\n((?:- .*\n)+)", re.MULTILINE)
"""Warnings in the plan that the stage `prepare` logs."""

WORK_SECONDS = {"rollout": "sample_seconds", "train": "update_seconds"}
"""Map from stage to the metric of its working seconds, without process start, imports and
loading."""

FACTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "curate": (
        ("num_train", "prompts", "{:.0f}"),
        ("num_evaluation", "held out", "{:.0f}"),
    ),
    "sft": (("steps", "steps", "{:.0f}"), ("accuracy", "accuracy", "{:.3f}")),
    "rollout": (
        ("accuracy_mean", "accuracy", "{:.3f}"),
        ("ds/kept_frac", "kept", "{:.0%}"),
        ("response_length_mean", "tokens each", "{:.1f}"),
    ),
    "reward": (("reward_mean", "reward", "{:+.3f}"), ("accuracy_mean", "accuracy", "{:.3f}")),
    "train": (
        ("loss", "loss", "{:+.4f}"),
        ("entropy", "entropy", "{:.3f}"),
        ("clipfrac_high", "clipped high", "{:.2%}"),
        ("grad_norm", "grad norm", "{:.2f}"),
    ),
    "evaluate": (
        ("accuracy", "avg@n", "{:.3f}"),
        ("accuracy_before", "avg@n before", "{:.3f}"),
        ("accuracy_after", "after", "{:.3f}"),
    ),
}
"""Map from stage to the content of its progress line: (metric, text, format)."""


def read_tasks(root: str, since: float) -> list[TaskLog]:
    """Return the ended attempts that began after `since` (Unix seconds), ordered by their end."""
    tasks = []
    for uri in store.list_uris(layout.logs(root) + "/"):
        if not uri.endswith(".json"):
            continue
        try:
            entry: dict[str, Any] = json.loads(store.read(uri))
        except (ValueError, OSError):
            continue  # the stage replaces the file at this moment; the next call reads it
        if entry["state"] == "running" or entry["start_seconds"] < since:
            continue
        tasks.append(TaskLog(**{n: entry[n] for n in TaskLog.__annotations__ if n in entry}))
    return sorted(tasks, key=lambda task: task.end_seconds)


def progress_line(task: TaskLog, elapsed: float) -> str:
    """Return the progress line of one ended task."""
    where = f"iteration {task.iteration}" if task.iteration else ""
    name = f"{task.stage} {task.shard + 1}" if task.stage == "rollout" else task.stage
    facts = [
        f"{words} {form.format(task.metrics[key])}"
        for key, words, form in FACTS.get(task.stage, ())
        if key in task.metrics
    ]
    if task.stage == "curate":
        facts += rows_facts(task.metrics)
    if told := nothing_learnt(task.metrics):
        facts = [told]
    if task.metrics.get("cold_start_skipped"):
        facts = ["cold start skipped: the data set has no worked traces"]
    if task.already_done:
        facts = ["already done"]
    if task.state == "failed":
        facts = [f"FAILED: {task.error}"]
    return (
        f"{elapsed:7.1f} s  {where:<11}  {name:<10} {task.seconds:5.1f} s  {'  '.join(facts)}"
    ).rstrip()


def rows_facts(metrics: Mapping[str, float]) -> list[str]:
    """Return the numbers of rows that were read, kept, and dropped by each filter."""
    if "in_rows_of_the_data_set" not in metrics:
        return []
    facts = [f"of {metrics['in_rows_of_the_data_set']:.0f} rows"]
    for key, number in metrics.items():
        if key.startswith("dropped_"):
            name = key.removeprefix("dropped_")
            part = number / metrics[f"in_{name}"]
            much = f" ({part:.0%}, see the curation report)" if part > MUCH else ""
            facts.append(f"dropped by {name.replace('_', ' ')} {number:.0f}{much}")
    return facts


def sampling_line(log: str) -> str:
    """Return the newest progress of sampling in a log; "" if there is none."""
    found = SAMPLING.findall(log)
    if not found:
        return ""
    kept, goal, dropped, speed, slots, left, *measured = found[-1]
    if measured[0]:
        return "generating: {} of {} responses, {} tokens/s".format(*measured)
    facts = f"{kept} of {goal} kept, {dropped} dropped, {speed} tokens/s, {slots} slots in use"
    return f"sampling: {facts}" + ("" if left == "unknown" else f", {left} s left")


def watch(
    process: subprocess.Popen[bytes],
    root: str,
    console: Console,
    log: Path,
    begin: Callable[[], None],
) -> list[TaskLog]:
    """Print one line for each task until the run ends; return the tasks of this run.

    On a terminal the last line shows the progress of sampling. `begin` is called once, after the
    first task has succeeded, since the root then belongs to this run.
    """
    began = time.time()
    shown: dict[tuple[int, str, int], TaskLog] = {}
    told, sampling, alerts = 0, "", set(open_alerts(root))
    # `console.is_terminal` is also True for a pipe if FORCE_COLOR is set, as in notebooks and CI.
    with console.status("") if console.file.isatty() else nullcontext() as status:
        while True:
            ended = process.poll() is not None
            for task in read_tasks(root, began - 1):
                key = (task.iteration, task.stage, task.shard)
                if shown.get(key) != task:
                    is_first = all(seen.state == "failed" for seen in shown.values())
                    if is_first and task.state == "done":
                        begin()
                    shown[key] = task
                    told, sampling = log.stat().st_size, ""
                    style = "bold red" if task.state == "failed" else None
                    line = progress_line(task, time.time() - began)
                    console.print(line, style=style, highlight=False)
                    if task.stage == "prepare" and (found := WARNINGS.search(log.read_text())):
                        console.print(found[1].rstrip(), style="yellow", highlight=False)
            for uri, line in open_alerts(root).items():
                if uri not in alerts:
                    console.print(line, style="bold red", highlight=False)
                alerts.add(uri)
            if ended:
                return list(shown.values())
            if status is not None:
                with log.open("rb") as stream:
                    stream.seek(told)
                    news = stream.read()
                told += len(news)
                sampling = sampling_line(news.decode("utf-8", "replace")) or sampling
                status.update(sampling)
            time.sleep(POLL_SECONDS)


def seconds_by_stage(tasks: Sequence[TaskLog]) -> dict[str, float]:
    """Return wall seconds by stage; parallel shards count once, from the first start to the last
    end.
    """
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for task in tasks:
        spans[task.stage, task.iteration].append((task.start_seconds, task.end_seconds))
    total: dict[str, float] = defaultdict(float)
    for (stage, _), parts in sorted(spans.items()):
        total[stage] += max(end for _, end in parts) - min(start for start, _ in parts)
    return {stage: round(seconds, 2) for stage, seconds in total.items()}


def work_seconds(tasks: Sequence[TaskLog]) -> float:
    """Return the seconds of sampling and updating; among parallel shards only the slowest
    counts.
    """
    slowest: dict[tuple[str, int], float] = defaultdict(float)
    for task in tasks:
        metric = WORK_SECONDS.get(task.stage, "")
        key = (task.stage, task.iteration)
        slowest[key] = max(slowest[key], task.metrics.get(metric, 0.0))
    return sum(slowest.values())
