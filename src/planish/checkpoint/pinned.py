"""Record sets that stand for a checkpoint, read by their pins."""

from __future__ import annotations

from planish.base.errors import CheckpointError, CheckpointIncomplete, ObjectMissing
from planish.records.manifest import Manifest, read_manifest
from planish.records.refs import parse_pin


def read_pinned(pin: str, schema: str, *, remedy: str) -> tuple[str, Manifest]:
    """Return the folder and the manifest of a finished set.

    `remedy` says what to do if there is no such set.

    Raises:
        CheckpointIncomplete: no manifest there; its writer never finished.
        CheckpointError: a set of another schema.
        RecordError: another manifest than the pinned one.
    """
    uri, digest = parse_pin(pin)
    try:
        manifest = read_manifest(uri, sha256=digest)
    except ObjectMissing:
        raise CheckpointIncomplete(
            f"`{uri}` must hold a finished {schema}, got no manifest: its writer never finished; "
            f"{remedy}"
        ) from None
    if manifest.schema != schema:
        raise CheckpointError(
            f"`{uri}` must hold {schema}, got {manifest.schema}; pass the URI of another set, "
            f"or {remedy}"
        )
    return uri, manifest
