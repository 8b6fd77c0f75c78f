"""The plan of a run in Markdown, written before anything expensive starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.base.text import code_span
from planish.stages.prepare.chain import Link
from planish.stages.prepare.run_file import RunFile


@dataclass(frozen=True)
class RunPlan:
    """Result of `prepare`."""

    root: str
    run: RunFile
    link: Link
    num_shards: int
    is_new: bool
    newest_version: int | None
    changed: Sequence[str] = field(default_factory=tuple)
    opened: Sequence[tuple[str, str]] = field(default_factory=tuple)
    """Facts of the opened data and model: (what, value in Markdown)."""
    warnings: Sequence[str] = field(default_factory=tuple)
    away_from: Sequence[str] = field(default_factory=tuple)
    retries: str = ""
    """Text on retries of failed pods, in Markdown; empty outside a cluster."""
    is_evaluated: bool = False
    """True if the policy of the last iteration has been evaluated."""
    is_followed: bool = False
    """True if the last task submits a further run of the chain."""

    @property
    def num_finished(self) -> int:
        """Iterations of this run that earlier attempts finished."""
        done = (self.newest_version or 0) - self.link.offset
        return max(0, min(done, self.link.num_iterations))

    @property
    def is_done(self) -> bool:
        """True if earlier attempts with the same settings have done the whole run."""
        finished = self.num_finished == self.link.num_iterations
        return finished and self.is_evaluated and not (self.is_followed or self.changed)


def _sizes(config: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    rollout, train, algorithm = config["rollout"], config["train"], config["algorithm"]
    prompts, group = rollout["prompts_per_iteration"], rollout["group_size"]
    steps = train["num_passes"] * -(-prompts * group // train["rollouts_per_minibatch"])
    rows = [
        ("algorithm", code_span(algorithm["name"])),
        ("batch", f"{prompts} prompts x {group} = {prompts * group} rollouts an iteration"),
        ("updates", f"{steps} optimizer step{'s' * (steps != 1)} an iteration"),
    ]
    if algorithm.get("kl_coefficient"):
        pinned = train.get("reference_policy")
        near = code_span(pinned) if pinned else "the policy that training began with"
        rows.append(("penalty", f"{algorithm['kl_coefficient']:g} x KL to {near}"))
    return rows


def render(plan: RunPlan) -> str:
    """Return the plan as Markdown."""
    link = plan.link
    kind = "new run" if plan.is_new else "goes on with a run that is here"
    if plan.is_done:
        kind = "done: every iteration is finished and evaluated, so no more pods start"
    if plan.run.resumed_from and plan.is_new:
        newest = "" if "#" in plan.run.resumed_from else "the newest policy of "
        kind = f"new run from {newest}`{plan.run.resumed_from}`"
    elif link.offset and not plan.num_finished:
        kind = f"run {link.index} of a chain"
    rows = [
        ("root", f"`{plan.root}`"),
        ("kind", kind),
        ("configuration", f"`{plan.run.sha256[:12]}`"),
        ("iterations", f"{link.offset + 1} to {link.last} ({plan.num_finished} already finished)"),
        ("starts from", f"`{plan.run.initial.policy or 'supervised cold start'}`"),
        *_sizes(plan.run.config),
        *plan.opened,
        ("rollout shards", str(plan.num_shards)),
    ]
    if plan.retries:
        rows.append(("retries", plan.retries))
    if plan.away_from:
        rows.append(("keeps away from", ", ".join(f"`{name}`" for name in plan.away_from)))
    lines = ["# What will happen", "", "| what | value |", "| --- | --- |"]
    for name, value in rows:
        lines.append("| {} | {} |".format(name, value.replace("|", "\\|").replace("\n", " ")))
    changed = [code_span(item) for item in plan.changed]
    for title, items in (("Changed settings", changed), ("Warnings", plan.warnings)):
        if items:
            lines += ["", f"## {title}", "", *(f"- {item}" for item in items)]
    return "\n".join([*lines, ""])
