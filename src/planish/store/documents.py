"""Small JSON documents in a store."""

from __future__ import annotations

import json
from typing import Any

from planish.base.errors import RecordError
from planish.store import read, write

_LIMIT_BYTES = 64 << 20


def read_json(uri: str) -> Any:
    """Return the JSON value at `uri`.

    Raises:
        ObjectMissing: nothing there.
        RecordError: not JSON, or too long for a small document.
    """
    data = read(uri, 0, _LIMIT_BYTES + 1)
    if len(data) > _LIMIT_BYTES:
        raise RecordError(f"`{uri}` must have at most {_LIMIT_BYTES} bytes, got more")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"`{uri}` must be JSON, got {data[:80]!r} ({error})") from None


def write_json(uri: str, value: Any) -> None:
    """Write `value` as canonical JSON; NaN and infinity are refused."""
    text = json.dumps(value, sort_keys=True, indent=1, allow_nan=False)
    write(uri, text.encode())
