"""Write a checkpoint anew under the layout that the run was prepared for; imports no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from planish import store
from planish.base.errors import CheckpointExists
from planish.base.telemetry import event
from planish.checkpoint.convert.merge import merge
from planish.checkpoint.convert.reshard_job import CHECKPOINT_SCHEMA, ReshardJob
from planish.checkpoint.convert.rewrite import rewrite
from planish.checkpoint.load.reader import open_state
from planish.checkpoint.watch.report_page import html_report
from planish.checkpoint.watch.report_text import wall_seconds
from planish.checkpoint.watch.timings import Timeline, Timing
from planish.records.io import finished, read_manifest
from planish.records.manifest import manifest_uri
from planish.records.refs import Ref, parse_pin
from planish.run.stage import Artifact, Context, Outcome, execute

logger = logging.getLogger(__name__)

POLICY_SCHEMA = "policy/1"
_KEPT = ("policy_version", "iteration", "seed")
"""Attributes that a merged policy takes over, from the state rather than from the older policy."""


class Resharded(NamedTuple):
    """Output parameters."""

    source_pin: str
    """Pin of the state that was read."""
    result_pin: str
    """Pin of what was written."""


def run(
    root: str, config_sha256: str, result: Artifact, report: Artifact, metrics: Artifact
) -> Resharded:
    """Write the state of the run anew; a second call finds the first one's result.

    Args:
        root: URI of the run.
        config_sha256: digest of the resolved wish.
        result: gets the Ref of the checkpoint or policy.
        report: gets the page of stages and times.
        metrics: gets sizes and seconds.
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
        outputs={"result": result, "report": report, "metrics": metrics},
    )
    values = outcome.values
    return Resharded(str(values["source_pin"]), str(values["result_pin"]))


def log_tenths(what: str) -> Callable[[int, int], None]:
    """Return what logs every tenth of a long work when it is told (bytes done, bytes in all)."""
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
    costs: dict[str, float] = {}
    if not made.already_done:
        seconds = wall_seconds(made.timeline)
        costs = {"read_bytes": float(made.bytes_read), "write_seconds": seconds}
    ref = Ref(
        CHECKPOINT_SCHEMA,
        made.uri,
        made.commit.meta_sha256,
        {"step": made.commit.step, "layout": job.layout, "bytes": made.commit.total_bytes},
    )
    return Outcome(
        refs={"result": ref},
        documents={"report": html_report(made.timeline, title=made.uri)},
        metrics={
            "result_bytes": float(made.commit.total_bytes),
            "result_objects": float(made.commit.n_objects),
            "ranks": float(job.parsed.num_ranks),
            **costs,
        },
        values={"source_pin": job.source_pin, "result_pin": ref.pin()},
        already_done=made.already_done,
    )


def _merge(job: ReshardJob, digest: str) -> Outcome:
    """Write a policy, unless an earlier attempt has."""
    parents = {"policy": parse_pin(job.policy_pin)[1], "state": job.source_sha256}
    done = finished(job.target, POLICY_SCHEMA, parents=parents, config_sha256=digest)
    timeline = Timeline()
    ref = done or _export(job, digest, timeline)
    shards = read_manifest(ref.uri, sha256=ref.manifest_sha256).shards
    return Outcome(
        refs={"result": ref},
        documents={"report": html_report(timeline, title=ref.uri)},
        metrics={
            "result_bytes": float(sum(shard.bytes for shard in shards)),
            "result_objects": float(len(shards)),
            "ranks": 1.0,
            **({} if done else {"write_seconds": wall_seconds(timeline)}),
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
    made = merge(
        job.source_pin,
        job.target,
        policy=job.policy_pin,
        attributes={**kept, "step": opened.commit.step, "config_sha256": digest},
        role=job.role,
    )
    size = sum(shard.bytes for shard in read_manifest(made.uri).shards)
    timeline.records.append(Timing(0, "save", "policy", "upload", start, time.time(), size))
    return made
