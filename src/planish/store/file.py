"""Objects as files of a local or mounted file system, replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from planish.base import telemetry
from planish.base.errors import (
    ConfigError,
    ObjectExists,
    StoreError,
)
from planish.store.base import parse_uri
from planish.store.disk import (
    TEMPORARY,
    place_new,
    store_error,
    sweep,
    sync_folder,
    temporary_name,
)


class FileStore:
    """`file:///folder/...`: each object is one file."""

    def read(self, uri: str, start: int = 0, length: int | None = None) -> bytes:
        """Return at most `length` bytes from byte `start`."""
        with _told(uri), open(self._path(uri), "rb") as file:
            file.seek(start)
            data = file.read() if length is None else file.read(length)
        telemetry.count("planish_store_read_bytes_total", len(data), scheme="file")
        return data

    def write(self, uri: str, data: bytes) -> None:
        """Put an object in place as a whole."""
        self._place(uri, lambda temporary: _write_bytes(temporary, data), os.replace)

    def create(self, uri: str, data: bytes) -> None:
        """Write an object only if there is none yet."""
        try:
            self._place(uri, lambda temporary: _write_bytes(temporary, data), place_new)
        except FileExistsError:
            raise ObjectExists(
                f"`{uri}` must not exist yet; another process has created it"
            ) from None

    def write_file(self, uri: str, path: Path) -> None:
        """Write an object from a local file of any size."""
        self._place(uri, lambda temporary: _copy(path, temporary), os.replace)

    def read_file(self, uri: str, path: Path) -> None:
        """Copy an object of any size to a local file."""
        with _told(uri):
            _copy(self._path(uri), path)

    def size(self, uri: str) -> int:
        """Return the number of bytes of an object."""
        path = self._path(uri)
        with _told(uri):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder")
            return path.stat().st_size

    def exists(self, uri: str) -> bool:
        """Return whether there is an object."""
        with _told(uri):
            return self._path(uri).is_file()

    def list(self, prefix_uri: str) -> list[str]:
        """Return the URIs of all objects below a folder, sorted."""
        folder = self._path(prefix_uri)
        found: list[str] = []
        with _told(prefix_uri):
            for parent, _, names in os.walk(folder, onerror=_raise_unless_missing):
                # The folder as the caller spells it; below it only what would be decoded is not.
                below = os.path.relpath(parent, folder).replace("%", "%25")
                base = prefix_uri.rstrip("/") + ("" if below == "." else f"/{below}")
                kept = (n.replace("%", "%25") for n in names if not n.startswith(TEMPORARY))
                found += [f"{base}/{name}" for name in kept]
        return sorted(found)

    def delete(self, uri: str) -> None:
        """Remove an object; an absent one is no error."""
        with _told(uri), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._path(uri).unlink()

    def local_path(self, uri: str) -> Path:
        """Return where the object or folder lies."""
        return self._path(uri)

    def _path(self, uri: str) -> Path:
        address = parse_uri(uri)
        if address.scheme != "file":
            raise ConfigError(f"a file store needs a file URI, got {uri!r}")
        return Path("/" + address.key)

    def _place(
        self, uri: str, fill: Callable[[Path], None], publish: Callable[[Path, Path], None]
    ) -> None:
        path = self._path(uri)
        with _told(uri):
            _make_folder(path.parent, uri)
            temporary = path.parent / temporary_name()
            try:
                fill(temporary)
                size = temporary.stat().st_size
                publish(temporary, path)
                sync_folder(path.parent)
                sweep(path.parent)
            except IsADirectoryError:
                raise StoreError(f"`{uri}` must not be a folder; remove it first") from None
            finally:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
        telemetry.count("planish_store_written_bytes_total", size, scheme="file")


def _make_folder(folder: Path, uri: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StoreError(
            f"`{uri}` must lie below folders, but part of its path is a file; remove that file"
        ) from None


def _write_bytes(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as reader, open(target, "wb") as writer:
        shutil.copyfileobj(reader, writer, 8 << 20)
        writer.flush()
        os.fsync(writer.fileno())


def _raise_unless_missing(error: OSError) -> None:
    if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
        raise error


@contextlib.contextmanager
def _told(uri: str) -> Iterator[None]:
    """Turn the operating system's errors into ours; FileExistsError passes."""
    try:
        yield
    except (FileExistsError, StoreError):
        raise
    except OSError as error:
        raise store_error(uri, error) from None
