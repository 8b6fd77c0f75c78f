"""Sets of plain files (policies, evaluations): the same manifest, any files."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c

from planish import store
from planish.base.errors import ObjectChanged, ObjectExists, ObjectMissing, RecordError
from planish.records.manifest import (
    MANIFEST,
    Manifest,
    Shard,
    manifest_uri,
    read_manifest,
    seal,
)
from planish.records.refs import Ref, parse_pin
from planish.store.sources import cache_folder

POLICY_SCHEMA = "policy/1"
"""Schema of a policy: a folder in Hugging Face's form with a manifest."""
WEIGHTS = "weights_crc32c"
"""Attribute of a policy and of its rollouts: see `weights_checksum`."""
_CACHE_KEEPS = 3
"""Number of fetched folders that stay at any age."""
_CACHE_SECONDS = 3600.0
"""Older fetched folders are removed after this many seconds without use."""
_BLOCK_BYTES = 16 << 20
_TICK_NS = 50_000_000
_digests: dict[tuple[int, ...], str] = {}
"""Device, inode, size and times of a file to its sha256: stages verify a policy twice."""
_FILES_AT_ONCE = 3
"""Files that are hashed at the same time, one thread each; several threads read a file."""


def weights_checksum(parts: Mapping[str, int]) -> str:
    """Return one CRC-32C of all weights of a policy; several processes may each know a part.

    `parts` maps the name of each tensor in the files to the CRC-32C of its bytes.
    """
    lines = [f"{name} {parts[name]:08x}\n" for name in sorted(parts)]
    return f"{google_crc32c.value(''.join(lines).encode()):08x}"


def weights_name(policy_pin: str) -> tuple[int, str]:
    """Return version and weights checksum of a policy; rollouts name their policy by these two.

    The checksum is "" for a policy that records none.
    """
    uri, digest = parse_pin(policy_pin)
    attributes = read_manifest(uri, sha256=digest).attributes
    return int(attributes["policy_version"]), str(attributes.get(WEIGHTS, ""))


def write_files(
    uri: str,
    schema: str,
    files: Mapping[str, Path | bytes | Shard],
    *,
    parents: Mapping[str, str],
    attributes: Mapping[str, Any],
) -> Ref:
    """Write a set of files: the files first, their manifest last.

    `files` names each by its path below the folder, as a local file, bytes, or the Shard of a file
    that `replace_file` has put there after the manifest was gone; `parents` is the name of each
    input to the sha256 of its manifest; `attributes` are JSON values without URIs, times or host
    names.

    Raises:
        ValueError: a name leaves the folder, or an attribute is not JSON.
    """
    shards = []
    for name, content in sorted(files.items()):
        if isinstance(content, Shard):
            shards.append(content)
            continue
        size, digest = _facts(content)
        shards.append(Shard(name, 0, size, digest))
    manifest, data = seal(schema, 0, shards, parents, attributes)
    publish(uri, data, files)
    return manifest.ref(uri)


def hash_file(path: Path) -> tuple[int, str]:
    """Return (bytes, sha256) of a local file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _facts(content: bytes | Path) -> tuple[int, str]:
    if isinstance(content, Path):
        return hash_file(content)
    return len(content), hashlib.sha256(content).hexdigest()


def hash_object(uri: str) -> tuple[int, str]:
    """Return (bytes, sha256) of an object in a store; memory is a block of 16 MiB."""
    digest, size = hashlib.sha256(), 0
    while block := store.read(uri, size, _BLOCK_BYTES):
        digest.update(block)
        size += len(block)
    return size, digest.hexdigest()


def publish(uri: str, manifest: bytes, files: Mapping[str, Path | bytes | Shard]) -> None:
    """Write files and then their manifest, and leave nothing else in the folder.

    The manifest of another set in the same place is removed first, so that no reader sees it
    beside files of this set. Only objects that were there at first are replaced or removed:
    objects that another writer adds meanwhile stay.

    Raises:
        RecordError: another writer has changed the folder meanwhile.
    """
    base = uri.rstrip("/")
    opened, folder = store.open_store(base)
    present = tags(opened, folder)
    if MANIFEST in present and opened.read(f"{folder}/{MANIFEST}") != manifest:
        if any(isinstance(content, Shard) for content in files.values()):
            raise _disturbed("another manifest than was withdrawn")
        opened.delete_exact(f"{folder}/{MANIFEST}", present.pop(MANIFEST))
    for name, content in files.items():
        if not isinstance(content, Shard):
            replace_file(f"{base}/{name}", content, present.get(name, ""))
    for stale in present.keys() - files.keys() - {MANIFEST}:
        opened.delete_exact(f"{folder}/{stale}", present[stale])
    replace_file(manifest_uri(uri), manifest, present.get(MANIFEST, ""))


def tags(opened: store.Store, folder: str) -> dict[str, str]:
    """Return the entity tag of each object of a set."""
    return {stat.key.removeprefix(f"{folder}/"): stat.etag for stat in opened.list(folder)}


def replace_file(uri: str, content: bytes | Path, seen: str) -> None:
    """Write a file of a set over the object of the entity tag `seen`, "" for none.

    Raises:
        RecordError: another writer has written other bytes there meanwhile.
    """
    try:
        if isinstance(content, Path):
            store.write_file(uri, content, over=seen)
        else:
            store.write(uri, content, over=seen)
    except (ObjectExists, ObjectChanged, ObjectMissing) as error:
        with contextlib.suppress(ObjectMissing):
            if hash_object(uri) == _facts(content):
                return
        raise _disturbed(error) from None


def _disturbed(seen: object) -> RecordError:
    return RecordError(
        f"a set must be written by one process at a time, got {seen}; run its stage again"
    )


def fetch_files(
    uri: str, *, sha256: str | None = None, schema: str | None = None, without: str = ""
) -> Path:
    """Return a local folder with the files of a set, each verified; do not write into it.

    For `file://` this is the folder of the set itself. For other stores it is a copy, shared by
    later calls in any process of this user.

    `sha256` and `schema` are what its manifest must have; files whose names end with `without` are
    neither copied nor read.

    Raises:
        ObjectMissing: no finished set there.
        RecordError: a file is missing, damaged or not in the manifest.
    """
    manifest = read_manifest(uri, sha256=sha256)
    if schema is not None and manifest.schema != schema:
        raise RecordError(
            f"`{uri}` must hold {schema}, got {manifest.schema}; pass the URI of another set"
        )
    folder = store.local_path(uri)
    wanted = [s for s in manifest.shards if not (without and s.name.endswith(without))]
    if folder is None:
        return _fetch(uri, manifest, wanted, cache_folder() / f"{manifest.sha256}{without}")
    _verify(folder, manifest, uri, wanted)
    return folder


def _verify(
    folder: Path,
    manifest: Manifest,
    uri: str,
    wanted: Sequence[Shard],
    digests: Mapping[str, str] | None = None,
) -> None:
    """Refuse other files than those of a manifest; `digests` are those of the fetched files."""
    digests, faults, whole = digests or {}, [], []
    for shard in wanted:
        path = folder / shard.name
        if not path.is_file():
            faults.append(f"`{shard.name}` is missing")
            continue
        seen = path.stat().st_size
        if seen != shard.bytes:
            faults.append(f"`{shard.name}` must have {shard.bytes} bytes, got {seen}")
        else:
            whole.append(shard)
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        found = pool.map(lambda s: _digest(folder / s.name, digests.get(s.name, "")), whole)
        faults += [
            f"`{shard.name}` must have the sha256 {shard.sha256}, got another"
            for shard, digest in zip(whole, found, strict=True)
            if digest != shard.sha256
        ]
    # A loader would pick up an unlisted file (say, weights of another format) without a check.
    known = {shard.name for shard in manifest.shards} | {MANIFEST}
    present = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    faults += [
        f"`{name}` is not in the manifest"
        for name in sorted(present - known)
        if not Path(name).name.startswith(".")
    ]
    if faults:
        raise RecordError(
            f"`{uri}` is damaged: {'; '.join(faults[:8])}; "
            "remove the set and run the stage that writes it again"
        )


def _digest(path: Path, known: str) -> str:
    """Return the sha256 of a file: `known`, or that of an unchanged file from before."""
    facts = path.stat()
    file = facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
    digest = known or _digests.get(file) or hash_file(path)[1]
    # Of two changes within one tick of the file system's clock the second would not show.
    if time.time_ns() - facts.st_ctime_ns > _TICK_NS:
        _digests[file] = digest
    return digest


def _read_files(uri: str, wanted: Sequence[Shard], folder: Path) -> dict[str, str]:
    """Copy the files of a set, some at a time, and return the sha256 of each existing file."""

    def read(name: str) -> str:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # The check reports an absent file together with all other faults.
        with contextlib.suppress(ObjectMissing):
            return store.read_file(f"{uri.rstrip('/')}/{name}", folder / name)
        return ""

    names = [shard.name for shard in wanted]
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return dict(zip(names, pool.map(read, names), strict=True))


def _fetch(uri: str, manifest: Manifest, wanted: Sequence[Shard], target: Path) -> Path:
    cache = target.parent
    is_damaged = False
    while True:
        if target.is_dir() and not is_damaged:
            try:
                _verify(target, manifest, uri, wanted)
                os.utime(target)
                return target
            except RecordError:
                is_damaged = True
        # One process of this machine copies, others wait: the bytes leave the store once.
        with open(cache.parent / f"lock-{manifest.sha256[0]}", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_dir() and not is_damaged:
                continue
            shutil.rmtree(target, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix="part-") as name:
                part = Path(name) / "files"
                part.mkdir()
                _verify(part, manifest, uri, wanted, _read_files(uri, wanted, part))
                part.rename(target)
            break
    # Older folders go, the newest few stay.
    ages: dict[Path, float] = {}
    for folder in cache.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes some too
            ages[folder] = time.time() - folder.stat().st_mtime
    for folder in sorted(ages, key=ages.__getitem__)[_CACHE_KEEPS:]:
        if folder != target and ages[folder] > _CACHE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
    return target
