"""The reshard stage: check the request, write the new checkpoint, and verify it."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

import planish
from planish import store
from planish.base.config import config_sha256
from planish.base.errors import ConfigError
from planish.checkpoint.reshard.job import SECTION, ReshardJob, agree, open_whole, source_page
from planish.checkpoint.reshard.retain import apply_retention
from planish.checkpoint.reshard.verify import verify
from planish.checkpoint.reshard.write import write
from planish.records import layout
from planish.run.stage import Artifact, Context, Outcome, execute, read_run
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

    A second call finds the result of the first one. `components/reshard.py` describes the
    parameters.
    """

    def work(context: Context) -> Outcome:
        # The first request to both stores shows a missing bucket, refused keys or no answer.
        present = store.exists(layout.run_file(context.root))
        open_store(target or context.root)
        opened = open_whole(source)
        job = agree(context.root, opened, target_layout, target, parts, role, policy)
        made = write(job, _record(context.root, job, present=present))
        checked = verify(made.ref, job.source_pin)
        retained = apply_retention(retain_folder.rstrip("/"), keep_last, keep_every)
        pages = [source_page(job, opened), checked.page]
        pages.append(retained.page)
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


def _record(root: str, job: ReshardJob, *, present: bool) -> str:
    """Write `run.json`, or check that it has this configuration; return the digest."""
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
