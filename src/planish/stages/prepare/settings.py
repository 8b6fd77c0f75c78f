"""The configuration of a run: preset, file, overrides and run parameters, in that order."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planish import store
from planish.base.config import load_preset, merge, parse_toml, resolve_config
from planish.base.errors import ConfigError, ObjectMissing

MODEL_KEY = ("model", "path")
"""Setting that the run parameter `model` stands for."""
DATASET_KEY = ("curate", "dataset")
"""Setting that the run parameter `dataset` stands for."""
SEED_KEY = ("run", "seed")
"""Setting that the run parameter `seed` stands for."""

_PIN = re.compile(r"^(?P<place>.+)#sha256=(?P<digest>[0-9a-f]{64})$")


def read_config_file(place: str) -> dict[str, dict[str, Any]]:
    """Read a TOML file from a URI or a local path, optionally pinned by `#sha256=<digest>`.

    Raises:
        ConfigError: missing, not TOML in UTF-8, or of another digest.
    """
    pinned = _PIN.match(place)
    digest = pinned["digest"] if pinned else ""
    place = pinned["place"] if pinned else place
    data = _read(place)
    seen = hashlib.sha256(data).hexdigest()
    if digest and seen != digest:
        raise ConfigError(
            f"`config` must have the sha256 {digest}, got {seen} of {place!r}; the file changed "
            "after the run was set up: upload it again or drop the pin"
        )
    return parse_toml(data, name=place)


def _read(place: str) -> bytes:
    try:
        if "://" in place:
            return store.read(place)
        return Path(place).read_bytes()
    except ObjectMissing:
        reason = "nothing there"
    except (OSError, ValueError) as error:
        if "://" in place:
            raise
        reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(
        f"`config` must be the URI or path of a TOML file, got {place!r} ({reason}); upload it "
        "first, a pod sees no file of your machine"
    )


def split_overrides(text: str) -> list[str]:
    """Split `a.b=1 c.d='x y'` as a shell would.

    Raises:
        ConfigError: a quote that is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"`overrides` must be `section.key=value` separated by spaces, got {text!r} ({error})"
        ) from None


def build_config(
    *, preset: str, config: str, overrides: str, model: str, dataset: str, seed: int
) -> dict[str, dict[str, Any]]:
    """Return the resolved configuration.

    Later layers win: preset, file, overrides, then the run parameters `model`, `dataset`, `seed`.

    Args:
        preset: name of a shipped preset; empty for none.
        config: URI or path of a TOML file; empty for none.
        overrides: `section.key=value` separated by spaces.
        model: hub id or folder; empty leaves the configured one.
        dataset: hub id or file; empty leaves the configured one.
        seed: -1 leaves the configured one.

    Raises:
        ConfigError: every fault of every section in one message.
    """
    if seed < -1:
        raise ConfigError(f"`seed` must be 0 or more, or -1 for the configured one, got {seed}")
    layers: list[Mapping[str, Mapping[str, Any]]] = []
    if preset:
        layers.append(load_preset(preset))
    if config:
        layers.append(read_config_file(config))
    layers.append(merge(*layers, overrides=split_overrides(overrides)))
    for (section, key), value, is_given in (
        (MODEL_KEY, model, model != ""),
        (DATASET_KEY, dataset, dataset != ""),
        (SEED_KEY, seed, seed >= 0),
    ):
        if is_given:
            layers.append({section: {key: value}})
    return resolve_config(merge(*layers))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as `a.b.c` to value.

    Example:
        >>> flatten({"train": {"learning_rate": 0.1}})
        {'train.learning_rate': 0.1}
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{path}."))
        else:
            flat[path] = value
    return flat


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return `key: old -> new` for every setting that differs, sorted by key."""
    old, new = flatten(before), flatten(after)
    absent = "(absent)"
    return [
        f"`{key}`: {old.get(key, absent)!r} -> {new.get(key, absent)!r}"
        for key in sorted({*old, *new})
        if old.get(key, absent) != new.get(key, absent)
    ]
