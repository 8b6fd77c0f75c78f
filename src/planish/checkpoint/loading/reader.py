"""Opening of committed checkpoints, and verified reads of their bytes.

A range is widened to blocks of 1 MiB, so that the checksums in the metadata cover every byte that
leaves this module. The module knows neither tensors nor ranks, and needs no torch.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3 (global metadata first, then byte ranges).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    ObjectChanged,
    ObjectMissing,
    StoreError,
)
from planish.checkpoint.commit.commit import Commit, read_commit, read_meta, require_commit
from planish.checkpoint.commit.journal import attempt_folder, join
from planish.checkpoint.format import metafile
from planish.checkpoint.format.metafile import BLOCK, Metadata, check_blocks, widen
from planish.store import Store, open_store

MAX_DECODED_BYTES = 16 << 30
"""Most bytes of decoded metadata, enough for about 100 million shards; more is refused."""
Progress = Callable[[int, int], None]
"""Called with the bytes done and in all."""
MAX_FILE_BYTES = 1 << 30
"""Largest file that `read_file` reads."""
_TRIES = 3


@dataclass
class Opened:
    """A committed checkpoint whose metadata has been read and verified."""

    storage: Store
    path: str
    """Key of its folder in the store."""
    commit: Commit
    metadata: Metadata

    @property
    def uri(self) -> str:
        """URI of the checkpoint."""
        return self.storage.uri(self.path)

    @property
    def roles(self) -> list[str]:
        """Names of the roles that have tensors, sorted."""
        return sorted(set(self.metadata.tensors.roles))

    @property
    def pin(self) -> str:
        """Pin: `<uri>#sha256=<digest>`."""
        return f"{self.uri}#sha256={self.commit.meta_sha256}"

    def key(self, file: int) -> str:
        """Return the key of a file of the metadata in the storage."""
        return self.folder_key(self.metadata.files.keys[file])

    def folder_key(self, name: str) -> str:
        """Return the key of an object that is named relative to the folder of the attempt."""
        return join(attempt_folder(self.path, self.commit.attempt), name)


def split_place(place: str) -> tuple[str, str]:
    """Return (uri, sha256 or empty) of `<uri>` or `<uri>#sha256=<digest>`."""
    uri, _, digest = place.partition("#sha256=")
    return uri.rstrip("/"), digest


def read_metadata(place: str, storage: Store | None = None) -> tuple[Store, str, Commit, bytes]:
    """Return store, folder, COMMIT and verified metadata; errors as `open_state`."""
    uri, digest = split_place(place)
    store, path = locate(uri, storage)
    for _ in range(_TRIES):
        commit = require_commit(store, path)
        if digest and commit.meta_sha256 != digest:
            raise CheckpointCorrupt(
                f"`{uri}` must hold the state {digest}, got {commit.meta_sha256}; it was "
                "overwritten, or the pin is of another run",
                file=commit.meta_key,
            )
        try:
            return store, path, commit, read_meta(store, path, commit)
        except CheckpointIncomplete:
            # Between the two reads another save may have replaced and cleared away this one.
            newer = read_commit(store, path)
            if newer is None or newer.attempt == commit.attempt:
                raise
    raise CheckpointIncomplete(f"`{uri}` must stand still while it is read; it is being rewritten")


def locate(uri: str, storage: Store | None = None) -> tuple[Store, str]:
    """Return `storage` or else the store of the URI, and the key of the folder in it."""
    found, path = open_store(uri)
    return found if storage is None else storage, path


def open_state(place: str, storage: Store | None = None) -> Opened:
    """Open a committed checkpoint for reading by this process alone.

    `storage` replaces the store that the URI names.

    Raises:
        CheckpointNotFound: nothing is committed there.
        CheckpointIncomplete: an object that COMMIT names is missing or short.
        CheckpointCorrupt: COMMIT or metadata are damaged, or the pin names another state.
    """
    store, path, commit, data = read_metadata(place, storage)
    return Opened(store, path, commit, metafile.decode(data, max_bytes=MAX_DECODED_BYTES))


def check_objects(opened: Opened, files: set[int] | None = None) -> list[str]:
    """Return a text for each object that is missing or has another size, by one listing.

    `files` are the rows of the file table to check; None for all.
    """
    table = opened.metadata.files
    sizes = {stat.key: stat.size for stat in opened.storage.list(opened.folder_key("data"))}
    faults = []
    for row in sorted(range(len(table)) if files is None else files):
        seen = sizes.get(opened.key(row))
        if seen is None:
            faults.append(f"`{table.keys[row]}` is missing")
        elif seen != table.sizes[row]:
            faults.append(f"`{table.keys[row]}` must have {table.sizes[row]} bytes, got {seen}")
    return faults


@dataclass
class ReadCounters:
    """Reads of one process from the store; any thread may add."""

    num_bytes: int = 0
    """Bytes read, second reads of a block included."""
    requests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, num_bytes: int) -> None:
        """Count one request."""
        with self._lock:
            self.num_bytes += num_bytes
            self.requests += 1


class BlockReader:
    """Reads ranges of the files of one checkpoint and verifies every block, from any thread."""

    def __init__(self, opened: Opened, *, verify: bool = True) -> None:
        self.opened, self.verify = opened, verify
        self.counters = ReadCounters()

    def fetch(self, file: int, start: int, target: memoryview) -> None:
        """Fill `target` with whole blocks of a file from byte `start`, without verification.

        Raises `CheckpointIncomplete` if the object is missing or short.
        """
        self._read(file, start, target)

    def check(self, file: int, start: int, target: memoryview) -> None:
        """Verify blocks that `fetch` has read; if one differs, read all of them once more."""
        if not self.verify:
            return
        table = self.opened.metadata.files
        crcs = table.crcs[file]
        name, algorithm, first = table.keys[file], table.algorithms[file], start // BLOCK
        try:
            check_blocks(target, crcs, file=name, algorithm=algorithm, first=first)
        except CheckpointCorrupt:
            # The bytes in the store may be right, and the transfer may have changed them.
            self._read(file, start, target)
            check_blocks(target, crcs, file=name, algorithm=algorithm, first=first)

    def read(self, file: int, start: int, stop: int) -> memoryview:
        """Return bytes `[start, stop)` of a file, from whole blocks that are verified."""
        if start == stop:
            return memoryview(b"")
        first, last = widen(start, stop, self.opened.metadata.files.sizes[file])
        data = memoryview(bytearray(last - first))
        self.fetch(file, first, data)
        self.check(file, first, data)
        return data[start - first : stop - first]

    def read_file(self, name: str) -> bytes:
        """Return the verified bytes of a whole file; `name` is relative to the attempt."""
        table = self.opened.metadata.files
        row = table.keys.index(name) if name in table.keys else -1
        if row < 0 or table.sizes[row] > MAX_FILE_BYTES:
            seen = f"{table.sizes[row]} bytes" if row >= 0 else "none"
            raise CheckpointCorrupt(
                f"`{name}` must be a file of at most {MAX_FILE_BYTES} bytes, got {seen}", file=name
            )
        return bytes(self.read(row, 0, table.sizes[row]))

    def _read(self, file: int, start: int, target: memoryview) -> None:
        """Read; an error says if another save has replaced this checkpoint meanwhile."""
        opened, key = self.opened, self.opened.key(file)
        self.counters.add(len(target))
        uri = opened.storage.uri(key)
        try:
            opened.storage.get_into(key, start, target)
            return
        except (ObjectMissing, ObjectChanged):
            fault = (
                f"`{uri}` must be there as it was written, but is missing; load an earlier "
                "checkpoint"
            )
        except StoreError as error:
            if type(error) is not StoreError:
                raise
            fault = f"`{uri}` must have at least {start + len(target)} bytes: {error}"
        newer = read_commit(opened.storage, opened.path)
        if newer is not None and newer.attempt == opened.commit.attempt:
            raise CheckpointIncomplete(fault)
        state = "deleted" if newer is None else f"overwritten by the save {newer.attempt}"
        raise CheckpointIncomplete(
            f"`{opened.uri}` must stand still while it is read, but was {state}; load again "
            f"({fault})"
        )
