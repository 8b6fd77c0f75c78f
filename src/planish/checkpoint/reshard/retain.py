"""Retention of a folder's checkpoints, and removal of leftovers of crashes."""

from __future__ import annotations

from planish.checkpoint.commit.catalog import CatalogVerdict, gc, retain
from planish.checkpoint.reshard.job import Page
from planish.store import open_store

GRACE_SECONDS = 86400.0
"""Leftovers that were written to within a day stay: their save may still go on."""
_MAX_LISTED = 200


def apply_retention(folder: str, keep_last: int, keep_every: int) -> Page:
    """Remove checkpoints below a folder that no rule keeps; do nothing without folder or rule."""
    if not folder or keep_last == 0:
        page = "# Retention\n\nNothing was removed: it was not asked for.\n"
        return Page(page, {"kept": 0.0, "deleted": 0.0})
    storage, key = open_store(folder)
    verdicts = retain(storage, key, keep_last=keep_last, keep_every=keep_every)
    leftovers = gc(storage, key, grace_s=GRACE_SECONDS)
    gone = [verdict for verdict in leftovers if verdict.action == "delete"]
    deleted = sum(verdict.action == "delete" for verdict in verdicts)
    metrics = {
        "kept": float(len(verdicts) - deleted),
        "deleted": float(deleted),
        "leftovers_cleared": float(len(gone)),
    }
    return Page(_summary(folder, [*verdicts, *gone]), metrics)


def _summary(folder: str, verdicts: list[CatalogVerdict]) -> str:
    rows = [
        f"| {verdict.action} | `{verdict.key}` | {verdict.reason.replace('|', ' ')} |"
        for verdict in verdicts[:_MAX_LISTED]
    ]
    more = len(verdicts) - len(rows)
    rows += [f"| | and {more} more | |"] if more else []
    head = ["# Retention", "", f"Below `{folder}`.", "", "| | what | why |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows, ""])
