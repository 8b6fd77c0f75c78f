"""The report stage: gather, draw, write. It runs after success and after failure."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping

from planish.base.errors import PlanishError, RootInUse
from planish.records import layout
from planish.run.lock import current_holder, refuse_stranger
from planish.run.runs import connect
from planish.run.stage import Artifact, Context, Outcome, execute
from planish.stages.report.gather import gather
from planish.stages.report.keys import as_metrics, as_summary, key_numbers
from planish.stages.report.page import build_page
from planish.stages.report.render import render_html, render_markdown
from planish.stages.report.restart import Restarted, restart
from planish.stages.report.webhook import post
from planish.store import open_store

logger = logging.getLogger(__name__)

WEBHOOK = "PLANISH_WEBHOOK"
"""Environment variable with the URL, which is a credential: no parameter, log or page holds it."""


def run(
    root: str,
    state: str,
    failed_task: str,
    error_message: str,
    max_restarts: int,
    report: Artifact,
    summary: Artifact,
    metrics: Artifact,
) -> None:
    """Report on a run from what lies under its root.

    The webhook that hears of it, an http(s) URL, is the environment variable `PLANISH_WEBHOOK`.

    Args:
        root: URI of the run.
        state: final state of the run, e.g. `SUCCEEDED` or `FAILED`.
        failed_task: what the scheduler names as failed; the stage logs know it better.
        error_message: what the scheduler says about it.
        max_restarts: how often on this root a failed run in which a machine was named is started
            again; 0 for never.
        report: gets the HTML page.
        summary: gets the Markdown summary.
        metrics: gets the key numbers.
    """

    def work(context: Context) -> Outcome:
        _refuse_stranger(context.root)
        restarted = _restart(context.root, state, max_restarts)
        return _work(context, state, failed_task, error_message, restarted)

    execute(
        "report",
        work,
        root=root,
        config_sha256=None,
        outputs={"report": report, "summary": summary, "metrics": metrics},
    )


def _refuse_stranger(root: str) -> None:
    """End where what lies under the root is that of another run, which has refused this one."""
    try:
        refuse_stranger(root, current_holder())
    except RootInUse:
        raise
    except PlanishError as error:
        # Where nothing can be read nothing can be overwritten, and the page says what is missing.
        logger.warning("lock not read root=%s error=%s", root, error)


def _restart(root: str, state: str, max_restarts: int) -> Restarted | None:
    try:
        return restart(root, state, max_restarts, connect)
    except Exception as error:
        # The report is the last word of a run: a restart that fails is told in it.
        logger.warning("not restarted", exc_info=True)
        return Restarted(f"not restarted: {type(error).__name__}: {error}")


def _work(
    context: Context,
    state: str,
    failed_task: str,
    error_message: str,
    restarted: Restarted | None,
) -> Outcome:
    facts = gather(context.root)
    facts.restart = restarted.words if restarted else ""
    keys = key_numbers(facts, state)
    page = build_page(facts, keys, failed_task=failed_task, error_message=error_message)
    html = render_html(page)
    markdown = render_markdown(page)
    numbers = as_summary(facts, keys)
    text = json.dumps(numbers, sort_keys=True, indent=1, allow_nan=False)
    folder = layout.report(context.root)
    files = {"report.html": html, "report.md": markdown, "summary.json": text}
    failure = facts.failure or _store(folder, files)
    post(os.environ.get(WEBHOOK, ""), {**numbers, "report": f"{folder}/report.html"})
    return Outcome(
        documents={"report": html, "summary": markdown},
        metrics=as_metrics(numbers),
        failure=failure,
    )


def _store(folder: str, files: Mapping[str, str]) -> PlanishError | None:
    """Write files below a folder of the run; returns why one could not be written."""
    try:
        for name, text in files.items():
            open_store(folder).write(f"{folder}/{name}", text.encode())
    except PlanishError as error:
        return error
    return None
