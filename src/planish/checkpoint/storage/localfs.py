"""Objects as files: each is written under a temporary name, synced, then given its own name.

What `open_multipart` begins is such a temporary file in the folder of its key; its name is the
upload id, so that removing it makes `complete` impossible in every process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from planish.base.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreError,
)
from planish.checkpoint.storage.base import (
    Buffer,
    Counters,
    Folder,
    Stat,
    Upload,
    check_key,
    inside,
    part_bytes,
)
from planish.store.base import file_uri
from planish.store.disk import (
    TEMPORARY,
    locked,
    place_new,
    store_error,
    sweep,
    sync_folder,
    temporary_name,
)


class LocalStorage:
    """Files below a root folder."""

    def __init__(self, root: str | Path):
        self.counters = Counters()
        self._root = Path(root).absolute()

    def uri(self, key: str) -> str:
        """Return `file:///folder/key`, percent-encoded."""
        return file_uri(self._root / key)

    def put(
        self, key: str, data: Buffer, *, if_none_match: bool = False, if_match: str = ""
    ) -> str:
        """Write an object as a whole."""
        view = memoryview(data).cast("B")
        self.counters.add("put", sent=view.nbytes)
        file = self._begin(key)
        try:
            file.write_at(0, view)
            return file.place(if_none_match, if_match)
        finally:
            file.drop()

    def open_multipart(self, key: str, size: int) -> LocalMultipart:
        """Begin an object in parts."""
        self.counters.add("create")
        return LocalMultipart(self._begin(key), size, self.counters)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Remove a temporary file."""
        self.counters.add("abort")
        if not upload_id.startswith(_mark(key)) or "/" in upload_id:
            raise StoreError(f"an upload of {key!r} must not be named {upload_id!r}")
        with _told(self.uri(key)), _if_there():
            (self._path(key).parent / upload_id).unlink()

    def open_uploads(self, key: str) -> list[Upload]:
        """Return the temporary files of a key."""
        self.counters.add("list")
        found: list[Upload] = []
        with _told(self.uri(key)), _if_there():
            for path in self._path(key).parent.glob(_mark(key) + "*"):
                with _if_there():
                    found.append(Upload(path.name, path.stat().st_mtime))
        return sorted(found)

    def get_into(self, key: str, offset: int, target: memoryview, *, etag: str = "") -> None:
        """Fill `target` from a file."""
        view = target.cast("B")
        with _told(self.uri(key)), open(self._path(key), "rb", buffering=0) as file:
            found = _stat(key, os.fstat(file.fileno())).etag
            if etag and found != etag:
                raise ObjectChanged(
                    f"`{self.uri(key)}` must be the object {etag}, got {found}; read it again"
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
        self.counters.add("get", received=view.nbytes)

    def get(self, key: str, limit: int) -> tuple[bytes, str]:
        """Return a whole file."""
        with _told(self.uri(key)), open(self._path(key), "rb") as file:
            stat = _stat(key, os.fstat(file.fileno()))
            if stat.size > limit:
                raise ObjectTooLarge(
                    f"`{self.uri(key)}` must be at most {limit} bytes here, got {stat.size}"
                )
            data = file.read(limit)
        self.counters.add("get", received=len(data))
        return data, stat.etag

    def head(self, key: str) -> Stat:
        """Return the facts of a file."""
        self.counters.add("head")
        path = self._path(key)
        with _told(self.uri(key)):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder")
            return _stat(key, path.stat())

    def list(self, folder: str) -> Iterator[Stat]:
        """Yield every file below a folder."""
        self.counters.add("list")
        found: list[Stat] = []
        waiting = [folder]
        while waiting:
            direct = self._scan(waiting.pop())
            found += direct.objects
            waiting += direct.folders
        yield from sorted(found)

    def folder(self, folder: str) -> Folder:
        """Return the direct content of a folder."""
        self.counters.add("list")
        direct = self._scan(folder)
        return Folder(sorted(direct.objects), sorted(direct.folders))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files."""
        self.counters.add("delete")
        for key in keys:
            path = self._path(key)
            with _told(self.uri(key)), _if_there(), locked(path.parent):
                path.unlink()

    def tidy(self, folder: str) -> None:
        """Remove temporary files and empty folders."""
        inside(folder)
        if not folder:
            return
        with _told(self.uri(folder)):
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

    def close(self) -> None:
        """Files are closed after each call."""

    def _path(self, key: str) -> Path:
        name = check_key(key).rpartition("/")[2]
        if name.startswith(TEMPORARY):
            raise StoreError(f"a name must not begin with {TEMPORARY!r}, got {key!r}")
        return self._root / key

    def _begin(self, key: str) -> _Unfinished:
        return _Unfinished(self._path(key), key, self.uri(key))

    def _scan(self, folder: str) -> Folder:
        start = inside(folder)
        direct = Folder([], [])
        try:
            with _told(self.uri(folder)), os.scandir(self._root / folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        direct.folders.append(start + entry.name)
                    elif entry.is_file() and not entry.name.startswith(TEMPORARY):
                        with contextlib.suppress(FileNotFoundError):
                            direct.objects.append(_stat(start + entry.name, entry.stat()))
        except ObjectMissing:
            pass
        return direct


class LocalMultipart:
    """A file that is being written at its places by several threads."""

    def __init__(self, file: _Unfinished, size: int, counters: Counters):
        self.key = file.key
        self.upload_id = file.path.name
        self.part_bytes = part_bytes(size)
        self.may_have_twin = False
        self._file = file
        self._counters = counters

    def write(self, number: int, data: Buffer, crc32c: int | None = None) -> None:
        """Write one part at its place."""
        view = memoryview(data).cast("B")
        self._counters.add("part", sent=view.nbytes)
        self._file.write_at((number - 1) * self.part_bytes, view)

    def complete(self, *, if_none_match: bool = False, if_match: str = "") -> str:
        """Give the file its name."""
        self._counters.add("complete")
        etag = self._file.place(if_none_match, if_match)
        self._file.drop()
        return etag

    def abort(self) -> None:
        """Remove the file unless it has its name."""
        self._counters.add("abort")
        self._file.drop()


class _Unfinished:
    """A file without its name yet."""

    def __init__(self, target: Path, key: str, uri: str):
        self.key = key
        self._target = target
        self._uri = uri
        self.path = target.parent / temporary_name(_digest(key))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _told(uri):
            for left in range(3, -1, -1):
                _make_folder(target.parent)
                try:
                    self._descriptor = os.open(self.path, flags, 0o666)
                    break
                except FileNotFoundError:  # `tidy` has removed the folder meanwhile
                    if not left:
                        raise

    def write_at(self, offset: int, view: memoryview) -> None:
        """Write bytes at their place."""
        with _told(self._uri):
            while view.nbytes:
                count = os.pwrite(self._descriptor, view, offset)
                view, offset = view[count:], offset + count

    def place(self, if_none_match: bool, if_match: str) -> str:
        """Sync the bytes and give the file its name; return its entity tag."""
        with _told(self._uri):
            os.fsync(self._descriptor)
            etag = _stat(self.key, os.fstat(self._descriptor)).etag
            try:
                if if_none_match:
                    place_new(self.path, self._target)
                else:
                    with locked(self._target.parent):
                        self._check(if_match)
                        os.replace(self.path, self._target)
            except FileExistsError:
                raise ObjectExists(f"`{self._uri}` must not exist yet, but does") from None
            except IsADirectoryError:
                raise StoreError(f"`{self._uri}` must not be a folder; remove it first") from None
            sync_folder(self._target.parent)
            sweep(self._target.parent)
        return etag

    def drop(self) -> None:
        """Close the file and remove its temporary name."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        with _told(self._uri), _if_there():
            self.path.unlink()

    def _check(self, if_match: str) -> None:
        if not if_match:
            return
        found = _stat(self.key, self._target.stat()).etag
        if found != if_match:
            raise ObjectChanged(f"`{self._uri}` must be the object {if_match}, got {found}")


def _mark(key: str) -> str:
    """Return how the temporary names of a key begin."""
    return f"{TEMPORARY}{_digest(key)}-"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _stat(key: str, found: os.stat_result) -> Stat:
    etag = f'"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"'
    return Stat(key, found.st_size, etag, found.st_mtime)


def _make_folder(folder: Path) -> None:
    """Make a folder and sync the one that holds it."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file") from None
    sync_folder(folder.parent)


@contextlib.contextmanager
def _if_there() -> Iterator[None]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield


@contextlib.contextmanager
def _told(uri: str) -> Iterator[None]:
    """Turn the operating system's errors into ours."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise store_error(uri, error) from None
