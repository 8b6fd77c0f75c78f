"""Rewrite a checkpoint under another layout, or merge it into a policy, without torch."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from planish import store
from planish.base.errors import CheckpointExists
from planish.base.telemetry import event
from planish.checkpoint.convert.export_hf import export, policy_role
from planish.checkpoint.convert.rewrite import rewrite
from planish.checkpoint.loading.reader import Progress, open_state, split_place
from planish.checkpoint.reshard.job import CHECKPOINT_SCHEMA, ReshardJob
from planish.records.files import POLICY_SCHEMA
from planish.records.io import finished, read_manifest
from planish.records.manifest import manifest_uri
from planish.records.refs import Ref, Scalar, parse_pin

logger = logging.getLogger(__name__)

_KEPT = ("policy_version", "iteration", "seed")
"""Attributes that a merged policy gets from the state, or else from the older policy."""


class Made(NamedTuple):
    """Result of a rewrite or a merge."""

    ref: Ref
    metrics: dict[str, float]
    already_done: bool


def write(job: ReshardJob, config_sha256: str) -> Made:
    """Write a state under another layout; a second call finds the result of the first."""
    return _merge(job, config_sha256) if job.parsed.is_merged else _rewrite(job)


def log_tenths(what: str) -> Progress:
    """Return a callback of (bytes done, bytes in all) that logs after every tenth of the bytes."""
    logged = 0

    def progress(done: int, total: int) -> None:
        nonlocal logged
        tenth = 10 * done // max(total, 1)
        if tenth > logged:
            logged = tenth
            logger.info("%s", event(what, done_bytes=done, of_bytes=total))

    return progress


def _rewrite(job: ReshardJob) -> Made:
    made = rewrite(
        job.source_pin,
        job.target,
        job.parsed,
        parts=job.parts,
        roles=[job.role] if job.role else [],
        progress=log_tenths("resharding"),
    )
    size = made.commit.total_bytes
    facts: dict[str, Scalar] = {"step": made.commit.step, "layout": job.layout, "bytes": size}
    ref = Ref(CHECKPOINT_SCHEMA, made.uri, made.commit.meta_sha256, facts)
    metrics = {"result_bytes": float(size), "result_objects": float(made.commit.n_objects)}
    if not made.already_done:
        metrics["read_bytes"] = float(made.bytes_read)
        metrics["write_seconds"] = made.timeline.wall_seconds
    return Made(ref, metrics, made.already_done)


def _merge(job: ReshardJob, digest: str) -> Made:
    """Write a policy, unless an earlier run has written it."""
    policy_uri, policy_sha256 = parse_pin(job.policy_pin)
    parents = {"policy": policy_sha256, "state": split_place(job.source_pin)[1]}
    done = finished(job.target, POLICY_SCHEMA, parents=parents, config_sha256=digest)
    if done is None and store.exists(manifest_uri(job.target)):
        raise CheckpointExists(
            f"`{job.target}` must be free or hold the result of this same run, got another set; "
            "choose another target"
        )
    start = time.monotonic()
    if done is None:
        opened = open_state(job.source_pin)
        before = read_manifest(policy_uri, sha256=policy_sha256).attributes
        known = {**before, **opened.metadata.header.get("attributes", {})}
        role = policy_role(opened.roles, job.role)
        facts = {"step": opened.commit.step, "config_sha256": digest, "role": role}
        facts |= {name: known[name] for name in _KEPT if name in known}
        ref = export(job.source_pin, job.target, policy=job.policy_pin, role=role, attributes=facts)
    else:
        ref = done
    shards = read_manifest(ref.uri, sha256=ref.manifest_sha256).shards
    size = sum(shard.bytes for shard in shards)
    metrics = {"result_bytes": float(size), "result_objects": float(len(shards))}
    if done is None:
        metrics["write_seconds"] = time.monotonic() - start
    return Made(ref, metrics, done is not None)
