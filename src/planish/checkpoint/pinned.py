"""Reads of the manifest of a train state or policy by its pin."""

from __future__ import annotations

from planish.base.errors import CheckpointError, CheckpointIncomplete, ObjectMissing
from planish.records.manifest import Manifest, read_manifest
from planish.records.refs import parse_pin


def read_pinned(pin: str, schema: str, *, remedy: str) -> tuple[str, Manifest]:
    """Return the folder and the manifest of a finished set.

    `remedy` is the advice in the error if there is no such set.

    Raises:
        CheckpointIncomplete: there is no manifest; its writer never finished.
        CheckpointError: the set has another schema.
        RecordError: the manifest is not the pinned one.
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
