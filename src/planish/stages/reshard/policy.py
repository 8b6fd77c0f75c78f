"""A merged policy compared with the checkpoint that it was made from.

Needs neither torch nor a local copy; in memory are one tensor of the source and a window.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from planish import store
from planish.base.errors import CheckpointCorrupt, RecordError
from planish.checkpoint.convert.export_hf import CONFIG, parse_config
from planish.checkpoint.convert.hf_names import Part, weights_of
from planish.checkpoint.convert.numbers import cast
from planish.checkpoint.format.safetensors_file import StoredEntry, header_bytes, parse_header
from planish.checkpoint.format.tables import ITEM_BYTES
from planish.checkpoint.load.fill import RAW
from planish.checkpoint.load.reader import open_state
from planish.checkpoint.load.slices import SliceReader
from planish.records.manifest import Shard, read_manifest
from planish.records.refs import Ref

WINDOW_BYTES = 16 << 20


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
            for name, entry in _entries(place, shard).items():
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


def _entries(place: str, shard: Shard) -> dict[str, StoredEntry]:
    try:
        length = header_bytes(store.read(place, 0, 8), shard.bytes, file=place)
        return parse_header(store.read(place, 0, length), shard.bytes, file=place).entries
    except CheckpointCorrupt as error:
        raise RecordError(str(error)) from None


def _compare(
    place: str,
    named: tuple[str, StoredEntry, Part | None],
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
    (raw,) = reader.read_many([part.slice])
    step = WINDOW_BYTES // max(size, ITEM_BYTES[part.form.dtype])
    differing = 0
    for start in range(0, len(raw), step):
        some = raw[start : start + step]
        data = store.read(place, entry.start + start * size, len(some) * size)
        wanted = np.ascontiguousarray(cast(some, part.form.dtype, entry.dtype)).view(RAW[size])
        differing += int(np.count_nonzero(np.frombuffer(data, RAW[size]) != wanted.reshape(-1)))
    if differing:
        findings.faults.append(f"`{name}` differs in {differing} elements")
    else:
        findings.num_tensors += 1
        findings.num_compared_bytes += len(raw) * size
