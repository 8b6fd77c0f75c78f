"""Write a checkpoint anew under the layout that the run was prepared for; imports no torch."""

from __future__ import annotations

import html
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from planish import store
from planish.base.errors import CheckpointExists
from planish.base.telemetry import event
from planish.checkpoint.convert.export_hf import POLICY_SCHEMA, export, policy_role
from planish.checkpoint.convert.rewrite import rewrite
from planish.checkpoint.load.reader import open_state
from planish.checkpoint.watch.monitor import Timeline, Timing
from planish.checkpoint.watch.report import text_report
from planish.records.io import finished, read_manifest
from planish.records.manifest import manifest_uri
from planish.records.refs import Ref, parse_pin
from planish.run.stage import Artifact, Context, Outcome, execute
from planish.stages.reshard.job import CHECKPOINT_SCHEMA, ReshardJob

logger = logging.getLogger(__name__)

_KEPT = ("policy_version", "iteration", "seed")
"""Attributes that a merged policy takes over, from the state rather than from the older policy."""


class Resharded(NamedTuple):
    """Output parameters."""

    source_pin: str
    """Pin of the state that was read."""
    result_pin: str
    """Pin of what was written."""


def run(root: str, config_sha256: str, result: Artifact, report: Artifact) -> Resharded:
    """Write the state of the run anew; a second call finds the first one's result.

    Args:
        root: URI of the run.
        config_sha256: digest of the resolved wish.
        result: gets the Ref of the checkpoint or policy.
        report: gets the page of stages and times.
    """

    def work(context: Context) -> Outcome:
        job = ReshardJob.from_config(context.config)
        if job.parsed.is_merged:
            return _merge(job, context.config_sha256)
        return _rewrite(job)

    outcome = execute(
        "reshard",
        work,
        root=root,
        config_sha256=config_sha256,
        outputs={"result": result, "report": report},
    )
    values = outcome.values
    return Resharded(str(values["source_pin"]), str(values["result_pin"]))


def log_tenths(what: str) -> Callable[[int, int], None]:
    """Return a callback of (bytes done, bytes in all) that logs every tenth of a long work."""
    logged = 0

    def progress(done: int, total: int) -> None:
        nonlocal logged
        tenth = 10 * done // max(total, 1)
        if tenth > logged:
            logged = tenth
            logger.info("%s", event(what, done_bytes=done, of_bytes=total))

    return progress


def _rewrite(job: ReshardJob) -> Outcome:
    """Write a checkpoint for another layout."""
    made = rewrite(
        job.source_pin,
        job.target,
        job.parsed,
        parts=job.parts,
        roles=[job.role] if job.role else [],
        progress=log_tenths("resharding"),
    )
    ref = Ref(
        CHECKPOINT_SCHEMA,
        made.uri,
        made.commit.meta_sha256,
        {"step": made.commit.step, "layout": job.layout, "bytes": made.commit.total_bytes},
    )
    metrics = {
        "result_bytes": float(made.commit.total_bytes),
        "result_objects": float(made.commit.n_objects),
        "ranks": float(job.parsed.num_ranks),
    }
    if not made.already_done:
        metrics["read_bytes"] = float(made.bytes_read)
        metrics["write_seconds"] = made.timeline.wall_seconds
    return Outcome(
        refs={"result": ref},
        documents={"report": _page(made.timeline, made.uri)},
        metrics=metrics,
        values={"source_pin": job.source_pin, "result_pin": ref.pin()},
        already_done=made.already_done,
    )


def _page(timeline: Timeline, uri: str) -> str:
    """Return the times of all stages as HTML: text as it is."""
    text = html.escape(text_report(timeline, title=uri))
    return f'<!DOCTYPE html><meta charset="utf-8"><title>checkpoint save</title><pre>{text}</pre>'


def _merge(job: ReshardJob, digest: str) -> Outcome:
    """Write a policy, unless an earlier attempt has."""
    parents = {"policy": parse_pin(job.policy_pin)[1], "state": job.source_sha256}
    done = finished(job.target, POLICY_SCHEMA, parents=parents, config_sha256=digest)
    timeline = Timeline()
    ref = done or _export(job, digest, timeline)
    shards = read_manifest(ref.uri, sha256=ref.manifest_sha256).shards
    return Outcome(
        refs={"result": ref},
        documents={"report": _page(timeline, ref.uri)},
        metrics={
            "result_bytes": float(sum(shard.bytes for shard in shards)),
            "result_objects": float(len(shards)),
            "ranks": 1.0,
            **({} if done else {"write_seconds": timeline.wall_seconds}),
        },
        values={"source_pin": job.source_pin, "result_pin": ref.pin()},
        already_done=done is not None,
    )


def _export(job: ReshardJob, digest: str, timeline: Timeline) -> Ref:
    if store.exists(manifest_uri(job.target)):
        raise CheckpointExists(
            f"`{job.target}` must be free or hold the result of this same run, got another set; "
            "choose another target"
        )
    uri, sha256 = parse_pin(job.policy_pin)
    before = read_manifest(uri, sha256=sha256).attributes
    opened = open_state(job.source_pin)
    state = opened.metadata.header.get("attributes", {})
    kept = {
        name: attributes[name]
        for attributes in (before, state)
        for name in _KEPT
        if name in attributes
    }
    start = time.time()
    role = policy_role(sorted(set(opened.metadata.tensors.roles)), job.role)
    step = opened.commit.step
    made = export(
        job.source_pin,
        job.target,
        policy=job.policy_pin,
        role=role,
        attributes={**kept, "step": step, "config_sha256": digest, "role": role},
    )
    size = sum(shard.bytes for shard in read_manifest(made.uri).shards)
    timeline.records.append(Timing(0, "save", "policy", "upload", start, time.time(), size))
    return made
