"""Content of the page as plain texts for the templates: header, cards, failure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from planish.records.rewards import judged_late, nothing_learnt
from planish.run.kubeflow import CANCELLED
from planish.stages.report import tables
from planish.stages.report.facts import ReportFacts, last_pin
from planish.stages.report.figures.run_charts import all_charts, recovery
from planish.stages.report.tables import ScoreChange, change_of
from planish.stages.report.text import number, one_line, percent, seconds, utc, visible

FAILURES = {"FAILED", "ERROR", "TERMINATED", *CANCELLED}
ENDED = "Ended by a person"
RELOAD_SECONDS = 20
"""Seconds after which a browser reads the page of a running run again."""
MAX_LISTED = 40
"""Limit on the rows of a list that may grow without bound."""


class Card(NamedTuple):
    """One key number."""

    title: str
    value: str
    note: str = ""
    before: str = ""
    change: ScoreChange | None = None
    is_big: bool = False
    """True if the card has twice the width."""


def build_page(facts: ReportFacts, *, failed_task: str, error_message: str) -> dict[str, Any]:
    """Return the variables of the templates from the facts and the scheduler's failure message."""
    failure = _failure(facts, failed_task, error_message)
    saved, more = tables.saved_rows(facts)
    config = tables.config_tables(facts.config)
    missing = [one_line(item) for item in facts.missing]
    if len(missing) > MAX_LISTED:
        missing[MAX_LISTED:] = [f"and {len(missing) - MAX_LISTED} more"]
    chart = recovery(facts)
    return {
        "name": one_line(facts.root.rpartition("/")[2] or facts.root, limit=80),
        "root": facts.root,
        "state": _state(facts),
        "tone": "good" if facts.is_success else "bad" if failure else "warn",
        "facts": _header(facts),
        "cards": _cards(facts),
        "failure": failure,
        "unlearnt": _of_rewards(facts, nothing_learnt),
        "late": _of_rewards(facts, judged_late),
        "recovery": [chart] if chart else [],
        "events": [(utc(event.begin_seconds), event.text) for event in facts.events[:MAX_LISTED]],
        "charts": all_charts(facts),
        "scores": [
            *tables.score_tables(facts.evaluations, facts.best),
            *(t for name, own in facts.sets.items() for t in tables.score_tables(own, name=name)),
        ],
        "evaluation_lead": _evaluation_lead(facts),
        "alerts": facts.alerts[:MAX_LISTED],
        "avoided": facts.avoided[:MAX_LISTED],
        "restart": one_line(facts.restart),
        "comparisons": facts.comparisons,
        "funnel": tables.funnel(facts.curation),
        "curation": facts.curation,
        "saved": saved,
        "saved_more": more,
        "config": config,
        "num_settings": sum(len(rows) for _, rows in config),
        "missing": [] if facts.is_running else missing,
        "reload_seconds": RELOAD_SECONDS * facts.is_running,
        "began": utc(facts.began),
    }


def _header(facts: ReportFacts) -> list[tuple[str, str]]:
    model, curate = facts.config.get("model", {}), facts.config.get("curate", {})
    built = f"from scratch, {model.get('num_layers')} layers of {model.get('hidden_size')}"
    generated = f"generated {curate['task']}" if curate.get("task") else ""
    header = {
        "preset": facts.run.get("preset"),
        "algorithm": facts.config.get("algorithm", {}).get("name"),
        "model": model.get("path") or (built if model else ""),
        "data": curate.get("dataset") or generated,
        "seed": facts.config.get("run", {}).get("seed"),
        "code": facts.run.get("code_version"),
        "configuration": facts.run.get("config_sha256", "")[:12],
        **_trained_parameters(facts),
    }
    return [
        (label, one_line(str(value), limit=60))
        for label, value in header.items()
        if value not in (None, "")
    ]


def _trained_parameters(facts: ReportFacts) -> dict[str, str]:
    """Return the number of adapter parameters out of all; empty if all weights are trained."""
    scalars = facts.updates[facts.iterations[-1]] if facts.iterations else {}
    rows = {}
    for label, kind in (("trained parameters", ""), ("of the critic", "critic_")):
        trained = scalars.get(f"num_trained_{kind}parameters")
        total = scalars.get(f"num_{kind}parameters")
        if trained is not None and total:
            share = percent(trained / total, decimals=2)
            rows[label] = f"{trained:,.0f} of {total:,.0f} ({share})"
    return rows


def _of_rewards(facts: ReportFacts, tell: Callable[[Mapping[str, float]], str]) -> list[str]:
    """Return the line that `tell` makes of each reward task's metrics, without empty ones."""
    rewards = (task for task in facts.tasks if task.stage == "reward")
    lines = ((task.iteration, tell(task.metrics)) for task in rewards)
    return [f"iteration {number}: {line}" for number, line in lines if line][-MAX_LISTED:]


def _cards(facts: ReportFacts) -> list[Card]:
    """Return the key numbers: accuracy before and after, then the costs of the run."""
    before, after = facts.before, facts.after
    cards: list[Card] = []
    if not before:
        cards.append(Card("Held-out accuracy", "not evaluated"))
    else:
        error = facts.rise_error or 0.0
        note = f"\u00b1 {100 * error:.1f} (1 standard error)" if error else ""
        title = "Held-out accuracy, mean over samples"
        old, new = before["accuracy"], after.get("accuracy")
        cards.append(_score_card(title, old, new, note, noise=error))
    if "greedy" in before:
        old, new = before["greedy"], after.get("greedy")
        cards.append(_score_card("Greedy accuracy", old, new, "one response per prompt"))
    passes = [name for name in before.keys() & after.keys() if name.startswith("pass@")]
    if passes:
        name = max(passes, key=lambda name: (len(name), name))
        old, new = before[name], after[name]
        cards.append(_score_card(name, old, new, "prompts solved at least once"))
    if facts.best is not None and len(facts.best.evaluated) > 2:
        note = f"avg@n {percent(facts.best.accuracy, decimals=1)}, of {len(facts.best.evaluated)}"
        cards.append(Card("Best policy", f"{facts.best.policy_version}", f"{note} evaluated"))
    if facts.control:
        note = f"greedy {percent(facts.control['greedy'], decimals=1)}; from the same start"
        value = percent(facts.control["accuracy"], decimals=1)
        cards.append(Card("After as long a supervised training instead", value, note))
    last = f"the last is number {facts.iterations[-1]}" if facts.iterations else "none finished"
    cards.append(Card("Iterations", f"{len(facts.updates)}", last))
    if facts.seconds:
        busy = f"{seconds(facts.busy_seconds)} of it inside stages"
        cards.append(Card("Total time", seconds(facts.seconds), busy))
    else:
        cards.append(Card("Total time", "unknown"))
    if facts.num_tokens is not None:
        count = number(facts.num_tokens)
        cards.append(Card("Tokens generated", count, "in the rollouts of all iterations"))
        # Shards sample in parallel: the slowest one decides the time of an iteration.
        spent = sum(facts.series("rollout/sample_seconds", combine=max).values())
        if spent > 0:
            rate = f"{number(facts.num_tokens / spent)} / s"
            cards.append(Card("Sampling speed", rate, "tokens, all shards together"))
    return cards


def _score_card(
    title: str, before: float, after: float | None, note: str, *, noise: float = 0.0
) -> Card:
    old = percent(before, decimals=1)
    if after is None:
        return Card(title, old, "starting policy only", is_big=True)
    change = change_of(before, after, noise=noise)
    return Card(title, percent(after, decimals=1), note, old, change, is_big=True)


def _evaluation_lead(facts: ReportFacts) -> str:
    if not facts.evaluations:
        return ""
    scalars = facts.after or facts.before
    prompts = number(scalars["num_prompts"]) if "num_prompts" in scalars else "The"
    samples = f", {number(scalars['num_samples'])} samples each" if "num_samples" in scalars else ""
    return (
        f"{prompts} held-out prompts{samples}; none of them was trained on. The error is that of "
        "sampling with the prompts held fixed; the interval is that of drawing other prompts."
    )


def _state(facts: ReportFacts) -> str:
    if facts.is_stopped and facts.is_success:
        return "Stopped by an operator"
    return ENDED if facts.final_state in CANCELLED else facts.final_state.capitalize()


def _failure(facts: ReportFacts, failed_task: str, error_message: str) -> dict[str, Any] | None:
    """Return the most important facts of a failure; None if nothing has failed."""
    is_well = facts.is_success or facts.is_running
    if is_well or not (facts.final_state in FAILURES or facts.failed):
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
    label = one_line(failed_task)
    if error_message.strip() or not tasks:
        message = visible(error_message.strip()) or "no message"
        tasks.append((f"{label or 'scheduler'} (scheduler)", message))
    name = facts.failed[0].name if facts.failed else label or "unknown"
    what = "was ended by a person" if facts.final_state in CANCELLED else "failed"
    return {
        "title": f"The run {what} in stage {name}",
        "tasks": tasks,
        "rows": [
            ("last good policy", last_pin(facts.policies) or "none: no policy was finished"),
            ("last good state", last_pin(facts.states) or "none: no train state was finished"),
        ],
        "resume": resume_command(facts),
    }


def resume_command(facts: ReportFacts) -> str:
    """Return the command that resumes the run; two if it may run on a cluster or on one machine."""
    preset = facts.run.get("preset")
    root = shlex.quote(facts.root)
    local = f"planish run --root {root}" + (f" --preset {shlex.quote(preset)}" if preset else "")
    if facts.root.startswith("file://"):
        return local
    cluster = f"planish submit {root}" + (
        f" -p {shlex.quote(f'preset={preset}')}" if preset else ""
    )
    return f"{cluster}  # on a cluster\n{local}  # on one machine"
