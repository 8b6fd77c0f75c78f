"""Settings of a run in the JSON of the run parameter `chain`, which programs write."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from planish.base.config import Section, check_limits, parse_section
from planish.base.errors import ConfigError

FIRST_UNFINISHED = -1
"""Place in a chain that stands for the last run if it is unfinished, else for the next run."""


class Chain(Section):
    """Place of a run in a chain of runs on one root, and its start."""

    index: int = Field(default=0, ge=FIRST_UNFINISHED, lt=2**31)
    """0, 1, ...; -1 for the first unfinished place."""
    runs: int = Field(default=1, ge=1, lt=2**31)
    """Number of runs in the chain; the last task of a run submits the next run up to this
    number."""
    resume_from: str = ""
    """Root of another run whose newest policy and state start this run, or the pin of an earlier
    policy or state; empty for none."""
    allow_config_change: bool = False
    """Go on although the root has another configuration."""
    assume_autoscaling: bool = False
    """Only warn if no current node is large enough."""


def parse_chain(text: str) -> Chain:
    """Read the run parameter; empty text is a single new run."""
    return parse_section(Chain, _table(text), section="chain")


def with_settings(text: str, **settings: Any) -> str:
    """Return the run parameter with some settings replaced."""
    table = {**_table(text), **settings}
    parse_section(Chain, table, section="chain")
    return json.dumps(table, sort_keys=True)


def _table(text: str) -> dict[str, Any]:
    rule = '`chain` must be a JSON object like {"runs": 3}'
    try:
        table = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{rule}, got {text!r:.200} ({error})") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{rule}, got {text!r:.200}")
    check_limits(table, "chain")
    return table
