"""Small JSON documents in a store."""

from __future__ import annotations

import json
from typing import Any

from planish.errors import RecordError
from planish.store import open_store


def read_json(uri: str) -> Any:
    """Return the JSON value at `uri`.

    Raises:
        ObjectMissing: nothing there.
        RecordError: not JSON.
    """
    data = open_store(uri).read(uri)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"`{uri}` must be JSON, got {data[:80]!r} ({error})") from None


def write_json(uri: str, value: Any) -> None:
    """Write `value` as canonical JSON; NaN and infinity are refused."""
    text = json.dumps(value, sort_keys=True, indent=1, allow_nan=False)
    open_store(uri).write(uri, text.encode())
