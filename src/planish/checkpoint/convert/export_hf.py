"""Export of a checkpoint's model as a Hugging Face folder, without torch or transformers.

The export merges low-rank adapters into their weights. Threads write the files at the same time,
to local disk first. For each file one tensor, or a group of small ones, and a few buffers of 16 MiB
are in memory.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from planish import store
from planish.base.errors import CheckpointError, ConfigError, LayoutMismatch, ObjectMissing
from planish.checkpoint.convert.hf_names import (
    FLOATS,
    Form,
    Sources,
    cast,
    read_weights,
    weights_of,
)
from planish.checkpoint.format.items import ITEM_BYTES, TORCH_TYPES
from planish.checkpoint.format.safetensors_file import NewEntry, plan_header, read_header
from planish.checkpoint.loading.reader import Opened, Progress, open_state
from planish.checkpoint.loading.slices import SliceReader, batches
from planish.checkpoint.pinned import read_pinned
from planish.checkpoint.ranks.control import Control
from planish.models.headers import parse_config
from planish.records.files import (
    POLICY_SCHEMA,
    WEIGHTS,
    hash_file,
    replace_file,
    tags,
    weights_checksum,
    write_files,
)
from planish.records.manifest import MANIFEST, Shard
from planish.records.refs import Ref, parse_pin
from planish.store import Store, uri_of

CONFIG = "config.json"
"""File of a Hugging Face folder that describes its model."""
GROUP_BYTES = 64 << 20
CHUNK_BYTES = 16 << 20
"""Bytes of a tensor that are converted at a time."""
MAX_FILE_BYTES = 5 << 30
WORKERS = 4
INDEX_FILE = "model.safetensors.index.json"
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json")

FilePlan = Mapping[str, list[str]]
"""Weight file -> names of its tensors."""
Written = tuple[dict[str, Path], dict[str, int]]
"""Weight file -> local path; tensor -> CRC-32C."""


def export(
    place: str,
    out: str,
    *,
    policy: str = "",
    folder: Path | None = None,
    dtype: str | None = None,
    role: str = "",
    parents: Mapping[str, str] | None = None,
    attributes: Mapping[str, Any] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    storage: Store | None = None,
    progress: Progress = lambda done, total: None,
    call: Control | None = None,
) -> Ref:
    """Write the model of a checkpoint as a policy (`policy/1`) that engines load.

    Configuration, tokenizer and types come from an earlier policy; or the files come from a local
    folder, and each tensor keeps its type. `config.json` determines the split of Megatron tensors.

    Args:
        place: URI or pin of the checkpoint.
        out: folder of the new policy, as a URI or a path.
        policy: pin of an earlier policy of the same model; empty for none.
        folder: local folder with `config.json` and tokenizer; None for weights alone.
        dtype: float type of all float weights (`BF16`, ...); only without `policy`.
        role: role of the model; empty for `policy`, `main` or the only one.
        parents: name of each input to its sha256; None for the checkpoint and the policy.
        attributes: attributes of the manifest; None for role and step.
        progress: gets the bytes of weights done and in all; the files are stored after that.
        call: an operation of several ranks, each of which writes some of the files.

    Raises:
        ConfigError: the checkpoint has no such role.
        LayoutMismatch: the role has no weights, or other ones than the earlier policy.
        CheckpointError: the checkpoint or the earlier policy is damaged.
    """
    opened = open_state(place, storage)
    role = policy_role(opened.roles, role)
    small: dict[str, Path | bytes] = {}
    forms: dict[str, Form] = {}
    if policy:
        small, forms = _earlier_policy(policy)
    elif folder is not None:
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        left_out = (*_WEIGHT_FILES, ".bin", ".pt")
        small = {str(p.relative_to(folder)): p for p in files if not p.name.endswith(left_out)}
    config = small.get(CONFIG, b"{}")
    data = config if isinstance(config, bytes) else config.read_bytes()
    sources = weights_of(opened, role, parse_config(data, f"{policy or folder}/{CONFIG}"))
    if policy:
        _check_forms(sources, forms, uri=opened.uri)
    elif not sources:
        raise LayoutMismatch(
            f"`{opened.uri}` must hold model tensors of role `{role}`, got none; see `info`"
        )
    else:
        for name, part in sources.items():
            is_float = part.form.dtype in FLOATS
            forms[name] = Form(dtype, part.form.shape) if dtype and is_float else part.form
    dtypes = {form.dtype for form in forms.values()}
    is_one = len(dtypes) == 1 and dtypes <= {*FLOATS}
    facts = {
        **({"role": role, "step": opened.commit.step} if attributes is None else attributes),
        "dtype": TORCH_TYPES[dtypes.pop()] if is_one else "mixed",
        "layout": "hf",
    }
    if parents is None:
        parents = {"state": opened.commit.meta_sha256}
        parents |= {"policy": parse_pin(policy)[1]} if policy else {}
    uri, plan = uri_of(out).rstrip("/"), plan_files(forms, max_file_bytes)

    def publish(weights: Mapping[str, Path | Shard], checksums: Mapping[str, int]) -> Ref:
        told = {**facts, WEIGHTS: weights_checksum(checksums)}
        written = {**small, **_index(plan, forms), **weights}
        return write_files(uri, POLICY_SCHEMA, written, parents=parents, attributes=told)

    with tempfile.TemporaryDirectory(prefix="planish-export-") as scratch:
        write = partial(_write, opened, sources, forms, folder=Path(scratch), progress=progress)
        return _in_ranks(call, uri, plan, write, publish) if call else publish(*write(plan))


def _in_ranks(
    call: Control,
    uri: str,
    plan: FilePlan,
    write: Callable[[FilePlan], Written],
    publish: Callable[[dict[str, Shard], dict[str, int]], Ref],
) -> Ref:
    """Write and store this rank's files; rank 0 then publishes the files of all ranks."""

    def clear() -> bytes:
        # Delete an old manifest first: it must never name files of a new export.
        opened, key = store.open_store(uri)
        found = tags(opened, key)
        if MANIFEST in found:
            opened.delete_exact(f"{key}/{MANIFEST}", found.pop(MANIFEST))
        return json.dumps(found).encode()

    def store_file(name: str, path: Path) -> Shard:
        size, digest = hash_file(path)
        replace_file(f"{uri}/{name}", path, seen.get(name, ""))
        return Shard(name, 0, size, digest)

    seen = json.loads(call.decide(clear, "clear"))
    written, own = write({name: plan[name] for name in list(plan)[call.rank :: call.size]})
    stored = [vars(store_file(name, path)) for name, path in written.items()]
    parts = call.gather(json.dumps([stored, own]).encode(), "files") or ()

    def publish_all() -> bytes:
        shards, checksums = dict[str, Shard](), dict[str, int]()
        for files, sums in map(json.loads, parts):
            shards |= {file["name"]: Shard(**file) for file in files}
            checksums |= sums
        return publish(shards, checksums).to_json().encode()

    return Ref.from_json(call.decide(publish_all, "manifest").decode())


def policy_role(roles: Sequence[str], wanted: str = "") -> str:
    """Return the role to export: `wanted`, else `policy`, `main`, or the only one."""
    usual = [name for name in ("policy", "main") if name in roles]
    candidates = [wanted] if wanted else usual[:1] or list(roles)
    if len(candidates) != 1 or candidates[0] not in roles:
        raise ConfigError(f"`role` must be one of {sorted(roles)}, got {wanted!r}")
    return candidates[0]


def _earlier_policy(pin: str) -> tuple[dict[str, Path | bytes], dict[str, Form]]:
    """Return the verified small files of a policy, and types and shapes of its weights.

    The headers of weight files are not verified: they are only compared with the checkpoint.
    """
    uri, manifest = read_pinned(pin, POLICY_SCHEMA, remedy="export it again")
    small: dict[str, Path | bytes] = {}
    forms: dict[str, Form] = {}
    for shard in manifest.shards:
        place = f"{uri}/{shard.name}"
        if shard.name.endswith(".safetensors"):
            entries = read_header(partial(store.read, place, 0), shard.bytes, file=place)
            forms |= {name: Form(e.dtype, e.shape) for name, e in entries.items()}
        elif not shard.name.endswith(_WEIGHT_FILES):
            try:
                data = store.read(place)
            except ObjectMissing:
                data = b""
            if len(data) != shard.bytes or hashlib.sha256(data).hexdigest() != shard.sha256:
                raise CheckpointError(
                    f"`{place}` must have {shard.bytes} bytes with sha256 {shard.sha256}, got "
                    f"{len(data)} others; export with another policy as source"
                )
            small[shard.name] = data
    return small, forms


def _check_forms(sources: Sources, forms: Mapping[str, Form], *, uri: str) -> None:
    faults = [f"`{name}` is missing" for name in sorted(forms.keys() - sources.keys())]
    faults += [
        f"`{name}` is not in the source policy" for name in sorted(sources.keys() - forms.keys())
    ]
    faults += [
        f"`{name}` must have the shape {list(forms[name].shape)}, got {list(part.form.shape)}"
        for name, part in sources.items()
        if name in forms and forms[name].shape != part.form.shape
    ]
    if faults:
        raise LayoutMismatch(
            f"`{uri}` must hold the weights of its source policy: {'; '.join(faults)}; "
            "export with the policy that training began with"
        )


def _write(
    opened: Opened,
    sources: Sources,
    forms: Mapping[str, Form],
    files: FilePlan,
    folder: Path,
    progress: Progress,
) -> Written:
    """Write weight files to a local folder."""
    done, total = 0, sum(forms[name].nbytes for names in files.values() for name in names)
    progress(done, total)
    checksums: dict[str, int] = {}
    told = threading.Lock()

    def write(file: str) -> None:
        nonlocal done
        names, reader = files[file], SliceReader(opened)
        with (folder / file).open("wb") as stream:
            stream.write(encode_header({name: forms[name] for name in names}))
            # Small tensors are read together.
            for group in batches(names, lambda name: sources[name].form.nbytes, GROUP_BYTES):
                weights = read_weights(reader, [sources[name] for name in group])
                for name in group:
                    # `pop` drops the list's reference, so that a written tensor is freed.
                    array, stored = weights.pop(0)
                    types = stored, forms[name].dtype
                    step, checksum = CHUNK_BYTES // array.dtype.itemsize, 0
                    for start in range(0, len(array), step):
                        part = cast(array[start : start + step], *types).view(np.uint8)
                        checksum = google_crc32c.extend(checksum, part)
                        stream.write(part.data)
                    checksums[name] = checksum
                    del array
                    with told:
                        done += forms[name].nbytes
                        progress(done, total)

    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(write, files):
            pass
    return {name: folder / name for name in files}, checksums


def _index(files: FilePlan, forms: Mapping[str, Form]) -> dict[str, bytes]:
    """Return the index file, which maps weights to files; {} if there is only one weight file."""
    if len(files) == 1:
        return {}
    index = {
        "metadata": {"total_size": sum(form.nbytes for form in forms.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    return {INDEX_FILE: json.dumps(index, sort_keys=True, indent=2).encode()}


def plan_files(forms: Mapping[str, Form], max_file_bytes: int) -> dict[str, list[str]]:
    """Return file name -> tensor names, in an order that keeps every tensor aligned.

    Order: wide types first, then by name. A tensor above `max_file_bytes` has its own file.
    """
    order = sorted(forms, key=lambda name: (-ITEM_BYTES[forms[name].dtype], name))
    groups = list(batches(order, lambda name: forms[name].nbytes, max_file_bytes))
    if len(groups) <= 1:
        return {"model.safetensors": order}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def encode_header(forms: Mapping[str, Form]) -> bytes:
    """Return the first bytes of a safetensors file whose tensors follow in this order."""
    entries = [NewEntry(name, form.dtype, form.shape) for name, form in forms.items()]
    return plan_header(entries, notes={"format": "pt"}, alignment=8)[0]
