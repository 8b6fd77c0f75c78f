"""Probe of a run's store: try once, on an own object, every operation that a run needs."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from planish.base.errors import ObjectChanged, ObjectExists, StoreMisconfigured
from planish.records import layout
from planish.store import open_store


def probe_store(root: str) -> None:
    """Write, list, read and delete an object below a root, with plain and conditional writes.

    Raises:
        AccessRefused: the store forbids one of these; the message names the action.
        StoreMisconfigured: the store does not list a written object, or ignores a condition.
    """
    folder = layout.locks(root)
    store, key = open_store(f"{folder}/probe-{secrets.token_hex(8)}")

    def refuses(write: Callable[[], str], condition: str) -> None:
        try:
            write()
        except (ObjectExists, ObjectChanged):
            return
        raise StoreMisconfigured(
            f"the store of `{root}` must keep to the condition `{condition}` of a write, but wrote "
            "over an object; two runs could share a root there: take a store that has conditional "
            "writes, such as MinIO or S3"
        )

    try:
        etag = store.put(key, b"1", if_none_match=True)
        refuses(lambda: store.put(key, b"2", if_none_match=True), "If-None-Match")
        store.put(key, b"3", if_match=etag)
        refuses(lambda: store.put(key, b"4", if_match=etag), "If-Match")
        names = [found.key for found in store.folder(key.rpartition("/")[0]).objects]
        seen = store.read(key)
        if key not in names or seen != b"3":
            raise StoreMisconfigured(
                f"the store of `{root}` must list and give what was written, got {names[:3]} and "
                f"{seen!r:.40}; take another store, or one without a cache before it"
            )
    finally:
        store.delete([key])
