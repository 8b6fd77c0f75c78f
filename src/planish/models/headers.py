"""Configuration and file headers of a model: names, shapes and types, without weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from planish.base.errors import ConfigError
from planish.store.sources import SourceFolder

MAX_HEADER_BYTES = 100_000_000
"""Largest header in bytes that the safetensors library accepts."""
MAX_SMALL_BYTES = 64 << 20
"""Largest file without weights in bytes; the tokenizer of a large vocabulary has 20 MB."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"

MAX_SIZE = 10_000_000
UNLIMITED = 1 << 20
"""Context length in tokens that stands for no limit."""
BY_LENGTH = ("dynamic", "longrope", "su")
"""Rotary scalings whose table depends on the present length; `su` is an older name of
`longrope`."""

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Map from name of a tensor to its type, as safetensors writes it, and its shape."""


def read_headers(folder: SourceFolder) -> tuple[Tensors, list[str]]:
    """Return the tensors in the headers of a folder's safetensors files, and the faults.

    A file that is shorter than its header says is truncated.

    Source: the safetensors format: 8 bytes of length, a JSON header, the bytes of the tensors.
    """
    tensors: Tensors = {}
    faults: list[str] = []
    files = [name for name in folder.sizes if name.endswith(".safetensors")]
    if _INDEX in folder.sizes:
        try:
            index: Any = json.loads(folder.read(_INDEX, 0, folder.sizes[_INDEX]))
            absent = sorted(set(index["weight_map"].values()) - set(files))
            if absent:
                faults.append(
                    f"a model folder must hold every file that its index names, got none of "
                    f"{absent[:4]} in {folder.name!r}; download it again"
                )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            faults.append(f"{_INDEX} must name the files of tensors, got {error!r:.100}")
    for name in files:
        size = folder.sizes[name]
        length = int.from_bytes(folder.read(name, 0, 8), "little") if size >= 8 else -1
        wanted = 8 + length
        try:
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(folder.read(name, 8, length))
            header.pop("__metadata__", None)
            for tensor, entry in header.items():
                tensors[tensor] = (str(entry["dtype"]), tuple(map(int, entry["shape"])))
                wanted = max(wanted, 8 + length + int(entry["data_offsets"][1]))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
            faults.append(
                f"`{name}` must be a whole safetensors file, got one of {size} bytes with "
                f"{e!s:.100}; copy or download it again"
            )
            continue
        if wanted != size:
            faults.append(
                f"`{name}` must have the {wanted} bytes that its header says, got {size}; it was "
                "cut: copy or download it again"
            )
    return tensors, faults


def parse_config(text: bytes | None, place: str) -> dict[str, Any]:
    """Return the JSON object in a model's config.json.

    `text` is None if there is no such file; messages contain `place`.

    Raises:
        ConfigError: the file is missing or not a JSON object.
    """
    if text is None:
        raise ConfigError(
            f"a model folder must hold config.json, got none in {place!r}; give the folder that "
            "`save_pretrained` wrote"
        )
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"config.json of {place!r} must be JSON, got {error}; download it again"
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"config.json of {place!r} must hold a JSON object, got {raw!r:.80}; download it again"
        )
    return raw


def read_config(folder: SourceFolder) -> dict[str, Any]:
    """Return the object in the config.json of a folder, or raise ConfigError as `parse_config`."""
    size = min(folder.sizes.get("config.json", 0), MAX_SMALL_BYTES)
    text = folder.read("config.json", 0, size) if "config.json" in folder.sizes else None
    return parse_config(text, folder.name)


def folder_fault(names: Iterable[str], place: str) -> str:
    """Return why a folder with files of these names is not a policy; "" if it may be one.

    A folder of adapters is refused, since transformers would add them to other weights.
    """
    names = set(names)
    if _ADAPTER in names:
        return (
            f"a model folder must hold a whole model, got adapters (`{_ADAPTER}`) in {place!r}; "
            "merge them into their model: `merge_and_unload` of peft, then `save_pretrained`"
        )
    if any(name.endswith(".safetensors") for name in names):
        return ""
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    found = f"only pickled weights {pickles[:4]}" if pickles else "no weights"
    return (
        f"a model folder must hold *.safetensors, got {found} in {place!r}; save it by "
        "`save_pretrained`: pickles can run code and are never loaded"
    )


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json with the keys of its language model on top, if it has several
    modalities.
    """
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def config_size(
    config: Mapping[str, Any], *keys: str, least: int = 1, default: int | None = None
) -> int:
    """Return the whole number in a config.json under the first of `keys` that it has, or raise
    ConfigError.

    Example:
        >>> config_size({"n_layer": 2}, "num_hidden_layers", "n_layer")
        2
    """
    size = next((config[key] for key in keys if config.get(key) is not None), default)
    if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= MAX_SIZE:
        raise ConfigError(
            f"config.json must have a whole number of {least} to {MAX_SIZE} as "
            f"{' or '.join(f'`{key}`' for key in keys)}, got {size!r:.100}; correct the file"
        )
    return size


def vocabulary(config: Mapping[str, Any]) -> int:
    """Return the vocabulary size in a config.json; 0 if it has none."""
    size = language_config(config).get("vocab_size")
    return size if isinstance(size, int) else 0


def dtype_name(config: Mapping[str, Any]) -> str:
    """Return the type of the weights in a config.json, from one of its two possible keys."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def context_tokens(config: Mapping[str, Any]) -> int:
    """Return the context length up to which engine and trainer compute the same model.

    A rotary scaling whose table depends on the length gives another model beyond its original
    context: an engine's cache keeps the old keys of earlier tokens, while a trainer computes new
    keys.

    Example:
        >>> rope = {"type": "longrope", "original_max_position_embeddings": 4096}
        >>> context_tokens({"max_position_embeddings": 131072, "rope_scaling": rope})
        4096
        >>> context_tokens({"n_positions": 1024}), context_tokens({}) == UNLIMITED
        (1024, True)
    """
    limits = [config.get("max_position_embeddings"), config.get("n_positions")]
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    tables = [rope, *rope.values()] if isinstance(rope, dict) else []
    for table in tables:
        if isinstance(table, dict) and table.get("rope_type", table.get("type")) in BY_LENGTH:
            limits += [where.get("original_max_position_embeddings") for where in (table, config)]
    return min((limit for limit in limits if type(limit) is int and limit > 0), default=UNLIMITED)


def room_fault(config_tokens: int, prompt_tokens: int, response_tokens: int, setting: str) -> str:
    """Return why a prompt leaves too little context for the longest response; "" if it fits.

    `config_tokens` is the result of `context_tokens`, or a lower limit of an engine. `setting` is
    the setting of the response length.
    """
    if prompt_tokens + response_tokens <= config_tokens:
        return ""
    return (
        f"prompt and response must fit in the model's {config_tokens} tokens, got {prompt_tokens} "
        f"+ `{setting}` = {response_tokens}; lower it, lower `rollout.max_prompt_tokens`, or use a "
        "model with a longer context"
    )
