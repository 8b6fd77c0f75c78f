"""Job of a reshard, checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from planish.base.errors import CheckpointIncomplete, CheckpointNotFound, ConfigError
from planish.base.text import bytes_text
from planish.checkpoint.convert.export_hf import policy_role
from planish.checkpoint.convert.layouts import Layout
from planish.checkpoint.loading.reader import Opened, check_objects, open_state, split_place
from planish.checkpoint.train_state import checkpoint_place
from planish.records.io import read_manifest
from planish.records.refs import parse_pin

SECTION = "reshard"
CHECKPOINT_SCHEMA = "checkpoint/1"
"""Schema of a Ref whose digest is that of a checkpoint's metadata."""


@dataclass(frozen=True)
class ReshardJob:
    """A state to rewrite, its target and its layout.

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
    """Role to keep; empty for all."""
    policy_pin: str = ""
    """Policy whose configuration, tokenizer and types a merged result gets."""

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
        """Check and complete a user's arguments; one ConfigError lists all faults.

        An empty `target` becomes a folder below `root`. The layout `merged` needs a `policy_pin`;
        other layouts refuse it.
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
    def source(self) -> str:
        """URI of the state."""
        return split_place(self.source_pin)[0]

    @property
    def parsed(self) -> Layout:
        """The layout."""
        return Layout.parse(self.layout)


def agree(
    root: str, opened: Opened, target_layout: str, target: str, parts: str, role: str, policy: str
) -> ReshardJob:
    """Return the job, with pins; raises ConfigError if the arguments do not fit the source."""
    policy_pin = ""
    if policy:
        # This read of the manifest fails if the policy does not exist.
        uri, sha256 = parse_pin(policy) if "#" in policy else (policy.rstrip("/"), None)
        policy_pin = read_manifest(uri, sha256=sha256).ref(uri).pin()
    job = ReshardJob.of(
        opened.pin, target, target_layout, root=root, policy_pin=policy_pin, parts=parts, role=role
    )
    roles = opened.roles
    if job.parsed.is_merged:
        policy_role(roles, role)
    elif role and role not in roles:
        raise ConfigError(f"`role` must be one of {roles} of the source, got {role!r}")
    return job


def open_whole(source: str) -> Opened:
    """Open a checkpoint that has all of its objects; else ConfigError, CheckpointIncomplete."""
    try:
        opened = open_state(checkpoint_place(source))
    except CheckpointNotFound as error:
        raise ConfigError(f"`source` must be a committed checkpoint: {error}") from None
    faults = check_objects(opened)
    if faults:
        raise CheckpointIncomplete(
            f"`{opened.uri}` must be whole before it is resharded: {'; '.join(faults[:8])}; "
            "choose an earlier checkpoint"
        )
    return opened


class Page(NamedTuple):
    """Report of a step: a page in Markdown, and metrics."""

    page: str
    metrics: dict[str, float]


def facts_page(title: str, facts: Mapping[str, str]) -> str:
    """Return a page in Markdown with a table of facts by name."""
    lines = [f"| {name} | {value.replace('|', ' ')} |" for name, value in facts.items()]
    return "\n".join([f"# {title}", "", "| | |", "| --- | --- |", *lines, ""])


def source_page(job: ReshardJob, opened: Opened) -> str:
    """Return a page about the source and the result to write."""
    ranks = job.parsed.num_ranks
    how = "one Hugging Face folder" if job.parsed.is_merged else f"{ranks} rank(s)"
    saved = str(opened.metadata.header.get("layout", "")) or "unknown"
    facts = {
        "source": f"`{job.source}`",
        "step": str(opened.commit.step),
        "size": f"{bytes_text(opened.commit.total_bytes)}, {opened.commit.n_objects} objects",
        "saved as": f"`{saved[:60]}`",
        "becomes": f"`{job.layout}`, {how}",
        "parts": f"{job.parts}, {job.role or 'every role'}",
        "target": f"`{job.target}`",
    }
    return facts_page("Reshard", facts)
