"""Bytes by URI or by key, on a file system or in an S3 bucket.

`read`, `write` and the like take the URI of an object; `open_store` returns the store itself, for
writes in parts and conditional writes.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planish.base import telemetry
from planish.base.errors import ObjectMissing, StoreError, StoreMisconfigured
from planish.store.base import (
    PART_BYTES,
    SINGLE_PUT_BYTES,
    STORES,
    TIMEOUT_SECONDS,
    Buffer,
    Folder,
    Multipart,
    Stat,
    Store,
    Upload,
    check_key,
    file_path,
    file_uri,
    normal_pin,
    normal_uri,
    parse_uri,
    part_bytes,
    uri_of,
)

__all__ = [
    "PART_BYTES",
    "SINGLE_PUT_BYTES",
    "Folder",
    "Multipart",
    "Stat",
    "Store",
    "Upload",
    "abort_lost_uploads",
    "check_key",
    "create",
    "delete",
    "exists",
    "file_path",
    "file_uri",
    "list_uris",
    "local_path",
    "normal_pin",
    "normal_uri",
    "open_store",
    "parse_uri",
    "part_bytes",
    "read",
    "read_file",
    "tag",
    "upload",
    "uri_of",
    "write",
    "write_file",
]


logger = logging.getLogger(__name__)

_PARALLEL_PARTS = 3
_BEGUN = time.time()
"""Approximate start of this process."""


def open_store(uri: str, *, timeout_s: float = TIMEOUT_SECONDS) -> tuple[Store, str]:
    """Return the store of a URI and the key that the URI names in it.

    Args:
        uri: `s3://bucket/key`, `file:///folder` or a path.
        timeout_s: limit of each single request to the store, in seconds.

    Example:
        >>> store, key = open_store("/runs/7")
        >>> store.uri(key)
        'file:///runs/7'

    Raises:
        StoreMisconfigured: an unknown scheme, a malformed URI, or no credentials.
    """
    address = parse_uri(uri_of(uri))
    if address.key:
        check_key(address.key, is_file=address.scheme == "file")
    module, _, function = STORES[address.scheme].partition(":")
    connect = getattr(importlib.import_module(module), function)
    return connect(address.bucket, timeout_s=timeout_s), address.key


def read(uri: str, start: int = 0, length: int | None = None) -> bytes:
    """Return at most `length` bytes from byte `start`; fewer at the end of the object.

    Raises:
        ObjectMissing: no object has this URI.
    """
    store, key = _open_object(uri)
    data = store.read(key, start, length)
    _count("read", uri, len(data))
    return data


def write(uri: str, data: Buffer, *, over: str | None = None) -> None:
    """Write an object as a whole: readers see either all old bytes or all new bytes.

    `over` is the entity tag of the object to replace, "" for no object, None for any.

    Raises:
        ObjectExists, ObjectChanged, ObjectMissing: the present object is not that of `over`.
    """
    store, key = _open_object(uri)
    upload(store, key, data, over=over)
    _count("written", uri, len(data))


def create(uri: str, data: Buffer) -> None:
    """Write a small object only if there is none yet; raises `ObjectExists` otherwise."""
    write(uri, data, over="")


def write_file(uri: str, path: Path, *, over: str | None = None) -> None:
    """Write an object from a local file of any size, as `write`."""
    store, key = _open_object(uri)
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size

        def read_part(start: int, length: int) -> bytes:
            data = os.pread(file.fileno(), length, start)
            if len(data) != length:
                raise StoreError(f"`{path}` must not change while it is copied to `{uri}`")
            return data

        _write_parts(store, key, num_bytes, read_part, _PARALLEL_PARTS, over)
    _count("written", uri, num_bytes)


def read_file(uri: str, path: Path) -> str:
    """Copy an object of any size to a local file; after a failure there is no file.

    Returns:
        Hex sha256 of its bytes, computed while further bytes arrive.
    """
    store, key = _open_object(uri)
    stat = store.head(key)
    starts, digest = range(0, stat.size, PART_BYTES), hashlib.sha256()
    # One block more than are read in parallel, for the hash of the oldest one.
    size = min(stat.size, PART_BYTES)
    blocks = [memoryview(bytearray(size)) for _ in starts[: _PARALLEL_PARTS + 1]]
    try:
        with open(path, "wb") as file, ThreadPoolExecutor(_PARALLEL_PARTS) as pool:

            def read_part(number: int) -> memoryview:
                start = starts[number]
                block = blocks[number % len(blocks)][: stat.size - start]
                store.get_into(key, start, block, etag=stat.etag)
                os.pwrite(file.fileno(), block, start)
                return block

            parts = deque(pool.submit(read_part, number) for number in range(len(blocks)))
            try:
                for number in range(len(blocks), len(starts) + len(blocks)):
                    digest.update(parts.popleft().result())
                    if number < len(starts):
                        parts.append(pool.submit(read_part, number))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except StoreError:
        path.unlink()
        raise
    _count("read", uri, stat.size)
    return digest.hexdigest()


def exists(uri: str) -> bool:
    """Return whether an object exists; the bucket must exist, but is no object itself."""
    store, key = open_store(uri)
    if not key:
        store.folder("")
        return False
    return tag(store, key) != ""


def tag(store: Store, key: str) -> str:
    """Return the entity tag of an object, "" for none."""
    try:
        return store.head(key).etag
    except ObjectMissing:
        return ""


def list_uris(prefix_uri: str) -> list[str]:
    """Return the URIs of all objects below a folder, sorted, spelled as `prefix_uri` is."""
    store, key = open_store(prefix_uri)
    names = [stat.key.removeprefix(f"{key}/") for stat in store.list(key)]
    if prefix_uri.startswith("file:"):
        names = [name.replace("%", "%25") for name in names]
    base = prefix_uri.rstrip("/")
    return sorted(f"{base}/{name}" for name in names)


def delete(uri: str) -> None:
    """Remove an object; an absent one is no error."""
    store, key = _open_object(uri)
    store.delete([key])


def local_path(uri: str) -> Path | None:
    """Return the local path of an object or folder; None if it is not on this machine."""
    address = parse_uri(uri)
    return Path(f"/{address.key}") if address.scheme == "file" else None


def upload(store: Store, key: str, data: Buffer, *, over: str | None = None) -> str:
    """Write an object of any size from one thread, as `write`, and return its entity tag."""
    view = memoryview(data).cast("B")

    def read_part(start: int, length: int) -> memoryview:
        return view[start : start + length]

    return _write_parts(store, key, view.nbytes, read_part, over=over)


def _write_parts(
    store: Store,
    key: str,
    num_bytes: int,
    read_part: Callable[[int, int], Buffer],
    num_threads: int = 1,
    over: str | None = None,
) -> str:
    """Write an object whose ranges `read_part(start, length)` returns; a failure leaves nothing."""
    must_be_new, tag = over == "", over or ""
    if num_bytes < SINGLE_PUT_BYTES:
        data = read_part(0, num_bytes)
        return store.put(key, data, if_none_match=must_be_new, if_match=tag)
    # An upload older than this process belongs to a killed or an earlier writer.
    _abort(store, key, _BEGUN)
    parts = store.open_multipart(key, num_bytes)

    def write_part(start: int) -> None:
        length = min(parts.part_bytes, num_bytes - start)
        parts.write(start // parts.part_bytes + 1, read_part(start, length))

    try:
        with ThreadPoolExecutor(num_threads) as pool:
            try:
                for _ in pool.map(write_part, range(0, num_bytes, parts.part_bytes)):
                    pass
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        etag = parts.complete(if_none_match=must_be_new, if_match=tag)
    except BaseException:
        parts.abort()
        raise
    abort_lost_uploads(store, [parts])
    return etag


def abort_lost_uploads(store: Store, written: Iterable[Multipart]) -> None:
    """Abort second uploads that lost start requests of `written` left; for keys with one writer."""
    for parts in written:
        if parts.may_be_begun_twice:
            _abort(store, parts.key, math.inf, parts.upload_id)


def _abort(store: Store, key: str, before: float, besides: str = "") -> None:
    """Abort the uploads of a key started before a time of our clock, except upload `besides`."""
    try:
        for upload in store.open_uploads(key):
            ahead = store.now() - time.time()
            if upload.started < before + ahead and upload.upload_id != besides:
                store.abort_upload(key, upload.upload_id)
    except StoreError as error:
        # No object is affected: the upload only takes space until the store removes it.
        logger.warning("%s", telemetry.event("upload_left", key=key, reason=str(error)))


def _open_object(uri: str) -> tuple[Store, str]:
    store, key = open_store(uri)
    if not key:
        raise StoreMisconfigured(
            f"an object must read `s3://bucket/key` or `file:///folder/name`, got {uri!r}"
        )
    return store, key


def _count(direction: str, uri: str, num_bytes: int) -> None:
    scheme = uri_of(uri).partition("://")[0]
    telemetry.count(f"planish_store_{direction}_bytes_total", num_bytes, scheme=scheme)
