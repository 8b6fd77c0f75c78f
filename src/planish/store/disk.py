"""What everything that writes files shares: temporary names, synced folders, errors as ours."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from planish.errors import AccessRefused, ObjectMissing, StoreError, StoreUnavailable

TEMPORARY = ".planish-tmp-"
"""Names of files that are being written begin so; nothing lists them as objects."""
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
"""What `link` fails with on file systems that have no hard links."""

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
