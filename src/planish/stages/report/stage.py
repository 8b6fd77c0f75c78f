"""The report stage: gather, draw, write. It runs after success and after failure."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from planish import store
from planish.base.errors import PlanishError, RootInUse
from planish.records import layout
from planish.run.kubeflow import CANCELLED, KfpRuns
from planish.run.lock import current_holder, refuse_stranger
from planish.run.stage import Artifact, Context, Outcome, execute
from planish.stages.next_run.restart import FAILED, restart
from planish.stages.report.facts import ACCURACY_ERROR, RUNNING, ReportFacts, last_pin
from planish.stages.report.gather import gather
from planish.stages.report.page import build_page
from planish.stages.report.render import render_html, render_markdown
from planish.stages.report.webhook import post

logger = logging.getLogger(__name__)

WEBHOOK = "PLANISH_WEBHOOK"
"""Environment variable with the URL, a credential: no parameter, log or page contains it."""


def run(
    root: str,
    state: str,
    failed_task: str,
    error_message: str,
    max_restarts: int,
    report: Artifact,
    summary: Artifact,
) -> None:
    """Report on a run from the records under its root; `components/report.py` has the parameters.

    The environment variable `PLANISH_WEBHOOK` is the http(s) URL to which the summary is posted.
    """

    def work(context: Context) -> Outcome:
        try:
            # The root may belong to another run, whose lock refused this one.
            refuse_stranger(context.root, current_holder())
        except RootInUse:
            raise
        except PlanishError as error:
            # If nothing can be read, nothing can be overwritten; the page lists what is missing.
            logger.warning("lock not read root=%s error=%s", context.root, error)
        try:
            decision = restart(context.root, state, max_restarts)
        except Exception as error:
            # The report is the last output of a run: a failed restart must not prevent it.
            logger.warning("not restarted", exc_info=True)
            decision = f"not restarted: {type(error).__name__}: {error}"
        facts = gather(context.root, final_state(state))
        facts.restart = decision
        return write_report(facts, failed_task=failed_task, error_message=error_message)

    outputs = {"report": report, "summary": summary}
    execute("report", work, root=root, config_sha256=None, outputs=outputs)


def final_state(state: str) -> str:
    """Return the state of the run; Kubeflow passes `FAILED` even if a person has ended it."""
    run_id = os.environ.get("RUN_ID", "")
    if state.upper() not in FAILED or not run_id:
        return state
    try:
        found = KfpRuns().facts(run_id).state
    except Exception as error:
        # Outside Kubeflow there is no such API, and no failure here may prevent the report.
        logger.warning("state of the run not asked for error=%s", type(error).__name__)
        return state
    return found if found in CANCELLED else state


def write_report(facts: ReportFacts, *, failed_task: str, error_message: str) -> Outcome:
    """Draw the page, write it under the root and send the summary to the webhook."""
    page = build_page(facts, failed_task=failed_task, error_message=error_message)
    html, markdown, summary = render_html(page), render_markdown(page), as_summary(facts)
    failure = facts.failure
    try:
        if failure is None:
            _write(facts.root, html, markdown, summary)
    except PlanishError as error:
        # The error is raised only after the artifacts are written: they help people.
        failure = error
    place = f"{layout.report(facts.root)}/report.html"
    post(os.environ.get(WEBHOOK, ""), {**summary, "report": place})
    documents = {"report": html, "summary": markdown}
    return Outcome(documents=documents, metrics=as_metrics(summary), failure=failure)


def _write(root: str, html: str, markdown: str, summary: Mapping[str, Any]) -> None:
    text = json.dumps(summary, sort_keys=True, indent=1, allow_nan=False)
    files = {"report.html": html, "report.md": markdown, "summary.json": text}
    for name, content in files.items():
        store.write(f"{layout.report(root)}/{name}", content.encode())


def write_running(root: str, iteration: int) -> None:
    """Draw the page of a run that goes on, without a summary, after an iteration.

    Each page reads all iterations. From the fortieth on, ever fewer iterations have one.
    """
    if iteration % max(1, iteration // 20) == 0:
        page = build_page(gather(root, RUNNING), failed_task="", error_message="")
        store.write(f"{layout.report(root)}/report.html", render_html(page).encode())


def add_control(root: str, state: str, control: Mapping[str, float]) -> None:
    """Write the control's scores under a root, and draw the report of that run with them."""
    store.write(layout.control(root), json.dumps(control, sort_keys=True).encode())
    facts = gather(root, state)
    page = build_page(facts, failed_task="", error_message="")
    _write(root, render_html(page), render_markdown(page), as_summary(facts))


def as_summary(facts: ReportFacts) -> dict[str, Any]:
    """Return the machine-readable summary: plain JSON, None where unknown."""
    before, after = facts.before, facts.after
    divergences = [abs(value) for value in facts.series("update/mismatch_k3").values()]
    return {
        "root": facts.root,
        "state": facts.final_state,
        "accuracy_before": before.get("accuracy"),
        "accuracy_before_standard_error": before.get(ACCURACY_ERROR),
        "accuracy_after": after.get("accuracy"),
        "accuracy_after_standard_error": after.get(ACCURACY_ERROR),
        "greedy_before": before.get("greedy"),
        "greedy_after": after.get("greedy"),
        "evaluation_sets": {
            name: {
                f"accuracy_{when}": own[version].scalars["accuracy"]
                for when, version in (("before", min(own)), ("after", max(own)))
            }
            for name, own in facts.sets.items()
        },
        "control": facts.control or None,
        "iterations": len(facts.updates),
        "mismatch_k3_max": max(divergences, default=None),
        "seconds": facts.seconds,
        "busy_seconds": facts.busy_seconds,
        "seconds_by_stage": facts.stage_seconds,
        "num_tokens": facts.num_tokens,
        "failed_tasks": [{"task": task.name, "error": task.error} for task in facts.failed],
        "best_policy": facts.best.pin if facts.best else None,
        "last_policy": last_pin(facts.policies),
        "last_state": last_pin(facts.states),
        "num_alerts": len(facts.alerts),
        "missing": facts.missing,
    }


def as_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the known scalars of a summary for the metrics artifact."""
    metrics = {key: float(x) for key, x in summary.items() if isinstance(x, (int, float))}
    return {**metrics, "num_failed_tasks": float(len(summary["failed_tasks"]))}
