"""Objects as files: write each under a temporary name, sync it, then rename it.

A write in parts is such a temporary file in the folder of its key. The file's name is the upload
id, so after its removal `complete` fails in every process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from planish.base.errors import (
    AccessRefused,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreError,
    StoreUnavailable,
)
from planish.store.base import (
    TIMEOUT_SECONDS,
    Buffer,
    Folder,
    Stat,
    Upload,
    check_key,
    file_uri,
    key_prefix,
    part_bytes,
)
from planish.store.processes import process_space, process_start

TEMPORARY = ".planish-tmp-"
"""Prefix of files that are still being written; no listing shows them as objects."""
ABANDONED_SECONDS = 86_400.0
"""Age in seconds at which a temporary file is removed if its writer cannot be checked."""
SWEEP_SECONDS = 1.0
"""Least seconds between two searches of a process for temporary files in one folder."""
MAX_SWEPT = 4096
"""Number of folders whose last search a process remembers."""

_SWEPT: dict[Path, float] = {}
_WRITER = re.compile(r"-([0-9a-f]{8})\.(\d{1,10})\.(\d{1,20})-[0-9a-f]{16}$")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_FAULTS: tuple[tuple[set[int], type[StoreError], str], ...] = (
    (
        {errno.ENOENT, errno.ENOTDIR, errno.EISDIR},
        ObjectMissing,
        "`{uri}` must be an object, but there is none ({reason})",
    ),
    (
        {errno.EACCES, errno.EPERM, errno.EROFS},
        AccessRefused,
        "`{uri}` must be readable and writable by this user, got {reason!r}; mend the permissions "
        "of the folder",
    ),
    (
        {errno.ENOSPC, errno.EDQUOT},
        StoreError,
        "`{uri}` can not be written: {reason}; make room",
    ),
    (
        {errno.ESTALE, errno.ETIMEDOUT, errno.EIO, errno.EAGAIN, errno.EINTR},
        StoreUnavailable,
        "`{uri}` can not be reached now ({reason})",
    ),
)
"""Errors of the operating system, our error for them and its text."""
_ABSENT_IS_FINE = contextlib.suppress(FileNotFoundError, NotADirectoryError)


def connect(bucket: str = "", *, timeout_s: float = TIMEOUT_SECONDS) -> FileStore:
    """Return the store of all files of this machine; a key is a path without its first slash."""
    return FileStore("/")


class FileStore:
    """Files below a root folder."""

    in_memory = False

    def __init__(self, root: str | Path = "/"):
        self.retries: Counter[str] = Counter()
        self._root = Path(root).absolute()

    def uri(self, key: str) -> str:
        """Return `file:///folder/key`, percent-encoded."""
        return file_uri(self._root / key)

    def put(
        self, key: str, data: Buffer, *, if_none_match: bool = False, if_match: str = ""
    ) -> str:
        """Write an object as a whole."""
        view = memoryview(data).cast("B")
        file = self.open_multipart(key, view.nbytes)
        try:
            file.write(1, view)
            return file.complete(if_none_match=if_none_match, if_match=if_match)
        finally:
            file.abort()

    def open_multipart(self, key: str, size: int) -> FileMultipart:
        """Start to write an object in parts."""
        return FileMultipart(self._path(key), key, self.uri(key), size)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Remove a temporary file."""
        if not upload_id.startswith(_temporary_prefix(key)) or "/" in upload_id:
            raise StoreError(f"an upload of {key!r} must not be named {upload_id!r}")
        with _store_errors(self.uri(key)), _ABSENT_IS_FINE:
            (self._path(key).parent / upload_id).unlink()

    def open_uploads(self, key: str) -> list[Upload]:
        """Return the temporary files of a key."""
        uploads: list[Upload] = []
        with _store_errors(self.uri(key)), _ABSENT_IS_FINE:
            for path in self._path(key).parent.glob(_temporary_prefix(key) + "*"):
                with _ABSENT_IS_FINE:
                    uploads.append(Upload(path.name, path.stat().st_mtime))
        return sorted(uploads)

    def get_into(self, key: str, offset: int, target: memoryview, *, etag: str = "") -> None:
        """Fill `target` from a file."""
        view = target.cast("B")
        with _store_errors(self.uri(key)), open(self._path(key), "rb", buffering=0) as file:
            present = _stat(key, os.fstat(file.fileno())).etag
            if etag and present != etag:
                raise ObjectChanged(
                    f"`{self.uri(key)}` must be the object {etag}, got {present}; read it again"
                )
            done = 0
            while done < view.nbytes:
                count = os.preadv(file.fileno(), [view[done:]], offset + done)
                if not count:
                    raise StoreError(
                        f"`{self.uri(key)}` must have {offset + view.nbytes} bytes, "
                        f"got {offset + done}"
                    )
                done += count

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a range of a file, up to its end."""
        with _store_errors(self.uri(key)), open(self._path(key), "rb") as file:
            file.seek(start)
            data = file.read(-1 if length is None else length)
        return data

    def get(self, key: str, limit: int) -> tuple[bytes, str]:
        """Return a whole file."""
        with _store_errors(self.uri(key)), open(self._path(key), "rb") as file:
            facts = _stat(key, os.fstat(file.fileno()))
            if facts.size > limit:
                raise ObjectTooLarge(
                    f"`{self.uri(key)}` must be at most {limit} bytes here, got {facts.size}"
                )
            data = file.read(limit)
        return data, facts.etag

    def head(self, key: str) -> Stat:
        """Return the metadata of a file; a folder or a device counts as missing."""
        with _store_errors(self.uri(key)):
            facts = self._path(key).stat()
            if not stat.S_ISREG(facts.st_mode):
                raise IsADirectoryError(errno.EISDIR, "no regular file")
            return _stat(key, facts)

    def list(self, folder: str) -> Iterator[Stat]:
        """Yield every file below a folder."""
        files: list[Stat] = []
        waiting = [folder]
        while waiting:
            direct = self._scan(waiting.pop())
            files += direct.objects
            waiting += direct.folders
        yield from sorted(files)

    def folder(self, folder: str) -> Folder:
        """Return the direct content of a folder."""
        direct = self._scan(folder)
        return Folder(sorted(direct.objects), sorted(direct.folders))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files."""
        for key in keys:
            path = self._path(key)
            with _store_errors(self.uri(key)), _ABSENT_IS_FINE, _locked(path.parent):
                path.unlink()

    def delete_exact(self, key: str, etag: str) -> bool:
        """Remove a file that has not changed."""
        path = self._path(key)
        with _store_errors(self.uri(key)), _ABSENT_IS_FINE, _locked(path.parent):
            if _stat(key, path.stat()).etag == etag:
                path.unlink()
                return True
        return False

    def tidy(self, folder: str) -> None:
        """Remove temporary files and empty folders."""
        if not key_prefix(folder):
            return
        with _store_errors(self.uri(folder)):
            for parent, _, names in os.walk(self._root / folder, topdown=False):
                for name in names:
                    if name.startswith(TEMPORARY):
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(os.path.join(parent, name))
                with contextlib.suppress(OSError):  # not empty, or gone
                    os.rmdir(parent)
            with contextlib.suppress(OSError):
                os.rmdir((self._root / folder).parent)

    def now(self) -> float:
        """Return the time of this machine."""
        return time.time()

    def _path(self, key: str) -> Path:
        name = check_key(key, is_file=True).rpartition("/")[2]
        if name.startswith(TEMPORARY):
            raise StoreError(f"a name must not begin with {TEMPORARY!r}, got {key!r}")
        return self._root / key

    def _scan(self, folder: str) -> Folder:
        start = key_prefix(folder, is_file=True)
        direct = Folder([], [])
        try:
            with _store_errors(self.uri(folder)), os.scandir(self._root / folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        direct.folders.append(start + entry.name)
                    elif entry.is_file() and not entry.name.startswith(TEMPORARY):
                        with contextlib.suppress(FileNotFoundError):
                            direct.objects.append(_stat(start + entry.name, entry.stat()))
        except ObjectMissing:
            pass
        return direct


class FileMultipart:
    """A temporary file; several threads write its parts at their offsets."""

    may_be_begun_twice = False

    def __init__(self, target: Path, key: str, uri: str, size: int):
        self.key = key
        self.part_bytes = part_bytes(size)
        self._target = target
        self._uri = uri
        self._path = target.parent / temporary_name(_digest(key))
        self.upload_id = self._path.name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _store_errors(uri):
            for tries_left in range(3, -1, -1):
                try:
                    _make_folder(target.parent, uri)
                    self._descriptor = os.open(self._path, flags, 0o666)
                    break
                except FileNotFoundError:  # `tidy` has removed a folder meanwhile
                    if not tries_left:
                        raise

    def write(self, number: int, data: Buffer, crc32c: int | None = None) -> None:
        """Write one part at its offset."""
        view, offset = memoryview(data).cast("B"), (number - 1) * self.part_bytes
        with _store_errors(self._uri):
            while view.nbytes:
                count = os.pwrite(self._descriptor, view, offset)
                view, offset = view[count:], offset + count

    def complete(self, *, if_none_match: bool = False, if_match: str = "") -> str:
        """Sync the bytes and rename the file."""
        folder = self._target.parent
        with _store_errors(self._uri):
            os.fsync(self._descriptor)
            etag = _stat(self.key, os.fstat(self._descriptor)).etag
            try:
                if if_none_match:
                    _place_new(self._path, self._target)
                else:
                    with _locked(folder):
                        present = _stat(self.key, self._target.stat()).etag if if_match else ""
                        if present != if_match:
                            raise ObjectChanged(
                                f"`{self._uri}` must be the object {if_match}, got {present}"
                            )
                        os.replace(self._path, self._target)
            except FileExistsError:
                raise ObjectExists(
                    f"`{self._uri}` must not exist yet, but does; another process has created it"
                ) from None
            except IsADirectoryError:
                raise StoreError(f"`{self._uri}` must not be a folder; remove it first") from None
            _sync_folder(folder)
            _sweep(folder)
        self.abort()
        return etag

    def abort(self) -> None:
        """Remove the temporary file unless it is complete."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        with _store_errors(self._uri), _ABSENT_IS_FINE:
            self._path.unlink()


def temporary_name(mark: str = "") -> str:
    """Return a new temporary name, which identifies this process.

    Args:
        mark: hexadecimal digits that all temporary files of one object share.
    """
    pid = os.getpid()
    return f"{TEMPORARY}{mark}-{_space()}.{pid}.{process_start(pid)}-{secrets.token_hex(8)}"


def _temporary_prefix(key: str) -> str:
    return f"{TEMPORARY}{_digest(key)}-"


def _digest(key: str) -> str:
    return hashlib.sha256(os.fsencode(key)).hexdigest()[:16]


def _space() -> str:
    return hashlib.sha256(process_space().encode()).hexdigest()[:8]


def _sweep(folder: Path) -> None:
    """Remove temporary files of dead writers in a folder, at most once per `SWEEP_SECONDS`."""
    looked, now = _SWEPT.get(folder, -math.inf), time.monotonic()
    if now - looked < SWEEP_SECONDS:
        return
    if len(_SWEPT) >= MAX_SWEPT:
        _SWEPT.clear()
    _SWEPT[folder] = now
    with _ABSENT_IS_FINE, os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(TEMPORARY):
                continue
            with contextlib.suppress(OSError):  # writer removed it, or no write access
                writer = _WRITER.search(entry.name)
                if writer and process_space() and writer[1] == _space():
                    is_abandoned = process_start(int(writer[2])) != int(writer[3])
                else:
                    is_abandoned = time.time() - entry.stat().st_mtime > ABANDONED_SECONDS
                if is_abandoned:
                    os.unlink(entry.path)


def _place_new(temporary: Path, path: Path) -> None:
    """Give a written file its final name; raises FileExistsError if the name exists."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Some mounted file systems have no hard links; there only the lock excludes other writers.
        with _locked(path.parent):
            if path.exists():
                raise FileExistsError(errno.EEXIST, str(path)) from None
            os.replace(temporary, path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from replacing or removing files of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_folder(folder: Path, uri: str) -> None:
    """Make a folder and those above it, and make their names durable."""
    if folder.is_dir():
        return
    _make_folder(folder.parent, uri)
    try:
        folder.mkdir(exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StoreError(
            f"`{uri}` must lie below folders, but part of its path is a file; remove that file"
        ) from None
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _stat(key: str, facts: os.stat_result) -> Stat:
    etag = f'"{facts.st_ino:x}-{facts.st_mtime_ns:x}-{facts.st_size:x}"'
    return Stat(key, facts.st_size, etag, facts.st_mtime)


@contextlib.contextmanager
def _store_errors(uri: str) -> Iterator[None]:
    """Turn the operating system's errors about an object into ours; FileExistsError passes."""
    try:
        yield
    except (FileExistsError, StoreError):
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        for numbers, kind, text in _FAULTS:
            if error.errno in numbers:
                raise kind(text.format(uri=uri, reason=reason)) from None
        raise StoreError(f"`{uri}`: {reason}") from None
