"""Objects in the memory of this process, for tests: the semantics of S3 without its time."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from planish.base.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreError,
)
from planish.store.base import (
    Buffer,
    Folder,
    Stat,
    Upload,
    check_key,
    key_prefix,
    part_bytes,
)

_named: dict[str, MemoryStore] = {}


def connect(name: str, *, timeout_s: float = 0.0) -> MemoryStore:
    """Return the store of that name, made on first use."""
    return _named.setdefault(name, MemoryStore(name))


class _Upload(NamedTuple):
    key: str
    started: float
    parts: dict[int, bytes]


class MemoryStore:
    """`mem://name/key`."""

    in_memory = True

    def __init__(self, name: str = "memory"):
        self.clock = time.time
        self.requests: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self._name = name
        self._lock = threading.RLock()
        self._objects: dict[str, tuple[bytes, Stat]] = {}
        self._uploads: dict[str, _Upload] = {}
        self._numbers = itertools.count(1)

    def uri(self, key: str) -> str:
        return f"mem://{self._name}/{key}"

    def put(
        self, key: str, data: Buffer, *, if_none_match: bool = False, if_match: str = ""
    ) -> str:
        content = bytes(data)
        self.requests["put"] += 1
        return self._place(check_key(key), content, if_none_match, if_match)

    def open_multipart(self, key: str, size: int) -> MemoryMultipart:
        self.requests["create"] += 1
        with self._lock:
            upload_id = f"upload-{next(self._numbers)}"
            self._uploads[upload_id] = _Upload(check_key(key), self.clock(), {})
        return MemoryMultipart(self, key, upload_id, size)

    def abort_upload(self, key: str, upload_id: str) -> None:
        self.requests["abort"] += 1
        with self._lock:
            self._uploads.pop(upload_id, None)

    def open_uploads(self, key: str) -> list[Upload]:
        self.requests["list"] += 1
        with self._lock:
            return [
                Upload(name, upload.started)
                for name, upload in self._uploads.items()
                if upload.key == key
            ]

    def get_into(self, key: str, offset: int, target: memoryview, *, etag: str = "") -> None:
        data, stat = self._find(key)
        view = target.cast("B")
        self.requests["get"] += 1
        if etag and stat.etag != etag:
            raise ObjectChanged(
                f"`{self.uri(key)}` must be the object {etag}, got {stat.etag}; read it again"
            )
        if offset + view.nbytes > stat.size:
            raise StoreError(
                f"`{self.uri(key)}` must have {offset + view.nbytes} bytes, got {stat.size}"
            )
        view[:] = memoryview(data)[offset : offset + view.nbytes]

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else start + length
        data = self._find(key)[0][start:end]
        self.requests["get"] += 1
        return data

    def get(self, key: str, limit: int) -> tuple[bytes, str]:
        data, stat = self._find(key)
        if stat.size > limit:
            self.requests["get"] += 1
            raise ObjectTooLarge(
                f"`{self.uri(key)}` must be at most {limit} bytes here, got {stat.size}"
            )
        self.requests["get"] += 1
        return data, stat.etag

    def head(self, key: str) -> Stat:
        self.requests["head"] += 1
        return self._find(key)[1]

    def list(self, folder: str) -> Iterator[Stat]:
        start = key_prefix(folder)
        with self._lock:
            found = [stat for key, (_, stat) in self._objects.items() if key.startswith(start)]
        self.requests["list"] += 1
        yield from sorted(found)

    def folder(self, folder: str) -> Folder:
        start = key_prefix(folder)
        objects, folders = [], set()
        with self._lock:
            for key, (_, stat) in self._objects.items():
                if key.startswith(start):
                    head, slash, _ = key[len(start) :].partition("/")
                    if slash:
                        folders.add(start + head)
                    else:
                        objects.append(stat)
        self.requests["list"] += 1
        return Folder(sorted(objects), sorted(folders))

    def delete(self, keys: Iterable[str]) -> None:
        self.requests["delete"] += 1
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def delete_exact(self, key: str, etag: str) -> bool:
        self.requests["delete"] += 1
        with self._lock:
            is_same = key in self._objects and self._objects[key][1].etag == etag
            if is_same:
                del self._objects[key]
            return is_same

    def tidy(self, folder: str) -> None:
        """Memory has no folders."""

    def now(self) -> float:
        return self.clock()

    def _find(self, key: str) -> tuple[bytes, Stat]:
        with self._lock:
            found = self._objects.get(check_key(key))
        if found is None:
            raise ObjectMissing(f"`{self.uri(key)}` must be an object, but there is none")
        return found

    def _place(self, key: str, data: bytes, if_none_match: bool, if_match: str) -> str:
        with self._lock:
            found = self._objects.get(key)
            if if_none_match and found:
                raise ObjectExists(f"`{self.uri(key)}` must not exist yet, but does")
            if if_match and not found:
                raise ObjectMissing(f"`{self.uri(key)}` must be an object, but there is none")
            if if_match and found and found[1].etag != if_match:
                raise ObjectChanged(
                    f"`{self.uri(key)}` must be the object {if_match}, got {found[1].etag}"
                )
            etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}-{next(self._numbers)}"'
            self._objects[key] = (data, Stat(key, len(data), etag, self.clock()))
            return etag

    def _write(self, upload_id: str, number: int, data: bytes) -> None:
        with self._lock:
            if upload_id not in self._uploads:
                raise ObjectMissing(f"upload {upload_id!r} must be open, but is completed or gone")
            self._uploads[upload_id].parts[number] = data

    def _complete(self, upload_id: str, if_none_match: bool, if_match: str) -> str:
        with self._lock:
            if upload_id not in self._uploads:
                raise ObjectMissing(f"upload {upload_id!r} must be open, but is completed or gone")
            found = self._uploads[upload_id]
            data = b"".join(found.parts[number] for number in sorted(found.parts))
            etag = self._place(found.key, data, if_none_match, if_match)
            del self._uploads[upload_id]
            return etag


class MemoryMultipart:
    """An object of `MemoryStore` that is being written."""

    def __init__(self, storage: MemoryStore, key: str, upload_id: str, size: int):
        self.key = key
        self.upload_id = upload_id
        self.part_bytes = part_bytes(size)
        self.may_be_begun_twice = False
        self._storage = storage

    def write(self, number: int, data: Buffer, crc32c: int | None = None) -> None:
        content = bytes(data)
        self._storage.requests["part"] += 1
        self._storage._write(self.upload_id, number, content)

    def complete(self, *, if_none_match: bool = False, if_match: str = "") -> str:
        self._storage.requests["complete"] += 1
        return self._storage._complete(self.upload_id, if_none_match, if_match)

    def abort(self) -> None:
        self._storage.abort_upload(self.key, self.upload_id)
