"""Refs: the small JSON files that KFP passes in place of data.

A pinned URI (`<uri>#sha256=<digest>`) is a Ref as one string, for pipeline parameters.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from planish.base.errors import RecordError

Scalar = str | int | float

_PIN = re.compile(r"^(?P<uri>[^#]+)#sha256=(?P<digest>[0-9a-f]{64})$")


@dataclass(frozen=True)
class Ref:
    """URI of a record set, a policy or a train state, and the digest of its manifest.

    Example:
        >>> ref = Ref("policy/1", "file:///runs/a/policies/00001", "0" * 64, {"policy_version": 1})
        >>> Ref.from_json(ref.to_json()) == ref
        True
    """

    schema: str
    """Name and major version of its schema, e.g. `rollouts/2`."""
    uri: str
    """Folder of the manifest, without a slash at the end."""
    manifest_sha256: str
    """64 hex digits: sha256 of the bytes of `manifest.json`."""
    attributes: dict[str, Scalar] = field(default_factory=dict)
    """A few scalars for people to read: step, policy_version, rows."""

    def to_json(self) -> str:
        """Return canonical JSON."""
        return json.dumps(vars(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Ref:
        """Parse a Ref.

        Raises:
            RecordError: not JSON, or a field is missing.
        """
        try:
            raw: Any = json.loads(text)
            return cls(raw["schema"], raw["uri"], raw["manifest_sha256"], dict(raw["attributes"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RecordError(
                f"a Ref must be JSON with schema, uri, manifest_sha256 and attributes, got "
                f"{text[:200]!r} ({error}); the stage that wrote it has failed"
            ) from None

    def pin(self) -> str:
        """Return `<uri>#sha256=<digest>`."""
        return f"{self.uri}#sha256={self.manifest_sha256}"


def is_pin(text: str) -> bool:
    """Tell whether a text reads `<uri>#sha256=<64 hex digits>`."""
    return _PIN.match(text) is not None


def parse_pin(pin: str) -> tuple[str, str]:
    """Split a pinned URI into (uri, manifest sha256).

    Raises:
        RecordError: not of the form `<uri>#sha256=<64 hex digits>`.
    """
    match = _PIN.match(pin)
    if match is None:
        raise RecordError(
            f"a pinned URI must read `<uri>#sha256=<64 hex digits>`, got {pin!r}; "
            "it comes from the stage before this one"
        )
    return match["uri"], match["digest"]
