"""What everything that writes files shares: temporary names, synced folders, errors as ours."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from planish.base.errors import AccessRefused, ObjectMissing, StoreError, StoreUnavailable
from planish.store.processes import process_space, process_start

TEMPORARY = ".planish-tmp-"
"""Names of files that are being written begin so; nothing lists them as objects."""
ABANDONED_SECONDS = 86_400.0
"""A temporary file whose writer cannot be looked for from here is removed after so long."""

_WRITER = re.compile(r"-([0-9a-f]{8})\.(\d{1,10})\.(\d{1,20})-[0-9a-f]{16}$")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_TRANSIENT = {errno.ESTALE, errno.ETIMEDOUT, errno.EIO, errno.EAGAIN, errno.EINTR}
_FULL = {errno.ENOSPC, errno.EDQUOT}


def store_error(uri: str, error: OSError) -> StoreError:
    """Return the error of ours that tells what the operating system said of an object.

    Example:
        >>> type(store_error("file:///a", FileNotFoundError(errno.ENOENT, "no such"))).__name__
        'ObjectMissing'
    """
    reason = error.strerror or str(error)
    if error.errno in _MISSING:
        return ObjectMissing(f"`{uri}` must be an object, but there is none ({reason})")
    if error.errno in _REFUSED:
        return AccessRefused(
            f"`{uri}` must be readable and writable by this user, got {reason!r}; "
            "mend the permissions of the folder"
        )
    if error.errno in _FULL:
        return StoreError(f"`{uri}` can not be written: {reason}; make room")
    if error.errno in _TRANSIENT:
        return StoreUnavailable(f"`{uri}` can not be reached now ({reason})")
    return StoreError(f"`{uri}`: {reason}")


def temporary_name(mark: str = "") -> str:
    """Return a new name of a file that this process writes; the name tells which process.

    Args:
        mark: hexadecimal digits that all temporary files of one object share.
    """
    pid = os.getpid()
    return f"{TEMPORARY}{mark}-{_space()}.{pid}.{process_start(pid)}-{secrets.token_hex(8)}"


def _space() -> str:
    return hashlib.sha256(process_space().encode()).hexdigest()[:8]


def sweep(folder: Path) -> None:
    """Remove the temporary files of a folder whose writers are dead."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):  # its writer has removed it, or may only read
                    if _is_abandoned(entry):
                        os.unlink(entry.path)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    writer = _WRITER.search(entry.name)
    if writer and process_space() and writer[1] == _space():
        return process_start(int(writer[2])) != int(writer[3])
    return time.time() - entry.stat().st_mtime > ABANDONED_SECONDS


def place_new(temporary: Path, path: Path) -> None:
    """Give a written file its name; raises FileExistsError where something has that name."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Some mounted file systems have no hard links; there the lock alone keeps others out.
        with locked(path.parent):
            if path.exists():
                raise FileExistsError(errno.EEXIST, str(path)) from None
            os.replace(temporary, path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from replacing or removing files of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that can not sync folders
            raise
    finally:
        os.close(descriptor)
