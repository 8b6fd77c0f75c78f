"""Copy a policy of a run out of it, with a model card: `planish export`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planish import store
from planish.base.errors import ConfigError, ObjectMissing
from planish.records import layout
from planish.records.files import POLICY_SCHEMA, fetch_files, hash_object, publish
from planish.records.io import policy_versions
from planish.records.manifest import MANIFEST, Manifest, manifest_uri, read_manifest
from planish.records.refs import parse_pin
from planish.records.reports import read_best
from planish.run.stage import read_run
from planish.stages.export.card import CARD, base_licence, check_licence, model_card
from planish.stages.export.hub import upload_model
from planish.store import file_uri, normal_uri
from planish.store.sources import parse_source


def add_commands(commands: Any) -> None:
    """Add the command to the subparsers of `planish`, whose class argparse keeps to itself."""
    export = commands.add_parser(
        "export", help="copy a policy with a model card to the hub, a bucket or a folder"
    )
    export.add_argument("root", help="URI or path of the run")
    which = export.add_mutually_exclusive_group()
    which.add_argument(
        "--best", action="store_true", help="the policy with the highest held-out accuracy"
    )
    which.add_argument(
        "--policy", type=int, metavar="N", help="after iteration N (default: the newest)"
    )
    export.add_argument(
        "--to",
        required=True,
        metavar="TARGET",
        help="hf://owner/name (with HF_TOKEN), s3://bucket/prefix or a folder",
    )
    export.add_argument(
        "--license", default="", metavar="ID", help="default: what the base model's card names"
    )
    export.add_argument(
        "--public", action="store_true", help="everybody may read a repository that is made"
    )


def run(options: argparse.Namespace, _: Callable[[str, int, int], None]) -> Iterator[str]:
    """Export as the command line says; yield one line about it.

    Raises:
        ConfigError: the run or policy does not exist, or the target is taken or invalid.
        RecordError: the policy is damaged.
        StoreUnavailable: the target is not reached; the same command goes on later.
    """
    root = normal_uri(options.root)
    licence = check_licence(options.license) if options.license else ""
    is_hub = options.to.startswith("hf://")
    source = parse_source(options.to, key="--to") if is_hub else None
    if source and (source.file or source.revision):
        raise ConfigError(f"`--to` must read hf://owner/name, got {options.to!r}")
    target = source.place if source else normal_uri(options.to).rstrip("/")
    try:
        run = read_run(root)
    except ObjectMissing:
        raise ConfigError(f"`{root}` must be the root of a run, got no run.json there") from None
    uri, digest = _chosen_policy(root, options)
    manifest = read_manifest(uri, sha256=digest)
    folder = fetch_files(uri, sha256=manifest.sha256, schema=POLICY_SCHEMA)
    title = target.rpartition("/")[2]
    licence = licence or base_licence(run["config"])
    card = model_card(title, root, run, manifest, licence).encode()
    files: dict[str, Path | bytes] = {shard.name: folder / shard.name for shard in manifest.shards}
    files |= {CARD: card}
    marker = store.read(manifest_uri(uri))
    if source:
        is_new = upload_model(
            target, {**files, MANIFEST: marker}, marker=MANIFEST, is_public=options.public
        )
    elif _holds_export(target, manifest):
        is_new = store.read(f"{target}/{CARD}") != card
        if is_new:
            store.write(f"{target}/{CARD}", card)
    else:
        _write_export(target, marker, files)
        is_new = True
    version = manifest.attributes["policy_version"]
    if not licence:
        version = f"{version}, without a licence (`--license`),"
    yield f"policy {version} {'exported' if is_new else 'lies there already'}: {options.to}"


def _chosen_policy(root: str, options: argparse.Namespace) -> tuple[str, str | None]:
    """Return the folder of the policy that the command line asks for, and its digest if pinned."""
    if options.best:
        try:
            return parse_pin(read_best(root).pin)
        except ObjectMissing:
            raise ConfigError(
                f"`--best` needs an evaluation, got none in `{root}`; a run measures at its end, "
                "and on the way with `evaluate.every`; `--policy N` exports policy N"
            ) from None
    versions = policy_versions(root)
    version = options.policy if options.policy is not None else max(versions, default=0)
    if version not in versions:
        raise ConfigError(
            f"`{root}` must hold policy {version}, got {versions}; a policy is there when "
            "the stage that exports it has ended"
        )
    return layout.policy(root, version), None


def _holds_export(target: str, manifest: Manifest) -> bool:
    """Return True if a folder or prefix has the whole export of a policy already.

    It refuses a target with anything but whole files of an interrupted export of this policy.
    """
    names = {uri.removeprefix(f"{target}/") for uri in store.list_uris(f"{target}/")}
    path = store.local_path(target)
    if not names and (path is None or path.is_dir() or not path.exists()):
        return False
    digests = {shard.name: shard.sha256 for shard in manifest.shards}
    if names >= {MANIFEST, CARD, *digests} and read_manifest(target).sha256 == manifest.sha256:
        return True
    # The card is written after the other files, and may list more evaluations by now.
    foreign = [
        name
        for name in sorted(names - {CARD} or names)
        if name not in digests or hash_object(f"{target}/{name}")[1] != digests[name]
    ]
    # A local folder appears in one step, so an interrupted export leaves none.
    if foreign or path is not None:
        what = foreign[:8] or sorted(names) or "a file"
        raise ConfigError(
            f"the target must be empty or hold this very policy, got {what} in {target}; choose "
            "another, or delete it"
        )
    return False


def _write_export(target: str, marker: bytes, files: Mapping[str, Path | bytes]) -> None:
    """Write an export: a folder in one step, a prefix of a bucket with its manifest last."""
    path = store.local_path(target)
    if path is None:
        publish(target, marker, files)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        part = Path(scratch) / "files"
        publish(file_uri(part), marker, files)
        try:
            part.rename(path)
        except OSError as error:
            raise ConfigError(
                f"the target must stay empty while it is written, got {target} ({error}); choose "
                "another, or delete it"
            ) from None
