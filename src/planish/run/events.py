"""What happens to a run beside its records: attempts that failed, gangs, commits gone on from.

The report draws it. Nothing here is part of a digest, and no failure here stops the work.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from planish.base.errors import PlanishError
from planish.records import layout
from planish.store.documents import read_json, write_json

logger = logging.getLogger(__name__)


def record_event(
    root: str, kind: str, iteration: int, *, begin_seconds: float = 0.0, **facts: Any
) -> None:
    """Write an event under the root of a run; again with the same beginning it replaces the first.

    Args:
        root: URI of the run.
        kind: `attempt`, `gang` or `resumed`.
        iteration: 1, 2, ...; 0 outside iterations.
        begin_seconds: Unix time at which it began; 0 is now.
        facts: values of JSON that say more.
    """
    begin = begin_seconds or time.time()
    uri = layout.event(root, f"{begin:017.6f}-{kind}")
    event = {"kind": kind, "iteration": iteration, "begin_seconds": begin, **facts}
    try:
        write_json(uri, event)
    except (PlanishError, OSError) as error:
        logger.warning("event not written uri=%s error=%s", uri, error)


def record_earlier_attempt(root: str, uri: str, now: float) -> None:
    """Record the attempt at a task whose log entry is about to be overwritten, if it went wrong.

    Args:
        root: URI of the run.
        uri: of the entry.
        now: Unix time at which the next attempt began.
    """
    try:
        earlier = read_json(uri)
    except (PlanishError, OSError):
        return
    if not isinstance(earlier, dict) or earlier.get("state") not in ("running", "failed"):
        return
    begin, length = earlier.get("start_seconds"), earlier.get("seconds")
    if not isinstance(begin, float) or not isinstance(length, float):
        return
    # An attempt that was killed has told no end: it was over when the next one began.
    end = begin + length if earlier["state"] == "failed" else now
    facts = {name: earlier.get(name) for name in ("stage", "shard", "error", "exit_code")}
    iteration = earlier.get("iteration", 0)
    record_event(root, "attempt", iteration, begin_seconds=begin, end_seconds=end, **facts)
