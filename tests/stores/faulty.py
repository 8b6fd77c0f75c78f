"""A store that fails, waits, stops or dies at a chosen request, for tests of crash consistency.

It wraps a real one and numbers its requests from 1, those of multipart writes included.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from planish.base.errors import StoreUnavailable
from planish.store.base import Multipart, Stat, Store

T = TypeVar("T")
Fault = Callable[[int, str, str], str]
"""Number, kind and key of a request -> what it suffers: "" (nothing), "fail" (not carried out),
"lost" (carried out, but its answer is lost), "stop" (neither it nor any later one is carried out),
"stop after" (it is the last one), or "kill" (SIGKILL to this process before it)."""


class Stopped(BaseException):
    """The process that uses this store is dead as far as the store can see."""


KINDS = {
    "put": "put",
    "abort_upload": "abort",
    "open_uploads": "list",
    "get_into": "get",
    "read": "get",
    "get": "get",
    "head": "head",
    "folder": "list",
    "tidy": "tidy",
    "delete_exact": "delete",
}
"""Methods of a store, and what their requests are."""


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

    def __getattr__(self, name: str) -> Any:
        """Return what the store inside has; requests suffer first."""
        found = getattr(self.inner, name)
        if name not in KINDS:
            return found
        return lambda key, *words, **options: self.suffer(
            KINDS[name], key, lambda: found(key, *words, **options)
        )

    def open_multipart(self, key: str, size: int) -> FaultyMultipart:
        """Begin an object in parts."""
        inner = self.suffer("create", key, lambda: self.inner.open_multipart(key, size))
        return FaultyMultipart(inner, self)

    def list(self, folder: str) -> Iterator[Stat]:
        """Yield every object below a folder; one request however many pages."""
        yield from self.suffer("list", folder, lambda: [*self.inner.list(folder)])

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, one request for each, so that a deletion can stop half-way."""
        for key in keys:
            self.suffer("delete", key, partial(self.inner.delete, [key]))

    def suffer(self, kind: str, key: str, act: Callable[[], T]) -> T:
        """Do what a request does, unless its fault says otherwise."""
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

    def __init__(self, inner: Multipart, store: FaultyStore):
        self._inner, self._store = inner, store

    def __getattr__(self, name: str) -> Any:
        """Return what the write inside has; requests suffer first."""
        found, kind = getattr(self._inner, name), {"write": "part"}.get(name, name)
        if kind not in ("part", "complete", "abort"):
            return found
        return lambda *words, **options: self._store.suffer(
            kind, self._inner.key, lambda: found(*words, **options)
        )


def stop_at(request: int, *, after: bool = False) -> Fault:
    """Return a fault: the process stops before, or just after, that request."""
    kind = "stop after" if after else "stop"
    return lambda number, _kind, _key: kind if number == request else ""


def once_at(request: int, fault: str) -> Fault:
    """Return a fault that only that request suffers."""
    return lambda number, _kind, _key: fault if number == request else ""
