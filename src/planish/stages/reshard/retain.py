"""Keep the newest checkpoints of a folder and clear up what crashes left, once a run has ended."""

from __future__ import annotations

from planish.checkpoint.commit.catalog import CatalogVerdict, gc, retain
from planish.run.stage import Artifact, Context, Outcome, execute
from planish.store import open_store

SUCCEEDED = "SUCCEEDED"
GRACE_SECONDS = 86400.0
"""Leftovers that were written to within a day stay: their save may still go on."""
_MAX_LISTED = 200


def run(
    root: str, state: str, folder: str, keep_last: int, keep_every: int, summary: Artifact
) -> None:
    """Remove the checkpoints below a folder that no rule keeps; after a failure remove none.

    `components/checkpoint_retain.py` says what the parameters are.
    """

    def work(_: Context) -> Outcome:
        return apply_retention(state, folder.rstrip("/"), keep_last, keep_every)

    outputs = {"summary": summary}
    execute("checkpoint_retain", work, root=root, config_sha256=None, outputs=outputs)


def apply_retention(state: str, folder: str, keep_last: int, keep_every: int) -> Outcome:
    """Do the work of `run`; see there."""
    reason = ""
    if not folder or keep_last == 0:
        reason = "retention is not asked for"
    elif state != SUCCEEDED:
        reason = f"the run ended as {state[:40]}"
    if reason:
        return Outcome(
            documents={"summary": f"# Retention\n\nNothing was removed: {reason}.\n"},
            metrics={"kept": 0.0, "deleted": 0.0},
        )
    storage, key = open_store(folder)
    verdicts = retain(storage, key, keep_last=keep_last, keep_every=keep_every)
    leftovers = gc(storage, key, grace_s=GRACE_SECONDS)
    gone = [verdict for verdict in leftovers if verdict.action == "delete"]
    deleted = sum(verdict.action == "delete" for verdict in verdicts)
    return Outcome(
        documents={"summary": _summary(folder, [*verdicts, *gone])},
        metrics={
            "kept": float(len(verdicts) - deleted),
            "deleted": float(deleted),
            "leftovers_cleared": float(len(gone)),
        },
    )


def _summary(folder: str, verdicts: list[CatalogVerdict]) -> str:
    rows = [
        f"| {verdict.action} | `{verdict.key}` | {verdict.reason.replace('|', ' ')} |"
        for verdict in verdicts[:_MAX_LISTED]
    ]
    more = len(verdicts) - len(rows)
    rows += [f"| | and {more} more | |"] if more else []
    head = ["# Retention", "", f"Below `{folder}`.", "", "| | what | why |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows, ""])
