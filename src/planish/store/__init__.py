"""Bytes by URI or by key, on a file system or in an S3 bucket.

`read`, `write` and the like take the URI of an object; `open_store` returns the store itself, for
writes in parts and on a condition.
"""

from planish.store.base import (
    PART_BYTES,
    SINGLE_PUT_BYTES,
    Counters,
    Folder,
    Multipart,
    Stat,
    Store,
    Upload,
    check_key,
    file_path,
    file_uri,
    normal_uri,
    parse_uri,
    part_bytes,
    uri_of,
)
from planish.store.objects import (
    abort_lost_uploads,
    create,
    delete,
    exists,
    list_uris,
    local_path,
    open_store,
    read,
    read_file,
    size,
    upload,
    write,
    write_file,
)

__all__ = [
    "PART_BYTES",
    "SINGLE_PUT_BYTES",
    "Counters",
    "Folder",
    "Multipart",
    "Stat",
    "Store",
    "Upload",
    "abort_lost_uploads",
    "check_key",
    "create",
    "delete",
    "exists",
    "file_path",
    "file_uri",
    "list_uris",
    "local_path",
    "normal_uri",
    "open_store",
    "parse_uri",
    "part_bytes",
    "read",
    "read_file",
    "size",
    "upload",
    "uri_of",
    "write",
    "write_file",
]
