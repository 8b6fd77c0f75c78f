"""Journal of an attempt: a lease, a list of uploads to abort, and a fence against its owner.

An attempt is one try to save a checkpoint; its objects lie below `<path>/a-<attempt>/`. Each
process that writes there keeps one small object, `journal/<name>.json`. Its age is the lease, and
it names the uploads that a collection aborts if the process dies. The owner replaces only its own
last version of the journal; a collection first writes a version that is marked as fenced. From then
on the owner can not announce an upload, so it can not commit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from planish.base import telemetry
from planish.base.errors import (
    ConfigError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    SaveFailed,
    StoreError,
)
from planish.store import Store, check_key

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 60.0
COORDINATOR = "commit"
"""Name of the committing process's journal; its fence prevents the commit."""
COMMIT = "COMMIT"
_LIMIT_BYTES = 16 << 20
_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ATTEMPT = re.compile(f"[{_DIGITS}]{{26}}")


def new_attempt() -> str:
    """Return 26 characters that sort by time: 48 bits of milliseconds, then 80 random bits."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "".join(_DIGITS[(number >> shift) & 31] for shift in range(125, -1, -5))


def is_attempt(text: object) -> bool:
    """Return whether `text` has the form of an attempt."""
    return isinstance(text, str) and _ATTEMPT.fullmatch(text) is not None


def started(attempt: str) -> float:
    """Return the start of an attempt, seconds since 1970 by the clock of its coordinator."""
    number = 0
    for digit in attempt[:10]:
        number = number << 5 | _DIGITS.index(digit)
    return number / 1000


def attempt_folder(path: str, attempt: str) -> str:
    """Return the key of the folder that holds the objects of an attempt."""
    return join(path, f"a-{attempt}")


def join(path: str, name: str) -> str:
    """Return the key of `name` in a folder; the folder may be the root."""
    return f"{path}/{name}" if path else name


@dataclass(frozen=True)
class JournalContent:
    """The content of a journal."""

    keys: tuple[str, ...] = ()
    """Objects that are or will be written in parts, relative to the checkpoint's folder."""
    uploads: tuple[tuple[str, str], ...] = ()
    host: str = ""
    pid: int = 0
    started: float = 0.0
    fenced: bool = False
    """True once a process has begun to remove the attempt."""

    def encode(self) -> bytes:
        """Return JSON."""
        return json.dumps({"format": 1, **asdict(self)}).encode()

    @staticmethod
    def decode(data: bytes, attempt: str) -> JournalContent:
        """Parse a journal; a damaged one counts as empty: its attempt is removed by age alone."""
        try:
            fields = json.loads(data.decode())
            keys = tuple(key for key in fields["keys"] if _is_own(key, attempt))
            uploads = tuple(
                (str(key), str(upload))
                for key, upload in fields["uploads"]
                if _is_own(key, attempt) and isinstance(upload, str)
            )
            host, pid = str(fields["host"]), int(fields["pid"])
            started, fenced = float(fields["started"]), bool(fields["fenced"])
            return JournalContent(keys, uploads, host, pid, started, fenced)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return JournalContent()


def _is_own(key: object, attempt: str) -> bool:
    """Return whether an attempt may write `key`: its own objects and the commit."""
    if not isinstance(key, str):
        return False
    with contextlib.suppress(ConfigError):
        return key == COMMIT or check_key(key).startswith(f"a-{attempt}/")
    return False


class Journal:
    """Journal of one process for an attempt; several threads may use it."""

    def __init__(self, storage: Store, path: str, attempt: str, *, name: str = COORDINATOR):
        self._storage = storage
        self._path = path
        self.attempt = attempt
        self.key = join(attempt_folder(path, attempt), f"journal/{name}.json")
        self._record = JournalContent(
            host=socket.gethostname(), pid=os.getpid(), started=round(time.time(), 3)
        )
        self._etag = ""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, keys: Iterable[str] = ()) -> None:
        """Write the journal, before any data; `keys` are the full keys of multipart objects.

        Raises `SaveFailed` if the attempt is fenced, or another process uses this name.
        """
        self._write(keys=keys)

    def add(self, uploads: Iterable[tuple[str, str]]) -> None:
        """Announce uploads (full key, upload id) before they are completed; errors as `begin`."""
        self._write(uploads=uploads)

    def refresh(self) -> None:
        """Renew the lease; errors as `begin`."""
        self._write()

    def keep(self, seconds: float = REFRESH_SECONDS) -> None:
        """Renew the lease from a thread every `seconds`, until `close`."""

        def renew() -> None:
            while not self._closed.wait(seconds):
                try:
                    self.refresh()
                except SaveFailed:
                    return  # the next `add` raises it for the caller
                except StoreError as error:
                    # The lease is far longer than `seconds`, and the next renewal may succeed.
                    logger.warning("%s", telemetry.event("journal_not_renewed", reason=str(error)))

        self._thread = threading.Thread(target=renew, name="journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop renewals; the journal stays until the attempt is committed or removed."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, keys: Iterable[str] = (), uploads: Iterable[tuple[str, str]] = ()) -> None:
        """Add keys and uploads, and write the journal if the stored version is our last one."""
        with self._lock:
            old, start = self._record, join(self._path, "")
            record = replace(
                old,
                keys=(*old.keys, *(key.removeprefix(start) for key in keys)),
                uploads=(*old.uploads, *((key.removeprefix(start), id_) for key, id_ in uploads)),
            )
            try:
                self._etag = self._storage.put(
                    self.key, record.encode(), if_none_match=not self._etag, if_match=self._etag
                )
            except (ObjectExists, ObjectChanged, ObjectMissing):
                raise SaveFailed(
                    f"attempt {self.attempt} must not be cleared away while it is written, but "
                    f"another process has written `{self._storage.uri(self.key)}`; raise the "
                    "collection's `grace_s`"
                ) from None
            self._record = record


def announced(storage: Store, path: str, attempt: str) -> list[tuple[str, str]]:
    """Return (full key, upload id) of all uploads that the journals of an attempt name."""
    uploads: list[tuple[str, str]] = []
    for stat in storage.list(join(attempt_folder(path, attempt), "journal")):
        with contextlib.suppress(ObjectMissing, ObjectTooLarge):
            data, _ = storage.get(stat.key, _LIMIT_BYTES)
            record = JournalContent.decode(data, attempt)
            uploads += [(join(path, inner), upload) for inner, upload in record.uploads]
    return uploads


def fence(storage: Store, path: str, attempt: str) -> list[tuple[str, str]]:
    """Fence an attempt: no upload except the returned ones can commit it any more.

    Returns:
        (full key, upload id) of all uploads that its journals name or the store lists for their
        keys. Once these are aborted, an attempt that COMMIT does not name stays uncommitted.

    Raises:
        SaveFailed: the owner keeps writing, so the attempt is alive.
    """
    folder = attempt_folder(path, attempt)
    decider = join(folder, f"journal/{COORDINATOR}.json")
    keys = {stat.key for stat in storage.list(join(folder, "journal"))} | {decider}
    uploads: set[tuple[str, str]] = set()
    for key in sorted(keys):
        record = _fence_one(storage, key, attempt)
        uploads |= {(join(path, inner), upload) for inner, upload in record.uploads}
        for inner in record.keys:
            full = join(path, inner)
            uploads |= {(full, begun.upload_id) for begun in storage.open_uploads(full)}
    return sorted(uploads)


def _fence_one(storage: Store, key: str, attempt: str) -> JournalContent:
    for _ in range(5):
        try:
            data, etag = storage.get(key, _LIMIT_BYTES)
        except ObjectMissing:
            data, etag = b"", ""
        except ObjectTooLarge:
            data, etag = b"", storage.head(key).etag
        record = JournalContent.decode(data, attempt)
        if record.fenced:
            return record
        marked = replace(record, fenced=True).encode()
        try:
            storage.put(key, marked, if_none_match=not etag, if_match=etag)
        except (ObjectExists, ObjectChanged, ObjectMissing):
            continue
        return record
    raise SaveFailed(f"`{storage.uri(key)}` must not change while it is cleared away, but does")


@contextlib.contextmanager
def journaled(
    storage: Store, path: str, attempt: str, keys: Iterable[str] = ()
) -> Iterator[Journal]:
    """Keep the coordinator's journal of an attempt while the body runs."""
    journal = Journal(storage, path, attempt)
    journal.begin(keys)
    journal.keep()
    try:
        yield journal
    finally:
        journal.close()
