"""Read a checkpoint back: every block against its checksum, every tensor against its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from planish import store
from planish.base.errors import CheckpointCorrupt
from planish.base.text import bytes_text
from planish.checkpoint.convert.diff import diff
from planish.checkpoint.convert.export_hf import CONFIG
from planish.checkpoint.convert.hf_names import WeightPart, cast, read_weights, weights_of
from planish.checkpoint.format.items import ITEM_BYTES, quoted_name
from planish.checkpoint.format.safetensors_file import StoredEntry, read_header
from planish.checkpoint.loading.fill import RAW
from planish.checkpoint.loading.reader import open_state
from planish.checkpoint.loading.slices import SliceReader
from planish.checkpoint.loading.verify import verify as verify_blocks
from planish.checkpoint.reshard.job import CHECKPOINT_SCHEMA, Page, facts_page
from planish.checkpoint.reshard.write import log_tenths
from planish.models.headers import parse_config
from planish.records.files import hash_object
from planish.records.manifest import read_manifest
from planish.records.refs import Ref

_MAX_LISTED = 50
WINDOW_BYTES = 16 << 20
"""Bytes of a file in memory at a time; of the source, one tensor is in memory."""


@dataclass
class Findings:
    """Result of a check."""

    num_bytes: int = 0
    """Bytes read for checksums and digests."""
    num_tensors: int = 0
    """Number of tensors that are equal to those of the source."""
    num_compared_bytes: int = 0
    """Bytes compared with the source, as stored."""
    faults: list[str] = field(default_factory=list)
    """One text for each object, block or tensor that differs."""


def verify(ref: Ref, source_pin: str) -> Page:
    """Check a checkpoint or policy, and compare it with its source.

    Raises:
        CheckpointCorrupt: an object, a block, a file or a tensor differs; the error lists them.
    """
    is_checkpoint = ref.schema == CHECKPOINT_SCHEMA
    found = (compare_checkpoint if is_checkpoint else compare_policy)(ref, source_pin)
    if found.faults:
        more = len(found.faults) - _MAX_LISTED
        listed = "; ".join(found.faults[:_MAX_LISTED])
        listed += f"; and {more} more" if more > 0 else ""
        raise CheckpointCorrupt(
            f"`{ref.uri}` must be intact and hold what its source holds, got {listed}; remove it "
            "and write it again"
        )
    how = "every block as its checksum says" if is_checkpoint else "every file as its digest says"
    rows = {
        "checked": f"`{ref.uri}`",
        "sha256": f"`{ref.manifest_sha256}`",
        "read": f"{bytes_text(found.num_bytes)}, {how}",
    }
    metrics = {"checked_bytes": float(found.num_bytes)}
    if source_pin:
        source, size = source_pin.partition("#")[0], bytes_text(found.num_compared_bytes)
        rows["equal"] = f"{found.num_tensors} tensors, {size}, bit by bit, to `{source}`"
        metrics["compared_tensors"] = float(found.num_tensors)
        metrics["compared_bytes"] = float(found.num_compared_bytes)
    return Page(facts_page("Verified", rows), metrics)


def compare_checkpoint(ref: Ref, source_pin: str) -> Findings:
    """Check every block of a checkpoint, then each tensor that it shares with its source."""
    report = verify_blocks(ref.pin(), progress=log_tenths("checking"))
    found = Findings(report.num_bytes, faults=[fault.text for fault in report.faults])
    if found.faults or not source_pin:
        return found
    metadata, source = open_state(ref.pin()).metadata, open_state(source_pin).metadata
    # A rewrite may contain only the weights, or only one role.
    only_model = metadata.header.get("parts") == "model"
    roles = set(metadata.header.get("roles", metadata.tensors.roles))
    kinds = ("model",) if only_model else ("model", "optim", "extra")
    difference = diff(ref.pin(), source_pin, parts=kinds, progress=log_tenths("comparing"))
    wanted = {quoted_name(*key) for key in source.tensor_ids if key[0] in roles}
    found.faults += [f"{name} is not in the source" for name in difference.only_a]
    found.faults += [f"{name} is missing" for name in difference.only_b if name in wanted]
    found.faults += [
        f"{tensor.name}: {tensor.reason}, {tensor.num_elements} elements"
        for tensor in difference.differing
    ]
    if not only_model:
        differing = (role for role in difference.values if role in roles)
        found.faults += [f"small values of role `{role}`" for role in differing]
    found.num_tensors, found.num_compared_bytes = difference.num_equal, difference.num_bytes
    return found


def compare_policy(ref: Ref, source_pin: str) -> Findings:
    """Check the files of a policy, then its tensors against its source, rounded to their types.

    Without `source_pin` only the files are checked.
    """
    manifest = read_manifest(ref.uri, sha256=ref.manifest_sha256)
    found = Findings(sum(shard.bytes for shard in manifest.shards))
    for shard in manifest.shards:
        seen = hash_object(f"{ref.uri}/{shard.name}")
        if seen != (shard.bytes, shard.sha256):
            found.faults.append(f"{seen[0]} bytes of sha256 {seen[1]} in `{shard.name}`")
    if found.faults or not source_pin:
        return found
    opened = open_state(source_pin)
    reader = SliceReader(opened)
    place = f"{ref.uri}/{CONFIG}"
    config = parse_config(store.read(place), place) if store.exists(place) else {}
    parts = weights_of(opened, str(manifest.attributes.get("role", "main")), config)
    for shard in manifest.shards:
        if shard.name.endswith(".safetensors"):
            place = f"{ref.uri}/{shard.name}"
            entries = read_header(partial(store.read, place, 0), shard.bytes, file=place)
            for name, entry in entries.items():
                differing = _differing(place, entry, parts.get(name), reader)
                if differing:
                    found.faults.append(f"`{name}` {differing}")
                else:
                    found.num_tensors += 1
                    found.num_compared_bytes += entry.stop - entry.start
    return found


def _differing(place: str, entry: StoredEntry, part: WeightPart | None, reader: SliceReader) -> str:
    """Return the difference of a stored tensor from its source as text, empty if equal."""
    if part is None:
        return "is made of no tensor of the source"
    if part.form.shape != tuple(entry.shape):
        return f"is {list(entry.shape)}, the source has {list(part.form.shape)}"
    size = ITEM_BYTES[entry.dtype]
    ((raw, stored),) = read_weights(reader, [part])
    step = WINDOW_BYTES // max(size, ITEM_BYTES[stored])
    differing = 0
    for start in range(0, len(raw), step):
        some = raw[start : start + step]
        data = store.read(place, entry.start + start * size, len(some) * size)
        wanted = np.ascontiguousarray(cast(some, stored, entry.dtype)).view(RAW[size])
        differing += int(np.count_nonzero(np.frombuffer(data, RAW[size]) != wanted.reshape(-1)))
    return f"differs in {differing} elements" if differing else ""
