"""What stands where on the page: header, cards, failure; plain texts for the templates."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from planish.records.rewards import judged_late, nothing_learnt
from planish.stages.report import tables
from planish.stages.report.facts import CANCELLED, ReportFacts, SampleComparison
from planish.stages.report.figures.charts import Chart
from planish.stages.report.figures.run_charts import all_charts, recovery
from planish.stages.report.tables import ScoreChange, ScoreTable, change_of
from planish.stages.report.words import number, one_line, percent, seconds, visible

FAILURES = {"FAILED", "ERROR", "TERMINATED", *CANCELLED}
"""Final states after which something has to be mended."""

ENDED = "Ended by a person"
"""What stands in place of the state of a run that a person terminated."""
MAX_LISTED = 40
"""Rows of a list that may grow without bound."""


@dataclass(frozen=True)
class Card:
    """One key number."""

    title: str
    """What it is."""
    value: str
    """The number."""
    note: str = ""
    """Small print."""
    before: str = ""
    """The number before the run; empty when there is none."""
    change: ScoreChange | None = None
    """Difference, judged."""
    is_big: bool = False
    """Takes twice the width."""


@dataclass(frozen=True)
class Failure:
    """What a failed run's owner has to know first."""

    title: str
    """Heading that names the stage."""
    tasks: list[tuple[str, str]]
    """Task and its error."""
    rows: list[tuple[str, str]]
    """Last good policy and state."""
    resume: str
    """Command."""


@dataclass
class Page:
    """Everything that the templates print."""

    name: str
    """Name of the run."""
    root: str
    """URI of the run."""
    state: str
    """Final state in words."""
    tone: str
    """good, bad or warn."""
    facts: list[tuple[str, str]]
    """Label and value pairs of the header."""
    cards: list[Card]
    """Key numbers."""
    failure: Failure | None = None
    """None after success."""
    unlearnt: list[str] = field(default_factory=list)
    """Iterations that could teach nothing, and why."""
    late: list[str] = field(default_factory=list)
    """Iterations with responses that were not judged in time, and how many."""
    recovery: list[Chart] = field(default_factory=list)
    """The picture of what disturbed the run; empty where nothing did."""
    happenings: list[tuple[str, str]] = field(default_factory=list)
    """UTC time and what happened."""
    charts: list[Chart] = field(default_factory=list)
    """Curves."""
    scores: list[ScoreTable] = field(default_factory=list)
    """Evaluation tables."""
    evaluation_lead: str = ""
    """How to read them."""
    alerts: list[dict[str, str]] = field(default_factory=list)
    """Anomalies."""
    avoided: list[dict[str, str]] = field(default_factory=list)
    """Nodes that were named."""
    restart: str = ""
    """Whether the run is started again."""
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    """Sample rollouts."""
    funnel: list[dict[str, Any]] = field(default_factory=list)
    """Steps of curation."""
    curation: str = ""
    """Markdown of the curation report; the renderer turns it into safe HTML."""
    saved: list[dict[str, str]] = field(default_factory=list)
    """Policies and states with digests."""
    saved_more: str = ""
    """Says how many rows were left out."""
    config: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)
    """Section to settings."""
    num_settings: int = 0
    """Settings in all sections."""
    missing: list[str] = field(default_factory=list)
    """What could not be read."""
    began: str = ""
    """UTC time of the first task."""


def build_page(facts: ReportFacts, *, failed_task: str, error_message: str) -> Page:
    """Turn facts into what the templates print.

    Args:
        facts: the run.
        failed_task: what the scheduler names as failed.
        error_message: what the scheduler says about it.
    """
    header = [
        ("preset", facts.run.get("preset")),
        ("algorithm", facts.config.get("algorithm", {}).get("name")),
        *zip(("model", "data"), _sources(facts.config), strict=True),
        ("seed", facts.config.get("run", {}).get("seed")),
        ("code", facts.run.get("code_version")),
        ("configuration", str(facts.run.get("config_sha256", ""))[:12]),
        *trained_parameters(facts),
    ]
    failure = _failure(facts, failed_task, error_message)
    saved, more = tables.saved_rows(facts)
    config = tables.config_tables(facts.config)
    missing = [one_line(item) for item in facts.missing]
    if len(missing) > MAX_LISTED:
        missing[MAX_LISTED:] = [f"and {len(missing) - MAX_LISTED} more"]
    return Page(
        name=one_line(facts.name, limit=80),
        root=facts.root,
        state=_state(facts),
        tone="good" if facts.is_success else "bad" if failure else "warn",
        facts=[
            (label, one_line(str(value), limit=60))
            for label, value in header
            if value not in (None, "")
        ],
        cards=_cards(facts),
        failure=failure,
        unlearnt=[
            f"iteration {task.iteration}: {told}"
            for task in facts.tasks
            if task.stage == "reward" and (told := nothing_learnt(task.metrics))
        ][-MAX_LISTED:],
        late=[
            f"iteration {task.iteration}: {told}"
            for task in facts.tasks
            if task.stage == "reward" and (told := judged_late(task.metrics))
        ][-MAX_LISTED:],
        recovery=[chart] if (chart := recovery(facts)) else [],
        happenings=[(_utc(one.begin_seconds), one.text) for one in facts.happenings[:MAX_LISTED]],
        charts=all_charts(facts),
        scores=[
            *tables.score_tables(facts.evaluations, facts.best),
            *(t for name, own in facts.sets.items() for t in tables.score_tables(own, name=name)),
        ],
        evaluation_lead=_evaluation_lead(facts),
        alerts=_alerts(facts),
        avoided=[
            {
                "name": one_line(node.name, limit=80),
                "named_by": one_line(node.named_by, limit=40),
                "where": f"iteration {node.iteration}" if node.iteration else "",
                "run_id": one_line(node.run_id, limit=80),
                "at": _utc(node.seconds),
            }
            for node in facts.avoided[:MAX_LISTED]
        ],
        restart=one_line(facts.restart, limit=300),
        comparisons=[_comparison(item) for item in facts.comparisons],
        funnel=tables.funnel(facts.curation),
        curation=facts.curation,
        saved=saved,
        saved_more=more,
        config=config,
        num_settings=sum(len(rows) for _, rows in config),
        missing=missing,
        began=_utc(min((t.start_seconds for t in facts.tasks if t.start_seconds), default=0.0)),
    )


def trained_parameters(facts: ReportFacts) -> list[tuple[str, str]]:
    """Return how many parameters adapters train, of all; nothing where all weights are trained."""
    scalars = facts.updates[facts.iterations[-1]] if facts.iterations else {}
    rows = []
    for label, kind in (("trained parameters", ""), ("of the critic", "critic_")):
        trained = scalars.get(f"num_trained_{kind}parameters")
        total = scalars.get(f"num_{kind}parameters")
        if trained is not None and total:
            share = percent(trained / total, decimals=2)
            rows.append((label, f"{trained:,.0f} of {total:,.0f} ({share})"))
    return rows


def _sources(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return what model and what data a run began with."""
    model, curate = config.get("model", {}), config.get("curate", {})
    built = f"from scratch, {model.get('num_layers')} layers of {model.get('hidden_size')}"
    task = curate.get("task", "")
    data = curate.get("dataset") or (f"generated {task}" if task else "")
    return str(model.get("path") or (built if model else "")), str(data)


def _utc(second: float) -> str:
    try:
        return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d %H:%M:%S} UTC" if second else ""
    except (OverflowError, ValueError, OSError):
        return ""


def _cards(facts: ReportFacts) -> list[Card]:
    """Return the key numbers: accuracy before and after, then what the run cost."""
    before, after = facts.before, facts.after
    cards: list[Card] = []
    if before is None or before.accuracy is None:
        cards.append(Card("Held-out accuracy", "not evaluated"))
    else:
        error = facts.rise_error or 0.0
        note = f"\u00b1 {100 * error:.1f} (1 standard error)" if error else ""
        title = "Held-out accuracy, mean over samples"
        new = after.accuracy if after else None
        cards.append(_score_card(title, before.accuracy, new, note, noise=error))
    if before is not None and before.greedy is not None:
        new = after.greedy if after else None
        cards.append(_score_card("Greedy accuracy", before.greedy, new, "one response per prompt"))
    if before is not None and after is not None:
        names = before.scalars.keys() & after.scalars.keys()
        passes = [name for name in names if name.startswith("pass@")]
        if passes:
            name = max(passes, key=lambda name: (len(name), name))
            old, new = before.scalars[name], after.scalars[name]
            cards.append(_score_card(name, old, new, "prompts solved at least once"))
    if facts.best is not None and len(facts.best.evaluated) > 2:
        note = f"avg@n {percent(facts.best.accuracy, decimals=1)}, of {len(facts.best.evaluated)}"
        cards.append(Card("Best policy", f"{facts.best.policy_version}", f"{note} evaluated"))
    if "accuracy" in facts.control:
        note = f"greedy {percent(facts.control['greedy'], decimals=1)}; from the same start"
        value = percent(facts.control["accuracy"], decimals=1)
        cards.append(Card("After as long a supervised training instead", value, note))
    last = f"the last is number {facts.iterations[-1]}" if facts.iterations else "none finished"
    cards.append(Card("Iterations", f"{len(facts.updates)}", last))
    total, busy = "unknown", ""
    if facts.seconds:
        total = seconds(facts.seconds)
        busy = f"{seconds(facts.busy_seconds)} of it inside stages"
    cards.append(Card("Total time", total, busy))
    if facts.num_tokens is not None:
        count = number(facts.num_tokens)
        cards.append(Card("Tokens generated", count, "in the rollouts of all iterations"))
        # Shards sample side by side: of one iteration the slowest counts.
        spent = sum(facts.per_iteration("rollout", "sample_seconds", max).values())
        if spent > 0:
            rate = f"{number(facts.num_tokens / spent)} / s"
            cards.append(Card("Sampling speed", rate, "tokens, all shards together"))
    return cards


def _score_card(
    title: str, before: float, after: float | None, note: str, *, noise: float = 0.0
) -> Card:
    """Return the card of a score of the starting policy and, where it is known, of the last one."""
    if after is None:
        return Card(title, percent(before, decimals=1), "starting policy only", is_big=True)
    return Card(
        title,
        percent(after, decimals=1),
        note,
        before=percent(before, decimals=1),
        change=change_of(before, after, noise=noise),
        is_big=True,
    )


def _evaluation_lead(facts: ReportFacts) -> str:
    if not facts.evaluations:
        return ""
    scalars = facts.evaluations[-1].scalars
    prompts = number(scalars["num_prompts"]) if "num_prompts" in scalars else "The"
    samples = f", {number(scalars['num_samples'])} samples each" if "num_samples" in scalars else ""
    return (
        f"{prompts} held-out prompts{samples}; none of them was trained on. The error is that of "
        "sampling with the prompts held fixed; the interval is that of drawing other prompts."
    )


def _alerts(facts: ReportFacts) -> list[dict[str, str]]:
    rows = []
    for alert in facts.alerts[:MAX_LISTED]:
        stage = one_line(alert.stage, limit=40)
        is_inside = stage and alert.iteration
        rows.append(
            {
                "machine": one_line(alert.machine, limit=80),
                "metric": one_line(alert.metric or alert.kind, limit=80),
                "where": f"{stage} of iteration {alert.iteration}" if is_inside else stage,
                "score": number(alert.score),
                "begin": _utc(alert.first_second),
                "end": _utc(alert.last_second) if alert.state in ("", "resolved") else "not over",
                "action": one_line(alert.action, limit=200) or "none",
            }
        )
    return rows


def _comparison(comparison: SampleComparison) -> dict[str, Any]:
    prompts: dict[str, dict[str, Any]] = {}
    columns: list[tuple[str, Sequence[dict[str, Any]]]] = []
    for heading, samples in comparison.columns:
        for sample in samples:
            is_short = len(sample.prompt) <= 80 and "\n" not in sample.prompt
            block = {"prompt": visible(sample.prompt), "answer": one_line(sample.answer)}
            prompts.setdefault(sample.prompt_id, {**block, "is_short": is_short})
        shown = [
            {
                "is_correct": sample.is_correct,
                "num_tokens": sample.num_tokens,
                "extracted": one_line(sample.extracted, limit=80),
                "response": visible(sample.response),
            }
            for sample in samples
        ]
        columns.append((heading, shown))
    return {"title": comparison.title, "prompts": list(prompts.values()), "columns": columns}


def _state(facts: ReportFacts) -> str:
    """Return the state of the run in words."""
    if facts.is_stopped and facts.is_success:
        return "Stopped by an operator"
    return ENDED if facts.is_ended_by_a_person else facts.final_state.capitalize()


def _failure(facts: ReportFacts, failed_task: str, error_message: str) -> Failure | None:
    """Return what a failed run's owner has to know; None where nothing has failed."""
    if facts.is_success or not (facts.final_state in FAILURES or facts.failed):
        return None
    tasks = [
        (
            one_line(task.name),
            visible(task.error)
            if task.error
            else f"cut off after {seconds(task.seconds)} without a message (killed, evicted or "
            "timed out)",
        )
        for task in facts.failed[:8]
    ]
    if error_message.strip() or not tasks:
        label = one_line(failed_task) or "scheduler"
        tasks.append((f"{label} (scheduler)", visible(error_message.strip()) or "no message"))
    name = facts.failed[0].name if facts.failed else one_line(failed_task) or "unknown"
    policy, state = facts.last_policy, facts.last_state
    rows = [
        ("last good policy", policy.pin if policy else "none: no policy was finished"),
        ("last good state", state.pin if state else "none: no train state was finished"),
    ]
    what = "was ended by a person" if facts.is_ended_by_a_person else "failed"
    return Failure(f"The run {what} in stage {name}", tasks, rows, resume_command(facts))


def resume_command(facts: ReportFacts) -> str:
    """Return the command that goes on where the run ended; two when it may run in two places."""
    preset = facts.run.get("preset")
    has_preset = isinstance(preset, str) and preset
    root = shlex.quote(facts.root)
    local = f"planish run --root {root}"
    local += f" --preset {shlex.quote(str(preset))}" if has_preset else ""
    if facts.root.startswith("file://"):
        return local
    cluster = f"planish submit {root}"
    cluster += f" -p {shlex.quote(f'preset={preset}')}" if has_preset else ""
    return f"{cluster}  # on a cluster\n{local}  # on one machine"
