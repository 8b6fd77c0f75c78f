"""Events of a run beside its records: failed attempts and gangs.

The report draws it. Nothing here is part of a digest, and no failure here stops the work.
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
    """Write what the work does not need: where the store refuses it, the log says so."""
    try:
        write_json(uri, document)
    except (PlanishError, OSError) as error:
        logger.warning("not written uri=%s error=%s", uri, error)


def record_earlier_attempt(root: str, uri: str, now: float) -> None:
    """Record an attempt before the next one, started at `now`, overwrites its log entry `uri`.

    A successful attempt is no event.
    """
    try:
        earlier = read_json(uri)
        if earlier["state"] not in ("running", "failed"):
            return
        begin = float(earlier["start_seconds"])
        # An attempt that was killed has told no end: it was over when the next one began.
        end = begin + earlier["seconds"] if earlier["state"] == "failed" else now
        iteration = earlier["iteration"]
    except (PlanishError, OSError, KeyError, TypeError, ValueError):
        return  # another release may have written it
    facts = {name: earlier.get(name) for name in ("stage", "shard", "error", "exit_code")}
    record_event(root, "attempt", iteration, begin_seconds=begin, end_seconds=end, **facts)
