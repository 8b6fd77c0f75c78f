"""Events of a run beside its records: failed attempts and gangs.

The report draws them. No digest includes an event, and no failure to write one stops the work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from planish.base.errors import PlanishError
from planish.records import layout
from planish.store.documents import read_json, write_json

logger = logging.getLogger(__name__)


def record_event(
    root: str, kind: str, iteration: int, *, begin_seconds: float = 0.0, **facts: Any
) -> None:
    """Write an event under the root of a run; an event with the same start replaces the first.

    `kind` is `attempt` or `gang`; `iteration` is 0 outside iterations; a start of 0
    means now.
    """
    begin = begin_seconds or time.time()
    uri = layout.event(root, f"{begin:017.6f}-{kind}")
    write_aside(uri, {"kind": kind, "iteration": iteration, "begin_seconds": begin, **facts})


def write_aside(uri: str, document: Mapping[str, Any]) -> None:
    """Write a document that the work does not need; log a failure instead of raising."""
    try:
        write_json(uri, document)
    except (PlanishError, OSError) as error:
        logger.warning("not written uri=%s error=%s", uri, error)


def record_earlier_attempt(root: str, uri: str, now: float) -> None:
    """Record an unsuccessful attempt before the next one, started at `now`, replaces its log entry.

    `uri` is the log entry. A successful attempt is no event.
    """
    try:
        earlier = read_json(uri)
        if earlier["state"] not in ("running", "failed"):
            return
        begin = float(earlier["start_seconds"])
        # A killed attempt has no end in its entry: it ended before the next one started.
        end = begin + earlier["seconds"] if earlier["state"] == "failed" else now
        iteration = earlier["iteration"]
    except (PlanishError, OSError, KeyError, TypeError, ValueError):
        return  # Another release may have written the entry.
    facts = {name: earlier.get(name) for name in ("stage", "shard", "error", "exit_code")}
    record_event(root, "attempt", iteration, begin_seconds=begin, end_seconds=end, **facts)
