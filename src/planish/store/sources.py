"""Sources of data sets and models: the hub, an S3 bucket, a web server, or this machine.

`parse_source` checks an address before anything is opened. `open_folder` reads a model folder
without its weights. Content from a source is never executed.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from planish import store
from planish.base.errors import ConfigError, ObjectMissing, RecordError, StoreUnavailable
from planish.base.telemetry import first_line, redact
from planish.store.base import file_path
from planish.store.hub import HUB_TIMEOUT_SECONDS, asking_hub, passes

WEB_TIMEOUT_SECONDS = 60.0
"""Seconds to wait for a web server's first bytes, and for each further `WEB_BYTES`."""
WEB_BYTES = 1 << 20
FORMS = (
    "a path, `owner/name` on the hub, `hf://owner/name[/file][@revision]`, `s3://bucket/key`, or "
    "`https://...#sha256=<digest>`"
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_HUB_URI = re.compile(
    r"hf://(?:datasets/|models/)?(?P<id>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:@(?P<early>[\w.-]+))?(?:/(?P<file>[^@]+?))?(?:@(?P<late>[\w./-]+))?/?"
)
_DIGEST = re.compile(r"sha256=(?P<digest>[0-9a-f]{64})")
_FILES = (".jsonl", ".json", ".parquet", ".gz")


@dataclass(frozen=True)
class Source:
    """A checked address.

    Example:
        >>> parse_source("hf://org/name/part/a.jsonl@v2", key="curate.dataset").file
        'part/a.jsonl'
    """

    kind: Literal["hub", "s3", "https", "path"]
    place: str
    """Hub id, URI, URL without its fragment, or path."""
    file: str = ""
    """File of a hub repository; empty for all of it."""
    revision: str = ""
    """Branch, tag or commit on the hub; empty if the address names none."""
    sha256: str = ""
    """Expected sha256 of an `https://` file."""


def parse_source(text: str, *, key: str) -> Source:
    """Read an address; opens nothing.

    Args:
        text: one of the `FORMS`.
        key: setting that has the address, for messages.

    Raises:
        ConfigError: another form, a credential in the address, or `https://` without a digest.
    """
    if redact(text) != text:
        raise ConfigError(
            f"`{key}` must be an address without user, token or signature, got {redact(text)!r}; "
            "it would stand in run.json and in logs: give the hub's token as `HF_TOKEN` and the "
            "keys of a bucket as `MINIO_ACCESS_KEY` and `MINIO_SECRET_KEY`, in a cluster by secrets"
        )
    scheme, separator, rest = text.partition("://")
    climbs = ".." in PurePosixPath(rest or text).parts
    if not text or "\0" in text or (climbs and (separator or not key.endswith("dataset"))):
        raise ConfigError(f"`{key}` must be {FORMS}, without `..`, got {text!r:.300}")
    if not separator or scheme == "file":
        path = file_path(text) if separator else text
        named = not separator and not path.startswith(("/", "./", "~"))
        is_hub = named and _HUB_ID.fullmatch(path) and not path.endswith(_FILES)
        return Source("hub" if is_hub and not Path(path).exists() else "path", path)
    found = _HUB_URI.fullmatch(text)
    if found and not (found["early"] and found["late"]):
        revision = found["early"] or found["late"] or ""
        return Source("hub", found["id"], found["file"] or "", revision)
    if scheme == "s3" and rest.partition("/")[2].strip("/"):
        return Source("s3", text.rstrip("/"))
    if scheme == "https":
        place, _, fragment = text.partition("#")
        if pinned := _DIGEST.fullmatch(fragment):
            return Source("https", place, sha256=pinned["digest"])
        raise ConfigError(
            f"`{key}` must end with `#sha256=<64 hexadecimal digits>` for https://, got "
            f"{text!r:.300}; only a digest says that every stage reads the same bytes (`sha256sum`)"
        )
    raise ConfigError(f"`{key}` must be {FORMS}, got {text!r:.300}")


def cache_folder() -> Path:
    """Return this user's cache folder; RecordError if it belongs to another user."""
    folder = Path(tempfile.gettempdir()) / f"planish-{os.getuid()}" / "fetched"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    owner = folder.parent.stat()
    if owner.st_uid != os.getuid() or folder.parent.is_symlink():
        raise RecordError(
            f"`{folder.parent}` must belong to this user, got user {owner.st_uid}; remove it"
        )
    folder.parent.chmod(0o700)
    return folder


def check_readable(path: Path, *, key: str) -> None:
    """Refuse a file, or a folder with a file, that this process may not open.

    Pods run as another user, and safetensors writes files that only their owner can read.
    """
    try:
        for file in path.iterdir() if path.is_dir() else [path]:
            if file.is_file():
                file.open("rb").close()
    except PermissionError as error:
        raise ConfigError(
            f"`{key}` must be readable by the user {os.geteuid()}, as whom this process runs, got "
            f"{error.filename!r}: {error.strerror}; `chmod -R a+rX` lets everybody read it"
        ) from None


def fetch_file(source: Source, *, key: str) -> Path:
    """Return a local path of a single file; fetch the file unless it is on this machine.

    ConfigError names the setting `key` if the file is missing, refused or has another digest.
    """
    if source.kind == "path":
        path = Path(source.place).expanduser()
        check_readable(path, key=key)
        if path.is_file():
            return path
        raise ConfigError(
            f"`{key}` must be {FORMS}, got {source.place!r}, which is no file; relative paths "
            "start at the working directory of the process, and a pod sees no file of your machine"
        )
    if source.kind == "hub":
        from huggingface_hub import hf_hub_download

        with asking_hub(key, source.place, source.revision):
            found = hf_hub_download(
                source.place,
                source.file,
                repo_type="dataset",
                revision=source.revision or None,
                etag_timeout=HUB_TIMEOUT_SECONDS,
            )
        return Path(found)
    if source.kind == "https":
        name = PurePosixPath(source.place.partition("?")[0]).name
        folder = _cached(source.sha256, lambda part: download(source, part / name, key=key))
        return folder / name
    folder_uri, _, name = source.place.rpartition("/")
    opened, place = store.open_store(source.place)
    try:
        stat = opened.head(place)
    except ObjectMissing:
        raise ConfigError(
            f"`{key}` must be an object that is there, got none at {source.place!r}; upload it, or "
            "correct the address"
        ) from None
    return _copied(folder_uri, {name: stat}) / name


def _cached(digest: str, fetch: Callable[[Path], object]) -> Path:
    """Return the cache folder that `fetch` fills; if `fetch` fails, no folder is left."""
    cache = cache_folder()
    target = cache / digest
    if target.is_dir():
        os.utime(target)
        return target
    with tempfile.TemporaryDirectory(dir=cache, prefix="part-") as name:
        part = Path(name) / "files"
        part.mkdir()
        fetch(part)
        try:
            part.rename(target)
        except OSError:
            # Another process was faster; its folder has the same content.
            if not target.is_dir():
                raise
    return target


def _copied(folder_uri: str, files: Mapping[str, store.Stat]) -> Path:
    """Return a folder with local copies of objects that are in one folder of a bucket."""

    def fetch(part: Path) -> None:
        for name in files:
            store.read_file(f"{folder_uri}/{name}", part / name)

    listing = "\n".join(f"{stat.key} {stat.etag} {stat.size}" for stat in files.values())
    return _cached(hashlib.sha256(f"{folder_uri}\n{listing}".encode()).hexdigest(), fetch)


def _bucket_files(
    source: Source, key: str, patterns: tuple[str, ...] = ("*",)
) -> dict[str, store.Stat]:
    """Return the files directly in a folder of a bucket, by name, that match a pattern."""
    opened, place = store.open_store(source.place)
    every = {stat.key.rpartition("/")[2]: stat for stat in opened.folder(place).objects}
    files = {name: stat for name, stat in every.items() if _fits(name, patterns)}
    if not files:
        raise ConfigError(
            f"`{key}` must be a folder with files, got none below {source.place!r}; upload the "
            "folder that `save_pretrained` wrote"
        )
    return files


def download(source: Source, target: Path, *, key: str) -> None:
    """Write the file of an `https://` address; refuse bytes with another digest.

    Raises StoreUnavailable if the server fails temporarily or sends too slowly.
    """
    from huggingface_hub import get_session

    digest = hashlib.sha256()
    done, mark, began = 0, 0, time.monotonic()
    try:
        # The digest is of the raw bytes, so the server must not compress them.
        with (
            get_session().stream(
                "GET",
                source.place,
                follow_redirects=True,
                timeout=WEB_TIMEOUT_SECONDS,
                headers={"Accept-Encoding": "identity"},
            ) as answer,
            target.open("wb") as file,
        ):
            answer.raise_for_status()
            for block in answer.iter_raw():
                digest.update(block)
                file.write(block)
                done += len(block)
                if done >= mark + WEB_BYTES:
                    mark, began = done, time.monotonic()
                elif time.monotonic() - began > WEB_TIMEOUT_SECONDS:
                    raise TimeoutError("it sends too slowly")
    except Exception as error:
        # The client raises errors of three packages; each means that no file was read.
        kind = StoreUnavailable if passes(error) else ConfigError
        raise kind(
            f"`{key}` must be a file that its server gives, got {source.place!r} "
            f"({type(error).__name__}: {first_line(error)}); check the address"
        ) from None
    if digest.hexdigest() != source.sha256:
        raise ConfigError(
            f"`{key}` must have the sha256 {source.sha256}, got {digest.hexdigest()} of "
            f"{source.place!r}; the file changed or was cut: take its digest again (`sha256sum`)"
        )


@dataclass(frozen=True)
class SourceFolder:
    """A folder of files, on this machine or elsewhere, that can be read in parts."""

    name: str
    """Name for people, with the commit if the hub gives one."""
    sizes: Mapping[str, int]
    """File name to bytes, without files in subfolders."""
    read: Callable[[str, int, int], bytes] = field(repr=False)
    """Function from (name, first byte, most bytes) to bytes."""
    path: Path | None = None
    """Path on this machine; None if it is elsewhere."""


def local_folder(path: Path, name: str) -> SourceFolder:
    """Return a folder of this machine."""
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}

    def read(file: str, start: int, length: int) -> bytes:
        with (path / file).open("rb") as stream:
            stream.seek(start)
            return stream.read(length)

    return SourceFolder(name, sizes, read, path)


def open_folder(source: Source, *, key: str, revision: str = "") -> SourceFolder:
    """List the folder of a model without fetching it; only an https archive is fetched.

    `revision` is the hub revision if the address names none. ConfigError names the setting `key` if
    the folder is missing or refused.
    """
    if source.kind == "s3":
        return SourceFolder(
            source.place,
            {name: stat.size for name, stat in _bucket_files(source, key).items()},
            lambda name, start, length: store.read(f"{source.place}/{name}", start, length),
        )
    if source.kind != "hub":
        return local_folder(fetch_folder(source, key=key, patterns=("*",)), source.place)
    import huggingface_hub
    from huggingface_hub import constants

    revision = source.revision or revision
    with asking_hub(key, source.place, revision):
        if constants.HF_HUB_OFFLINE:
            path = huggingface_hub.snapshot_download(source.place, revision=revision or None)
            return local_folder(Path(path), source.place)
        info: Any = huggingface_hub.HfApi().model_info(
            source.place,
            revision=revision or None,
            files_metadata=True,
            timeout=HUB_TIMEOUT_SECONDS,
        )
    files = huggingface_hub.HfFileSystem()

    def read(name: str, start: int, length: int) -> bytes:
        with asking_hub(key, source.place, revision):
            path = f"{source.place}@{info.sha}/{name}"
            return bytes(files.cat_file(path, start, start + length))

    return SourceFolder(
        f"{source.place} at {str(info.sha)[:12]}",
        {f.rfilename: f.size or 0 for f in info.siblings if "/" not in f.rfilename},
        read,
    )


def fetch_folder(
    source: Source, *, key: str, patterns: tuple[str, ...], revision: str = ""
) -> Path:
    """Return a local folder with the files of a model; fetch them unless they are on this machine.

    Files whose names match no pattern are left out. An `https://` address must be a tar archive.
    Errors and `revision` are those of `open_folder`.
    """
    if source.kind == "path":
        folder = Path(source.place).expanduser()
        check_readable(folder, key=key)
        if folder.is_dir():
            return folder
        raise ConfigError(
            f"`{key}` must be an existing folder or a hub id such as 'Qwen/Qwen3-0.6B', got "
            f"{source.place!r}; check the spelling, or save the model there first"
        )
    if source.kind == "hub":
        from huggingface_hub import snapshot_download

        revision = source.revision or revision
        with asking_hub(key, source.place, revision):
            found = snapshot_download(
                source.place,
                revision=revision or None,
                allow_patterns=list(patterns),
                etag_timeout=HUB_TIMEOUT_SECONDS,
            )
        return Path(found)
    if source.kind == "https":
        archive = fetch_file(source, key=key)
        digest = hashlib.sha256(f"unpacked {source.sha256}".encode()).hexdigest()
        return _cached(digest, lambda part: unpack(archive, part, patterns, key=key))
    return _copied(source.place, _bucket_files(source, key, patterns))


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def unpack(archive: Path, target: Path, patterns: tuple[str, ...], *, key: str) -> None:
    """Write the wanted files of a tar archive, from any of its folders, into `target`."""
    import tarfile

    try:
        with tarfile.open(archive) as tar:
            wanted = [
                member
                for member in tar
                if member.isfile() and _fits(PurePosixPath(member.name).name, patterns)
            ]
            if len({str(PurePosixPath(member.name).parent) for member in wanted}) != 1:
                raise ConfigError(
                    f"`{key}` must be a tar archive of one folder with a model, got "
                    f"{len(wanted)} files of a model in {archive.name!r}; pack the folder alone"
                )
            for member in wanted:
                # Only the last name is used: no path of an archive is followed.
                member.name = PurePosixPath(member.name).name
                tar.extract(member, target, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(
            f"`{key}` must be a tar archive for https://, got {archive.name!r} ({error}); pack the "
            "folder that `save_pretrained` wrote with `tar`"
        ) from None
