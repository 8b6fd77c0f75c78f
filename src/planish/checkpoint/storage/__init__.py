"""Objects of checkpoints by key: one protocol over S3, a file system and memory.

Unlike `planish.store`, which moves whole records by URI, these back ends write in parts, read into
given memory, and write on conditions, which the commit protocol is built on.
"""

from __future__ import annotations

from planish.checkpoint.storage.base import (
    PART_BYTES,
    SINGLE_PUT_BYTES,
    Counters,
    Folder,
    Multipart,
    Stat,
    Storage,
    Upload,
    open_storage,
    part_bytes,
    upload,
)

__all__ = [
    "Counters",
    "Folder",
    "Multipart",
    "PART_BYTES",
    "SINGLE_PUT_BYTES",
    "Stat",
    "Storage",
    "Upload",
    "open_storage",
    "part_bytes",
    "upload",
]
