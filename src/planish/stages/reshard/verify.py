"""Read a checkpoint back: every block against its checksum, every tensor against its source."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planish import store
from planish.base.errors import CheckpointCorrupt, RecordError
from planish.base.text import bytes_text
from planish.checkpoint.convert.diff import Diff, diff
from planish.checkpoint.convert.export_hf import CONFIG, parse_config
from planish.checkpoint.convert.hf_names import WeightPart, weights_of
from planish.checkpoint.convert.merged import read_weights
from planish.checkpoint.convert.numbers import cast
from planish.checkpoint.format.items import ITEM_BYTES, quoted_name
from planish.checkpoint.format.safetensors_file import StoredEntry, header_bytes, parse_header
from planish.checkpoint.load.fill import RAW
from planish.checkpoint.load.reader import Opened, open_state
from planish.checkpoint.load.slices import SliceReader
from planish.checkpoint.load.verify import verify as verify_blocks
from planish.records.manifest import Shard, read_manifest
from planish.records.refs import Ref
from planish.run.stage import Artifact, Context, Outcome, execute, read_ref
from planish.stages.reshard.job import CHECKPOINT_SCHEMA
from planish.stages.reshard.reshard import log_tenths

logger = logging.getLogger(__name__)

POLICY_SCHEMA = "policy/1"
_MAX_LISTED = 50
WINDOW_BYTES = 16 << 20
"""How much of a file is in memory at once; of the source, one tensor is."""


def run(root: str, source_pin: str, checkpoint: Artifact, summary: Artifact) -> None:
    """Check a checkpoint or policy, and compare it with what it was made from.

    Args:
        root: URI of the run.
        source_pin: pin of the checkpoint that it was made from; empty to check it by itself.
        checkpoint: Ref of what is checked.
        summary: gets the findings in Markdown.
    """

    def work(_: Context) -> Outcome:
        ref = read_ref(checkpoint)
        if ref.schema == CHECKPOINT_SCHEMA:
            return verify_checkpoint(ref, source_pin)
        if ref.schema == POLICY_SCHEMA:
            return verify_policy(ref, source_pin)
        raise RecordError(
            f"`checkpoint` must be of schema {CHECKPOINT_SCHEMA} or {POLICY_SCHEMA}, got "
            f"{ref.schema!r}; pass what the reshard stage has written"
        )

    execute(
        "checkpoint_verify",
        work,
        root=root,
        config_sha256=None,
        outputs={"summary": summary},
    )


def verify_checkpoint(ref: Ref, source_pin: str) -> Outcome:
    """Check every block of a checkpoint, and every tensor that it shares with its source.

    Raises:
        CheckpointCorrupt: an object, a block or a tensor differs; all of them are listed.
    """
    report = verify_blocks(ref.pin(), progress=log_tenths("checking"))
    if not report.is_intact:
        _refuse(ref, [fault.text for fault in report.faults])
    rows = [("read", f"{bytes_text(report.num_bytes)}, every block as its checksum says")]
    metrics = {"checked_bytes": float(report.num_bytes)}
    if source_pin:
        opened = open_state(ref.pin())
        # A rewrite may have kept the weights alone.
        only_model = opened.metadata.header.get("parts") == "model"
        kinds = ("model",) if only_model else ("model", "optim", "extra")
        difference = diff(ref.pin(), source_pin, parts=kinds, progress=log_tenths("comparing"))
        faults = _faults(difference, opened, open_state(source_pin))
        if faults:
            _refuse(ref, faults)
        rows.append(_equal_row(source_pin, difference.num_equal, difference.num_bytes))
        metrics["compared_tensors"] = float(difference.num_equal)
        metrics["compared_bytes"] = float(difference.num_bytes)
    return Outcome(documents={"summary": _summary(ref, rows)}, metrics=metrics)


def verify_policy(ref: Ref, source_pin: str) -> Outcome:
    """Check every file of a policy, and every tensor against the state that it was made from.

    Raises:
        CheckpointCorrupt: a tensor differs from the source's, rounded to the policy's type.
        RecordError: a file differs from the manifest.
    """
    findings = compare_policy(ref, source_pin)
    if findings.faults:
        _refuse(ref, findings.faults)
    rows = [("read", f"{bytes_text(findings.num_bytes)}, every file as its digest says")]
    metrics = {"checked_bytes": float(findings.num_bytes)}
    if source_pin:
        rows.append(_equal_row(source_pin, findings.num_tensors, findings.num_compared_bytes))
        metrics["compared_tensors"] = float(findings.num_tensors)
        metrics["compared_bytes"] = float(findings.num_compared_bytes)
    return Outcome(documents={"summary": _summary(ref, rows)}, metrics=metrics)


def _faults(difference: Diff, opened: Opened, source: Opened) -> list[str]:
    """Return what differs, but for roles and parts that were left out on purpose."""
    header = opened.metadata.header
    roles = set(header.get("roles", opened.metadata.tensors.roles))
    wanted = {quoted_name(*key) for key in source.metadata.tensor_ids if key[0] in roles}
    faults = [f"{name} is not in the source" for name in difference.only_a]
    faults += [f"{name} is missing" for name in difference.only_b if name in wanted]
    faults += [
        f"{tensor.name}: {tensor.reason}, {tensor.num_elements} elements"
        for tensor in difference.differing
    ]
    if header.get("parts") != "model":
        faults += [f"small values of role `{role}`" for role in difference.values if role in roles]
    return faults


def _refuse(ref: Ref, faults: Sequence[str]) -> None:
    more = len(faults) - _MAX_LISTED
    listed = "; ".join(faults[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
    raise CheckpointCorrupt(
        f"`{ref.uri}` must be intact and hold what its source holds, got {listed}; remove it and "
        "write it again"
    )


def _equal_row(source_pin: str, num_tensors: int, num_bytes: int) -> tuple[str, str]:
    source = source_pin.partition("#")[0]
    return "equal", f"{num_tensors} tensors, {bytes_text(num_bytes)}, bit by bit, to `{source}`"


def _summary(ref: Ref, rows: Sequence[tuple[str, str]]) -> str:
    facts = [("checked", f"`{ref.uri}`"), ("sha256", f"`{ref.manifest_sha256}`"), *rows]
    lines = [f"| {name} | {value} |" for name, value in facts]
    return "\n".join(["# Verified", "", "| | |", "| --- | --- |", *lines, ""])


@dataclass
class PolicyFindings:
    """What a comparison has found.

    Example:
        >>> PolicyFindings(num_bytes=8).faults
        []
    """

    num_bytes: int = 0
    """Read from the policy's files for their digests."""
    num_tensors: int = 0
    """Compared with the source and equal to it."""
    num_compared_bytes: int = 0
    """Of these tensors, as the policy stores them."""
    faults: list[str] = field(default_factory=list)
    """One sentence per tensor that differs."""


def compare_policy(ref: Ref, source_pin: str) -> PolicyFindings:
    """Check the files of a policy, then its tensors against its source.

    Args:
        ref: of the policy; its attribute `role` says which one of the source it is.
        source_pin: pin of the checkpoint; empty to check the files alone.

    Raises:
        RecordError: a file differs from the manifest, or is no safetensors file.
    """
    manifest = read_manifest(ref.uri, sha256=ref.manifest_sha256)
    findings = PolicyFindings()
    for shard in manifest.shards:
        _check_digest(f"{ref.uri}/{shard.name}", shard)
        findings.num_bytes += shard.bytes
    if not source_pin:
        return findings
    opened = open_state(source_pin)
    reader = SliceReader(opened)
    role = str(manifest.attributes.get("role", "main"))
    place = f"{ref.uri}/{CONFIG}"
    config = parse_config(store.read(place), place) if store.exists(place) else {}
    parts = weights_of(opened, role, config)
    for shard in manifest.shards:
        if shard.name.endswith(".safetensors"):
            place = f"{ref.uri}/{shard.name}"
            try:
                length = header_bytes(store.read(place, 0, 8), shard.bytes, file=place)
                head = parse_header(store.read(place, 0, length), shard.bytes, file=place)
            except CheckpointCorrupt as error:
                raise RecordError(str(error)) from None
            for name, entry in head.entries.items():
                _compare(place, (name, entry, parts.get(name)), reader, findings)
    if not findings.num_tensors and not findings.faults:
        findings.faults.append("it has no tensors")
    return findings


def _check_digest(place: str, shard: Shard) -> None:
    digest = hashlib.sha256()
    for start in range(0, shard.bytes, WINDOW_BYTES):
        digest.update(store.read(place, start, min(WINDOW_BYTES, shard.bytes - start)))
    size = store.size(place)
    if (size, digest.hexdigest()) != (shard.bytes, shard.sha256):
        raise RecordError(
            f"`{place}` must have {shard.bytes} bytes of the sha256 {shard.sha256}, got {size} of "
            f"{digest.hexdigest()}; remove the policy and write it again"
        )


def _compare(
    place: str,
    named: tuple[str, StoredEntry, WeightPart | None],
    reader: SliceReader,
    findings: PolicyFindings,
) -> None:
    name, entry, part = named
    if part is None:
        findings.faults.append(f"`{name}` is made of no tensor of the source")
        return
    if part.form.shape != tuple(entry.shape):
        seen = list(part.form.shape)
        findings.faults.append(f"`{name}` is {list(entry.shape)}, the source has {seen}")
        return
    size = ITEM_BYTES[entry.dtype]
    ((raw, stored),) = read_weights(reader, [part])
    step = WINDOW_BYTES // max(size, ITEM_BYTES[stored])
    differing = 0
    for start in range(0, len(raw), step):
        some = raw[start : start + step]
        data = store.read(place, entry.start + start * size, len(some) * size)
        wanted = np.ascontiguousarray(cast(some, stored, entry.dtype)).view(RAW[size])
        differing += int(np.count_nonzero(np.frombuffer(data, RAW[size]) != wanted.reshape(-1)))
    if differing:
        findings.faults.append(f"`{name}` differs in {differing} elements")
    else:
        findings.num_tensors += 1
        findings.num_compared_bytes += len(raw) * size
