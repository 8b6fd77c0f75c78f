"""What a reshard run is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from planish.base.errors import ConfigError
from planish.checkpoint.convert.layouts import Layout
from planish.checkpoint.load.reader import split_place

SECTION = "reshard"
CHECKPOINT_SCHEMA = "checkpoint/1"
"""Schema of a Ref whose digest is that of a checkpoint's metadata."""


@dataclass(frozen=True)
class ReshardJob:
    """One state to write anew, and how.

    Example:
        >>> pin = f"file:///r/states/step-7#sha256={'0' * 64}"
        >>> ReshardJob.of(pin, "", "tp=2", root="file:///r/reshard").target
        'file:///r/reshard/tp-2'
    """

    source_pin: str
    target: str
    layout: str
    parts: Literal["all", "model"] = "all"
    """`model` leaves out optimizers, small values and loader positions."""
    role: str = ""
    """Which of several; empty for all."""
    policy_pin: str = ""
    """Policy that gives configuration, tokenizer and types of a merged result."""

    @classmethod
    def of(
        cls,
        source_pin: str,
        target: str,
        layout: str,
        *,
        root: str,
        parts: str = "all",
        role: str = "",
        policy_pin: str = "",
    ) -> ReshardJob:
        """Check and complete what a person asked for; a ConfigError has every fault.

        An empty `target` is a folder below `root`; `policy_pin` is needed for the layout `merged`
        and for nothing else.
        """
        parsed = Layout.parse(layout)
        name = str(parsed).replace("=", "-").replace(",", "-")
        place = target.rstrip("/") or f"{root}/{name}"
        faults = []
        if parts not in ("all", "model"):
            faults.append(f"`parts` must be `all` or `model`, got {parts!r}")
        if parsed.is_merged and not policy_pin:
            faults.append(
                "`policy` must name a policy of the same model for a merged result, got none; its "
                "configuration and tokenizer are copied"
            )
        if not parsed.is_merged and policy_pin:
            faults.append(f"`policy` must be empty for the layout {str(parsed)!r}")
        if place == split_place(source_pin)[0]:
            faults.append(f"`target` must not be the place of the source, got {place!r}")
        if "://" not in place:
            faults.append(f"`target` must be a URI like s3://bucket/prefix, got {target!r}")
        if faults:
            raise ConfigError("; ".join(faults))
        kept = cast("Literal['all', 'model']", parts)
        return cls(source_pin, place, str(parsed), kept, role, policy_pin)

    @property
    def parsed(self) -> Layout:
        """The layout."""
        return Layout.parse(self.layout)


def facts_page(title: str, facts: Mapping[str, str]) -> str:
    """Return a page in Markdown with a table of facts by name."""
    lines = [f"| {name} | {value.replace('|', ' ')} |" for name, value in facts.items()]
    return "\n".join([f"# {title}", "", "| | |", "| --- | --- |", *lines, ""])
