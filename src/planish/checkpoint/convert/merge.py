"""A checkpoint merged to a Hugging Face folder: which role, under which names, beside which files.

What remains to be said after `export_hf`, which copies the bytes; commands and stages share it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planish import store
from planish.base.errors import ConfigError, RecordError
from planish.checkpoint.convert.export_hf import (
    MAX_FILE_BYTES,
    Names,
    Progress,
    export,
    export_folder,
    unheard,
)
from planish.checkpoint.convert.hf_names import megatron_sources, model_tensors, plain_sources
from planish.checkpoint.convert.hf_source import PolicySource
from planish.checkpoint.load.reader import Opened, open_state
from planish.records.refs import Ref, parse_pin

CONFIG = "config.json"
"""File of a policy that describes its model."""
_MEGATRON = "decoder.layers."


def policy_role(roles: Sequence[str], wanted: str = "") -> str:
    """Return which role a policy is made of.

    Args:
        roles: those of the checkpoint.
        wanted: empty for the usual one: `policy`, `main`, or the only one.

    Raises:
        ConfigError: there is no such role, or several and none of the usual ones.

    Example:
        >>> policy_role(["critic", "policy"])
        'policy'
    """
    usual = [name for name in ("policy", "main") if name in roles]
    found = [wanted] if wanted else usual[:1] or list(roles)
    if len(found) != 1 or found[0] not in roles:
        raise ConfigError(f"`role` must be one of {sorted(roles)}, got {wanted!r}")
    return found[0]


def names_for(opened: Opened, role: str, config: Mapping[str, Any]) -> Names:
    """Return how weights are found in a checkpoint: Megatron's tensors are taken apart.

    Args:
        opened: the checkpoint.
        role: whose model.
        config: content of the policy's `config.json`.
    """
    if any(name.startswith(_MEGATRON) for name in model_tensors(opened, role)):
        return megatron_sources(config)
    return plain_sources


def parse_config(data: bytes, place: str) -> dict[str, Any]:
    """Return the content of a `config.json`.

    Raises:
        RecordError: it is no JSON object.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RecordError(f"`{place}` must be a JSON object, got {data[:40]!r}")
    return found


def merge(
    place: str,
    uri: str,
    *,
    policy: str,
    attributes: Mapping[str, Any],
    role: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: Progress = unheard,
) -> Ref:
    """Write the model of a checkpoint as a policy, like an earlier policy of the same model.

    Args:
        place: URI or pin of the checkpoint.
        uri: folder of the new policy.
        policy: pin of the earlier one; gives configuration, tokenizer and types.
        attributes: of the manifest; `role` is added.
        role: one of several; empty for the usual one.
        max_file_bytes: weights beyond this go to further files.
        progress: as for `export`.

    Raises:
        ConfigError: no such role.
        LayoutMismatch: the weights are not those of the earlier policy.
        CheckpointError: the checkpoint or the earlier policy is damaged.
    """
    opened = open_state(place)
    chosen = policy_role(sorted(set(opened.metadata.tensors.roles)), role)
    small = PolicySource.open(policy).small_files()
    config = parse_config(small.get(CONFIG, b"{}"), f"{policy}/{CONFIG}")
    return export(
        opened.pin,
        uri,
        source=policy,
        parents={"policy": parse_pin(policy)[1], "state": opened.commit.meta_sha256},
        attributes={**attributes, "role": chosen},
        max_file_bytes=max_file_bytes,
        role=chosen,
        names=names_for(opened, chosen, config),
        progress=progress,
    )


def merge_with_folder(
    place: str,
    uri: str,
    *,
    folder: Path | None,
    role: str = "",
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: Progress = unheard,
) -> Ref:
    """Write the model of a checkpoint as a policy, beside the small files of a local folder.

    Args:
        place: URI or pin of the checkpoint.
        uri: folder of the new policy.
        folder: has `config.json` and the tokenizer; None for weights alone.
        role: one of several; empty for the usual one.
        dtype: float type of all float weights; None keeps each tensor's own.
        max_file_bytes: weights beyond this go to further files.
        progress: as for `export`.

    Raises:
        ConfigError: no such role.
        CheckpointError: the checkpoint is damaged, or its weights can not be converted.
    """
    opened = open_state(place)
    chosen = policy_role(sorted(set(opened.metadata.tensors.roles)), role)
    file = folder / CONFIG if folder is not None else None
    data = file.read_bytes() if file is not None and file.is_file() else b"{}"
    names = names_for(opened, chosen, parse_config(data, str(file)))
    return export_folder(
        opened.pin,
        uri,
        config_dir=folder,
        max_shard_bytes=max_file_bytes,
        dtype=dtype,
        role=chosen,
        names=names,
        progress=progress,
    )


def config_of(uri: str) -> dict[str, Any]:
    """Return the `config.json` of a policy's folder; empty where it has none.

    Raises:
        RecordError: it is no JSON object.
    """
    place = f"{uri}/{CONFIG}"
    return parse_config(store.read(place), place) if store.exists(place) else {}
