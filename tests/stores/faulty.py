"""A store that fails, waits, stops or dies at a chosen request, for tests of crash consistency.

It wraps a real one and numbers its requests from 1, those of multipart writes included.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from planish.base.errors import StoreUnavailable
from planish.store.base import (
    Buffer,
    Folder,
    Multipart,
    Stat,
    Store,
    Upload,
)

T = TypeVar("T")
Fault = Callable[[int, str, str], str]
"""Number, kind and key of a request -> what it suffers: "" (nothing), "fail" (not carried out),
"lost" (carried out, but its answer is lost), "stop" (neither it nor any later one is carried out),
"stop after" (it is the last one), or "kill" (SIGKILL to this process before it)."""


class Stopped(BaseException):
    """The process that uses this store is dead as far as the store can see."""


class FaultyStore:
    """A store whose requests suffer what `fault` says; a fault may also act by itself.

    Example:
        >>> from tests.stores.memory import MemoryStore
        >>> store = FaultyStore(MemoryStore(), stop_at(2))
        >>> store.put("a", b"1") != "", store.requests
        (True, 1)
    """

    def __init__(self, inner: Store, fault: Fault = lambda number, kind, key: ""):
        self.inner = inner
        self.fault = fault
        self.requests = 0
        self.log: list[tuple[str, str]] = []
        """Kind and key of each request, in order."""
        self._lock = threading.Lock()
        self._is_stopped = False

    @property
    def in_memory(self) -> bool:
        """That of the store inside."""
        return self.inner.in_memory

    @property
    def retries(self) -> Counter[str]:
        """Those of the store inside."""
        return self.inner.retries

    def uri(self, key: str) -> str:
        """Return what the store inside returns."""
        return self.inner.uri(key)

    def put(
        self, key: str, data: Buffer, *, if_none_match: bool = False, if_match: str = ""
    ) -> str:
        """Write an object as a whole."""
        return self._suffer(
            "put",
            key,
            lambda: self.inner.put(key, data, if_none_match=if_none_match, if_match=if_match),
        )

    def open_multipart(self, key: str, size: int) -> FaultyMultipart:
        """Begin an object in parts."""
        inner = self._suffer("create", key, lambda: self.inner.open_multipart(key, size))
        return FaultyMultipart(inner, self._suffer)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an upload."""
        self._suffer("abort", key, lambda: self.inner.abort_upload(key, upload_id))

    def open_uploads(self, key: str) -> list[Upload]:
        """Return the uploads of a key."""
        return self._suffer("list", key, lambda: self.inner.open_uploads(key))

    def get_into(self, key: str, offset: int, target: memoryview, *, etag: str = "") -> None:
        """Fill `target` from an object."""
        self._suffer("get", key, lambda: self.inner.get_into(key, offset, target, etag=etag))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return what there is of a range of an object."""
        return self._suffer("get", key, lambda: self.inner.read(key, start, length))

    def get(self, key: str, limit: int) -> tuple[bytes, str]:
        """Return a whole object."""
        return self._suffer("get", key, lambda: self.inner.get(key, limit))

    def head(self, key: str) -> Stat:
        """Return the facts of an object."""
        return self._suffer("head", key, lambda: self.inner.head(key))

    def list(self, folder: str) -> Iterator[Stat]:
        """Yield every object below a folder; one request however many pages."""
        yield from self._suffer("list", folder, lambda: [*self.inner.list(folder)])

    def folder(self, folder: str) -> Folder:
        """Return the direct content of a folder."""
        return self._suffer("list", folder, lambda: self.inner.folder(folder))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, one request for each, so that a deletion can stop half-way."""
        for key in keys:
            self._suffer("delete", key, lambda key=key: self.inner.delete([key]))  # type: ignore[misc]

    def tidy(self, folder: str) -> None:
        """Remove what a file system keeps of a folder."""
        self._suffer("tidy", folder, lambda: self.inner.tidy(folder))

    def now(self) -> float:
        """Return the time of the store inside."""
        return self.inner.now()

    def close(self) -> None:
        """Close the store inside."""
        self.inner.close()

    def _suffer(self, kind: str, key: str, act: Callable[[], T]) -> T:
        with self._lock:
            if self._is_stopped:
                raise Stopped
            self.requests += 1
            number = self.requests
            self.log.append((kind, key))
        found = self.fault(number, kind, key)
        if found in {"stop", "stop after"}:
            self._is_stopped = True
        if found == "stop":
            raise Stopped
        if found == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if found == "fail":
            raise StoreUnavailable(f"`{self.uri(key)}`: request {number} ({kind}) fails on purpose")
        result = act()
        if found == "stop after":
            raise Stopped
        if found == "lost":
            raise StoreUnavailable(f"`{self.uri(key)}`: the answer to request {number} is lost")
        return result


class FaultyMultipart:
    """A write in parts whose requests suffer too."""

    def __init__(
        self, inner: Multipart, suffer: Callable[[str, str, Callable[[], object]], object]
    ):
        self.key = inner.key
        self.upload_id = inner.upload_id
        self.part_bytes = inner.part_bytes
        self.may_be_begun_twice = inner.may_be_begun_twice
        self._inner = inner
        self._suffer = suffer

    def write(self, number: int, data: Buffer, crc32c: int | None = None) -> None:
        """Write one part."""
        self._suffer("part", self.key, lambda: self._inner.write(number, data, crc32c))

    def complete(self, *, if_none_match: bool = False, if_match: str = "") -> str:
        """Make the object visible."""
        return str(
            self._suffer(
                "complete",
                self.key,
                lambda: self._inner.complete(if_none_match=if_none_match, if_match=if_match),
            )
        )

    def abort(self) -> None:
        """Drop all parts."""
        self._suffer("abort", self.key, self._inner.abort)


def stop_at(request: int, *, after: bool = False) -> Fault:
    """Return a fault: the process stops before, or just after, that request."""
    kind = "stop after" if after else "stop"
    return lambda number, _kind, _key: kind if number == request else ""


def once_at(request: int, fault: str) -> Fault:
    """Return a fault that only that request suffers."""
    return lambda number, _kind, _key: fault if number == request else ""
