"""Where data sets and models come from: the hub, an S3 bucket, a web server, or this machine.

An address is checked before anything is opened (`parse_source`); what a model folder holds can be
looked at without its weights (`open_folder`). Nothing that is read here is ever run.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from planish import store
from planish.base.errors import ConfigError, ObjectMissing, RecordError
from planish.base.telemetry import redact
from planish.store.base import file_path

HUB_TIMEOUT_SECONDS = 20.0
"""Wait for the hub's answer to one question."""
WEB_TIMEOUT_SECONDS = 60.0
"""Wait of a web server's next bytes."""
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
    """An address that has been checked.

    Example:
        >>> parse_source("hf://org/name/part/a.jsonl@v2", key="curate.dataset").file
        'part/a.jsonl'
    """

    kind: Literal["hub", "s3", "https", "path"]
    """Who is asked for it."""
    place: str
    """Hub id, URI, URL without its fragment, or path."""
    file: str = ""
    """File of a hub repository; empty for all of it."""
    revision: str = ""
    """Branch, tag or commit on the hub; empty where the address names none."""
    sha256: str = ""
    """What an `https://` file must hash to."""


def parse_source(text: str, *, key: str) -> Source:
    """Read an address; opens nothing.

    Args:
        text: one of the `FORMS`.
        key: setting that holds it, for messages.

    Raises:
        ConfigError: no such form, a credential in it, or `https://` without a digest.
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
    """Return the folder of this user for what is fetched, which no other user can write to.

    Raises:
        RecordError: it belongs to somebody else.
    """
    folder = Path(tempfile.gettempdir()) / f"planish-{os.getuid()}" / "fetched"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    owner = folder.parent.stat()
    if owner.st_uid != os.getuid() or folder.parent.is_symlink():
        raise RecordError(
            f"`{folder.parent}` must belong to this user, got user {owner.st_uid}; remove it"
        )
    folder.parent.chmod(0o700)
    return folder


def hub_fault(error: Exception, *, key: str, place: str, revision: str) -> ConfigError:
    """Return what to do about an error of the hub's client, in one line.

    Args:
        error: what the client raised.
        key: setting that names the repository.
        place: the repository.
        revision: what was asked for.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = "a data set" if key.endswith("dataset") else "a model"
    login = "log in with `hf auth login`, in a cluster give the secret with `HF_TOKEN`"
    if isinstance(error, GatedRepoError):
        remedy = f"accept its licence on the hub and {login}"
    elif isinstance(error, RevisionNotFoundError):
        remedy = f"the revision {revision!r} does not exist there"
    elif isinstance(error, RepositoryNotFoundError):
        remedy = f"there is no such {what[2:]}, or it is private: check the spelling or {login}"
    elif isinstance(error, HFValidationError):
        remedy = f"not a hub id: {redact(str(error))}"
    elif isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        remedy = (
            "the hub can not be reached or failed, and the cache has no copy "
            f"({type(error).__name__}): download it where there is a network and give its path "
            f"as `{key}`"
        )
    elif isinstance(error, EntryNotFoundError):
        remedy = f"it has no such file: {redact(str(error)).strip().partition(chr(10))[0][:200]}"
    elif isinstance(error, HfHubHTTPError):
        remedy = (
            f"it answered with HTTP status {error.response.status_code}: {login}, try again later, "
            f"or give a path as `{key}`"
        )
    else:
        reason = redact(str(error)).strip().partition("\n")[0][:200]
        remedy = (
            "the hub can not be reached or failed, and the cache has no copy "
            f"({type(error).__name__}: {reason}): download it where there is a network and give "
            f"its path as `{key}`"
        )
    return ConfigError(f"`{key}` must be {what} that the hub gives, got {place!r}; {remedy}")


def check_readable(path: Path, *, key: str) -> None:
    """Refuse a file, or the files of a folder, that this process may not open.

    Pods run as a user of their own, and safetensors writes files for their owner alone.

    Args:
        path: what is there; nothing is checked of what is not.
        key: setting that names it, for messages.

    Raises:
        ConfigError: one of them may not be read.
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
    """Return a local path of a single file, fetching it unless it is here.

    Args:
        source: any kind; for the hub with `file`.
        key: setting that names it, for messages.

    Raises:
        ConfigError: nothing there, of another digest, or refused.
        StoreUnavailable: the store does not answer.
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

        try:
            return Path(
                hf_hub_download(
                    source.place,
                    source.file,
                    repo_type="dataset",
                    revision=source.revision or None,
                    etag_timeout=HUB_TIMEOUT_SECONDS,
                )
            )
        except Exception as error:
            raise hub_fault(error, key=key, place=source.place, revision=source.revision) from None
    name = PurePosixPath(source.place.partition("?")[0]).name
    if source.kind == "https":
        return (
            _cached(source.sha256, {name: lambda target: download(source, target, key=key)}) / name
        )
    try:
        opened, place = store.open_store(source.place)
        stat = opened.head(place)
    except ObjectMissing:
        raise ConfigError(
            f"`{key}` must be an object that is there, got none at {source.place!r}; upload it, or "
            "correct the address"
        ) from None
    digest = hashlib.sha256(f"{source.place} {stat.etag} {stat.size}".encode()).hexdigest()
    return _cached(digest, {name: lambda target: store.read_file(source.place, target)}) / name


def _cached(digest: str, files: Mapping[str, Callable[[Path], object]]) -> Path:
    """Return the folder of the cache with these files; a fetch that fails leaves nothing."""
    cache = cache_folder()
    target = cache / digest
    if target.is_dir():
        os.utime(target)
        return target
    with tempfile.TemporaryDirectory(dir=cache, prefix="part-") as name:
        part = Path(name) / "files"
        part.mkdir()
        for file, fetch in files.items():
            fetch(part / file)
        try:
            part.rename(target)
        except OSError:
            # Another process was faster; its folder holds the same.
            if not target.is_dir():
                raise
    return target


def download(source: Source, target: Path, *, key: str) -> None:
    """Write the file of an `https://` address; bytes of another digest are refused.

    Raises:
        ConfigError: the server refuses, can not be reached, or gives other bytes.
    """
    from huggingface_hub import get_session

    digest = hashlib.sha256()
    try:
        # Raw bytes: what a server packs on the way is not what the digest was taken of.
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
    except Exception as error:
        # The client raises errors of three packages; each means that there is no file.
        reason = redact(str(error)).strip().partition("\n")[0][:200]
        raise ConfigError(
            f"`{key}` must be a file that its server gives, got {source.place!r} "
            f"({type(error).__name__}: {reason}); check the address"
        ) from None
    if digest.hexdigest() != source.sha256:
        raise ConfigError(
            f"`{key}` must have the sha256 {source.sha256}, got {digest.hexdigest()} of "
            f"{source.place!r}; the file changed or was cut: take its digest again (`sha256sum`)"
        )


@dataclass(frozen=True)
class SourceFolder:
    """A folder of files that can be read in parts, wherever it lies."""

    name: str
    """What a person calls it, with the commit where the hub has told one."""
    sizes: Mapping[str, int]
    """File name to bytes; files in folders below it are left out."""
    read: Callable[[str, int, int], bytes] = field(repr=False)
    """(name, first byte, most bytes) to bytes."""
    path: Path | None = None
    """Where it lies on this machine; None where it does not."""


def local_folder(path: Path, name: str = "") -> SourceFolder:
    """Return a folder of this machine."""
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}

    def read(file: str, start: int, length: int) -> bytes:
        with (path / file).open("rb") as stream:
            stream.seek(start)
            return stream.read(length)

    return SourceFolder(name or str(path), sizes, read, path)


def open_folder(source: Source, *, key: str, revision: str = "") -> SourceFolder:
    """List the folder of a model without fetching it; an https archive alone is fetched whole.

    Args:
        source: any kind.
        key: setting that names it, for messages.
        revision: on the hub, where the address names none.

    Raises:
        ConfigError: nothing there, or refused.
        StoreUnavailable: the store does not answer.
    """
    if source.kind == "s3":
        opened, place = store.open_store(source.place)
        sizes = {stat.key[len(place) + 1 :]: stat.size for stat in opened.list(place)}
        if not sizes:
            raise ConfigError(
                f"`{key}` must be a folder with files, got none below {source.place!r}; upload the "
                "folder that `save_pretrained` wrote"
            )
        return SourceFolder(
            source.place,
            {name: size for name, size in sizes.items() if "/" not in name},
            lambda name, start, length: store.read(f"{source.place}/{name}", start, length),
        )
    if source.kind != "hub":
        return local_folder(fetch_folder(source, key=key, patterns=("*",)), source.place)
    import huggingface_hub
    from huggingface_hub import constants

    revision = source.revision or revision
    try:
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
        base = f"{source.place}@{info.sha}"

        def read(name: str, start: int, length: int) -> bytes:
            try:
                return bytes(files.cat_file(f"{base}/{name}", start, start + length))
            except Exception as error:
                raise hub_fault(error, key=key, place=source.place, revision=revision) from None

        return SourceFolder(
            f"{source.place} at {str(info.sha)[:12]}",
            {f.rfilename: f.size or 0 for f in info.siblings if "/" not in f.rfilename},
            read,
        )
    except Exception as error:
        if isinstance(error, ConfigError):
            raise
        raise hub_fault(error, key=key, place=source.place, revision=revision) from None


def fetch_folder(
    source: Source, *, key: str, patterns: tuple[str, ...], revision: str = ""
) -> Path:
    """Return a local folder with the files of a model, fetching it unless it is here.

    Args:
        source: any kind; an `https://` address must be a tar archive.
        key: setting that names it, for messages.
        patterns: of the names of files that are wanted.
        revision: on the hub, where the address names none.

    Raises:
        ConfigError: nothing there, no folder or archive, or refused.
        StoreUnavailable: the store does not answer.
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
        try:
            found = snapshot_download(
                source.place,
                revision=revision or None,
                allow_patterns=list(patterns),
                etag_timeout=HUB_TIMEOUT_SECONDS,
            )
        except Exception as error:
            raise hub_fault(error, key=key, place=source.place, revision=revision) from None
        return Path(found)
    if source.kind == "https":
        archive = fetch_file(source, key=key)
        return _cached(
            hashlib.sha256(f"unpacked {source.sha256}".encode()).hexdigest(),
            {"": lambda target: unpack(archive, target, patterns, key=key)},
        )
    opened, place = store.open_store(source.place)
    stats = [
        stat
        for stat in opened.list(place)
        if any(fnmatch(stat.key[len(place) + 1 :], pattern) for pattern in patterns)
        and "/" not in stat.key[len(place) + 1 :]
    ]
    if not stats:
        raise ConfigError(
            f"`{key}` must be a folder with files, got none below {source.place!r}; upload the "
            "folder that `save_pretrained` wrote"
        )
    listing = "\n".join(f"{stat.key} {stat.etag} {stat.size}" for stat in stats)
    names = [stat.key[len(place) + 1 :] for stat in stats]

    def fetch(name: str) -> Callable[[Path], object]:
        return lambda target: store.read_file(f"{source.place}/{name}", target)

    digest = hashlib.sha256(f"{source.place}\n{listing}".encode()).hexdigest()
    return _cached(digest, {name: fetch(name) for name in names})


def unpack(archive: Path, target: Path, patterns: tuple[str, ...], *, key: str) -> None:
    """Write the wanted files of a tar archive into `target`, from whichever folder it has them in.

    Raises:
        ConfigError: no tar archive, or wanted files in several folders.
    """
    import tarfile

    try:
        with tarfile.open(archive) as tar:
            wanted = [
                member
                for member in tar
                if member.isfile()
                and any(fnmatch(PurePosixPath(member.name).name, pattern) for pattern in patterns)
            ]
            if len({str(PurePosixPath(member.name).parent) for member in wanted}) != 1:
                raise ConfigError(
                    f"`{key}` must be a tar archive of one folder with a model, got "
                    f"{len(wanted)} files of a model in {archive.name!r}; pack the folder alone"
                )
            for member in wanted:
                # By its last name alone: no path of an archive is followed.
                member.name = PurePosixPath(member.name).name
                tar.extract(member, target, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(
            f"`{key}` must be a tar archive for https://, got {archive.name!r} ({error}); pack the "
            "folder that `save_pretrained` wrote with `tar`"
        ) from None
