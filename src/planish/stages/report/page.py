"""What stands where on the page: header, cards, failure; plain texts for the templates."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from planish.stages.report import tables
from planish.stages.report.facts import Alert, RunFacts, Sample, Task
from planish.stages.report.figures.charts import Chart, Mark
from planish.stages.report.figures.panels import all_charts
from planish.stages.report.keys import Keys
from planish.stages.report.tables import Change, Table, change_of
from planish.stages.report.words import number, one_line, percent, seconds, visible

FAILURES = {"FAILED", "ERROR", "CANCELLED", "CANCELED", "TERMINATED"}
"""Final states after which something has to be mended."""
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
    change: Change | None = None
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
    charts: list[Chart] = field(default_factory=list)
    """Curves."""
    scores: list[Table] = field(default_factory=list)
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


def build_page(facts: RunFacts, keys: Keys, *, failed_task: str, error_message: str) -> Page:
    """Turn facts into what the templates print."""
    failure = _failure(facts, keys, failed_task, error_message)
    tone = "good" if keys.is_success else "bad" if failure else "warn"
    saved, more = tables.saved_rows(facts)
    config = tables.config_tables(facts.config)
    return Page(
        name=one_line(facts.name, limit=80),
        root=facts.root,
        state=_state_words(keys, facts),
        tone=tone,
        facts=_header_facts(facts),
        cards=_cards(facts, keys),
        failure=failure,
        charts=all_charts(facts, *_marks(facts, keys)),
        scores=tables.score_tables(facts.evaluations),
        evaluation_lead=_evaluation_lead(facts),
        alerts=_alerts(facts),
        avoided=_avoided(facts),
        restart=one_line(facts.restart, limit=300),
        comparisons=[_comparison(item.title, item.columns) for item in facts.comparisons],
        funnel=tables.funnel(facts.curation),
        curation=facts.curation,
        saved=saved,
        saved_more=more,
        config=config,
        num_settings=sum(len(rows) for _, rows in config),
        missing=_shorten([one_line(item) for item in facts.missing]),
        began=_utc(min((t.start_seconds for t in facts.tasks if t.start_seconds), default=0.0)),
    )


def _shorten(items: Sequence[str]) -> list[str]:
    if len(items) <= MAX_LISTED:
        return list(items)
    return [*items[:MAX_LISTED], f"and {len(items) - MAX_LISTED} more"]


def _utc(second: float) -> str:
    try:
        return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d %H:%M:%S} UTC" if second else ""
    except (OverflowError, ValueError, OSError):
        return ""


def _state_words(keys: Keys, facts: RunFacts) -> str:
    if facts.is_stopped and keys.is_success:
        return "Stopped by an operator"
    return keys.state.capitalize()


def _header_facts(facts: RunFacts) -> list[tuple[str, str]]:
    algorithm = facts.config.get("algorithm", {}).get("name")
    found = [
        ("preset", facts.run.get("preset")),
        ("algorithm", algorithm),
        ("seed", facts.config.get("run", {}).get("seed")),
        ("code", facts.run.get("code_version")),
        ("configuration", str(facts.run.get("config_sha256", ""))[:12]),
    ]
    return [
        (label, one_line(str(value), limit=60)) for label, value in found if value not in (None, "")
    ]


def _cards(facts: RunFacts, keys: Keys) -> list[Card]:
    cards = [_accuracy_card(keys), _greedy_card(keys), _pass_card(facts)]
    busy = f"{seconds(keys.busy_seconds)} of it inside stages" if keys.seconds else ""
    cards += [
        Card("Iterations", f"{keys.iterations}", _last_iteration(facts)),
        Card("Total time", seconds(keys.seconds) if keys.seconds else "unknown", busy),
        *_token_cards(facts, keys),
    ]
    return [card for card in cards if card is not None]


def _accuracy_card(keys: Keys) -> Card:
    title = "Held-out accuracy, mean over samples"
    before, after = keys.before, keys.after
    if before is None or before.accuracy is None:
        return Card("Held-out accuracy", "not evaluated")
    if after is None or after.accuracy is None:
        return Card(title, percent(before.accuracy), "starting policy only", is_big=True)
    note = f"\u00b1 {_points(keys.gain_error)} (1 standard error)" if keys.gain_error else ""
    return Card(
        title,
        percent_1(after.accuracy),
        note,
        before=percent_1(before.accuracy),
        change=change_of(before.accuracy, after.accuracy, noise=keys.gain_error or 0.0),
        is_big=True,
    )


def percent_1(value: float) -> str:
    """Write a fraction as per cent with one decimal: 0.2784 -> `27.8 %`."""
    return f"{100 * value:.1f} %"


def _points(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:.1f}"


def _greedy_card(keys: Keys) -> Card | None:
    before, after = keys.before, keys.after
    if before is None or before.greedy is None:
        return None
    if after is None or after.greedy is None:
        return Card("Greedy accuracy", percent_1(before.greedy), "starting policy", is_big=True)
    return Card(
        "Greedy accuracy",
        percent_1(after.greedy),
        "one response per prompt",
        before=percent_1(before.greedy),
        change=change_of(before.greedy, after.greedy),
        is_big=True,
    )


def _pass_card(facts: RunFacts) -> Card | None:
    if len(facts.evaluations) < 2:
        return None
    before, after = facts.evaluations[0].scalars, facts.evaluations[-1].scalars
    names = sorted(
        (name for name in before.keys() & after.keys() if name.startswith("pass@")),
        key=lambda name: (len(name), name),
    )
    if not names:
        return None
    name = names[-1]
    return Card(
        name,
        percent_1(after[name]),
        "prompts solved at least once",
        before=percent_1(before[name]),
        change=change_of(before[name], after[name]),
        is_big=True,
    )


def _last_iteration(facts: RunFacts) -> str:
    return f"the last is number {facts.iterations[-1]}" if facts.iterations else "none finished"


def _token_cards(facts: RunFacts, keys: Keys) -> list[Card]:
    if keys.num_tokens is None:
        return []
    cards = [Card("Tokens generated", number(keys.num_tokens), "in the rollouts of all iterations")]
    # Shards sample side by side: of one iteration the slowest counts.
    spent = sum(facts.per_iteration("rollout", "sample_seconds", max).values())
    if spent > 0:
        rate = f"{number(keys.num_tokens / spent)} / s"
        cards.append(Card("Sampling speed", rate, "tokens, all shards together"))
    return cards


def _marks(facts: RunFacts, keys: Keys) -> tuple[Mark | None, Mark | None]:
    before, after = keys.before, keys.after
    last = facts.iterations[-1] if facts.iterations else 0
    first = facts.iterations[0] - 1 if facts.iterations else 0
    marks: list[Mark | None] = [None, None]
    if before is not None and before.accuracy is not None:
        marks[0] = Mark("held-out, before", "orange", first, before.accuracy, before.error or 0.0)
    if after is not None and after.accuracy is not None:
        marks[1] = Mark("held-out, after", "orange", last, after.accuracy, after.error or 0.0)
    return marks[0], marks[1]


def _evaluation_lead(facts: RunFacts) -> str:
    if not facts.evaluations:
        return ""
    scalars = facts.evaluations[-1].scalars
    prompts = number(scalars["num_prompts"]) if "num_prompts" in scalars else "The"
    samples = f", {number(scalars['num_samples'])} samples each" if "num_samples" in scalars else ""
    return (
        f"{prompts} held-out prompts{samples}; none of them was trained on. The error is that of "
        "sampling with the prompts held fixed; the interval is that of drawing other prompts."
    )


def _alerts(facts: RunFacts) -> list[dict[str, str]]:
    return [
        {
            "machine": one_line(alert.machine, limit=80),
            "metric": one_line(alert.metric or alert.kind, limit=80),
            "where": _where(alert),
            "score": number(alert.score),
            "begin": _utc(alert.first_second),
            "end": _utc(alert.last_second) if alert.state in ("", "resolved") else "not over",
            "action": one_line(alert.action, limit=200) or "none",
        }
        for alert in facts.alerts[:MAX_LISTED]
    ]


def _avoided(facts: RunFacts) -> list[dict[str, str]]:
    return [
        {
            "name": one_line(node.name, limit=80),
            "named_by": one_line(node.named_by, limit=40),
            "where": _number_words(node.iteration),
            "run_id": one_line(node.run_id, limit=80),
            "at": _utc(node.seconds),
        }
        for node in facts.avoided[:MAX_LISTED]
    ]


def _number_words(iteration: int) -> str:
    return f"iteration {iteration}" if iteration else ""


def _where(alert: Alert) -> str:
    """Return what the run did on the machine."""
    stage = one_line(alert.stage, limit=40)
    return f"{stage} of iteration {alert.iteration}" if stage and alert.iteration else stage


def _comparison(title: str, columns: Sequence[tuple[str, Sequence[Sample]]]) -> dict[str, Any]:
    prompts: dict[str, dict[str, Any]] = {}
    shown = []
    for heading, samples in columns:
        for sample in samples:
            is_short = len(sample.prompt) <= 80 and "\n" not in sample.prompt
            block = {"prompt": visible(sample.prompt), "answer": one_line(sample.answer)}
            prompts.setdefault(sample.prompt_id, {**block, "is_short": is_short})
        shown.append((heading, [_visible_sample(sample) for sample in samples]))
    return {"title": title, "prompts": list(prompts.values()), "columns": shown}


def _visible_sample(sample: Sample) -> dict[str, Any]:
    return {
        "is_correct": sample.is_correct,
        "num_tokens": sample.num_tokens,
        "extracted": one_line(sample.extracted, limit=80),
        "response": visible(sample.response),
    }


def _failure(facts: RunFacts, keys: Keys, failed_task: str, error_message: str) -> Failure | None:
    if keys.is_success or not (keys.state in FAILURES or keys.failed):
        return None
    tasks = [(one_line(task.name), _error_words(task)) for task in keys.failed[:8]]
    if error_message.strip() or not tasks:
        label = one_line(failed_task) or "scheduler"
        tasks.append((f"{label} (scheduler)", visible(error_message.strip()) or "no message"))
    named = keys.failed[0].name if keys.failed else one_line(failed_task) or "unknown"
    policy, state = keys.last_policy, keys.last_state
    rows = [
        ("last good policy", policy.pin if policy else "none: no policy was finished"),
        ("last good state", state.pin if state else "none: no train state was finished"),
    ]
    return Failure(f"The run failed in stage {named}", tasks, rows, resume_command(facts))


def _error_words(task: Task) -> str:
    if task.error:
        return visible(task.error)
    return f"cut off after {seconds(task.seconds)} without a message (killed, evicted or timed out)"


def resume_command(facts: RunFacts) -> str:
    """Return the command that goes on where the run ended; two when it may run in two places."""
    preset = facts.run.get("preset")
    has_preset = isinstance(preset, str) and preset
    root = shlex.quote(facts.root)
    local = f"python -m pipelines.local --root {root}"
    local += f" --preset {shlex.quote(str(preset))}" if has_preset else ""
    if facts.root.startswith("file://"):
        return local
    cluster = f"python -m pipelines.submit run {root}"
    cluster += f" -p {shlex.quote(f'preset={preset}')}" if has_preset else ""
    return f"{cluster}  # on a cluster\n{local}  # on one machine"
