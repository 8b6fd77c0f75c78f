"""Small JSON documents in a store."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from planish.base.errors import RecordError
from planish.store import read, write

_LIMIT_BYTES = 64 << 20


def read_json(uri: str) -> dict[str, Any]:
    """Return the JSON object at `uri`; the release that wrote it decides its keys.

    Raises:
        ObjectMissing: no object has this URI.
        RecordError: it is no JSON object, or too long for a small document.
    """
    data = read(uri, 0, _LIMIT_BYTES + 1)
    if len(data) > _LIMIT_BYTES:
        raise RecordError(f"`{uri}` must have at most {_LIMIT_BYTES} bytes, got more")
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
        if isinstance(value, dict):
            return value
    raise RecordError(f"`{uri}` must be a JSON object, got {data[:80]!r}")


def write_json(uri: str, value: Any, *, over: str | None = None) -> None:
    """Write `value` as canonical JSON by `write`; refuse NaN and infinity."""
    text = json.dumps(value, sort_keys=True, indent=1, allow_nan=False)
    write(uri, text.encode(), over=over)
