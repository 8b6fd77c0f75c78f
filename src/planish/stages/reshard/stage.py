"""Check a wish to reshard before anything is written, do it, and check what was written."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

import planish
from planish import store
from planish.base.config import config_sha256
from planish.base.errors import CheckpointIncomplete, CheckpointNotFound, ConfigError
from planish.base.text import bytes_text
from planish.checkpoint.convert.export_hf import policy_role
from planish.checkpoint.load.reader import Opened, check_objects, open_state, split_place
from planish.checkpoint.train_state import checkpoint_place
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.refs import parse_pin
from planish.run.stage import Artifact, Context, Outcome, execute, read_run
from planish.stages.reshard.job import SECTION, ReshardJob, facts_page
from planish.stages.reshard.reshard import write
from planish.stages.reshard.retain import apply_retention
from planish.stages.reshard.verify import verify
from planish.store import open_store
from planish.store.documents import write_json


class Resharded(NamedTuple):
    """Output parameters."""

    result_pin: str


def run(
    root: str,
    source: str,
    target_layout: str,
    target: str,
    parts: str,
    role: str,
    policy: str,
    retain_folder: str,
    keep_last: int,
    keep_every: int,
    result: Artifact,
    summary: Artifact,
) -> Resharded:
    """Pin the source, write it anew, read that back, and remove older checkpoints.

    A second call finds what the first one has written. `components/reshard.py` says what the
    parameters are.
    """

    def work(context: Context) -> Outcome:
        # The first touch of both stores: tells a missing bucket, refused keys and silence apart.
        present = store.exists(layout.run_file(context.root))
        open_store(target or context.root)
        opened = _open_whole(source)
        job = _agree(context.root, opened, target_layout, target, parts, role, policy)
        made = write(job, _record(context.root, job, present=present))
        checked = verify(made.ref, job.source_pin)
        retained = apply_retention(retain_folder.rstrip("/"), keep_last, keep_every)
        pages = [_summary(job, opened), checked.documents["summary"]]
        pages.append(retained.documents["summary"])
        metrics = {
            "source_bytes": float(opened.commit.total_bytes),
            "source_tensors": float(len(opened.metadata.tensors)),
            "source_step": float(opened.commit.step),
            "ranks": float(job.parsed.num_ranks),
        }
        return Outcome(
            refs={"result": made.ref},
            values={"result_pin": made.ref.pin()},
            documents={"summary": "\n".join(pages)},
            metrics={**metrics, **made.metrics, **checked.metrics, **retained.metrics},
            already_done=made.already_done,
        )

    outputs = {"result": result, "summary": summary}
    outcome = execute("reshard", work, root=root, config_sha256=None, outputs=outputs)
    return Resharded(str(outcome.values["result_pin"]))


def _agree(
    root: str, opened: Opened, target_layout: str, target: str, parts: str, role: str, policy: str
) -> ReshardJob:
    """Return what is asked for, with pins; raises ConfigError where it cannot be."""
    policy_pin = ""
    if policy:
        # Reading the manifest makes sure that the policy is there.
        uri, sha256 = parse_pin(policy) if "#" in policy else (policy.rstrip("/"), None)
        policy_pin = read_manifest(uri, sha256=sha256).ref(uri).pin()
    job = ReshardJob.of(
        opened.pin, target, target_layout, root=root, policy_pin=policy_pin, parts=parts, role=role
    )
    roles = sorted(set(opened.metadata.tensors.roles))
    if job.parsed.is_merged:
        policy_role(roles, role)
    elif role and role not in roles:
        raise ConfigError(f"`role` must be one of {roles} of the source, got {role!r}")
    return job


def _open_whole(source: str) -> Opened:
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


def _record(root: str, job: ReshardJob, *, present: bool) -> str:
    """Write `run.json`, or check that it says the same; return the configuration's digest."""
    config = {SECTION: asdict(job)}
    digest = config_sha256(config)
    uri = layout.run_file(root)
    if present:
        seen = config_sha256(read_run(root)["config"])
        if seen != digest:
            raise ConfigError(
                f"`{uri}` must hold this same wish, got {seen[:12]} in place of {digest[:12]}; "
                "choose a new root"
            )
    else:
        code = planish.__version__
        write_json(uri, {"config": config, "config_sha256": digest, "code_version": code})
    return digest


def _summary(job: ReshardJob, opened: Opened) -> str:
    ranks = job.parsed.num_ranks
    how = "one Hugging Face folder" if job.parsed.is_merged else f"{ranks} rank(s)"
    saved = str(opened.metadata.header.get("layout", "")) or "unknown"
    facts = {
        "source": f"`{split_place(job.source_pin)[0]}`",
        "step": str(opened.commit.step),
        "size": f"{bytes_text(opened.commit.total_bytes)}, {opened.commit.n_objects} objects",
        "saved as": f"`{saved[:60]}`",
        "becomes": f"`{job.layout}`, {how}",
        "parts": f"{job.parts}, {job.role or 'every role'}",
        "target": f"`{job.target}`",
    }
    return facts_page("Reshard", facts)
