"""The configuration of a run: preset, file, overrides and run parameters, in that order."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planish import store
from planish.base.config import load_preset, load_toml, merge, parse_toml, resolve_config
from planish.base.errors import ConfigError, ObjectMissing

_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\[\s'"\\]""", re.DOTALL)
_TOML_VALUE = re.compile(r"""(?:--)?[\w-]+(?:\.[\w-]+)+=(?P<opening>[\[{"'])""")

_PIN = re.compile(r"^(?P<place>.+)#sha256=(?P<digest>[0-9a-f]{64})$")


def read_config_file(place: str) -> dict[str, dict[str, Any]]:
    """Read a TOML file from a URI or a local path, optionally pinned by `#sha256=<digest>`.

    Raises:
        ConfigError: the file is missing, is not TOML in UTF-8, or has another digest.
    """
    pinned = _PIN.match(place)
    place = pinned["place"] if pinned else place
    try:
        data = store.read(place) if "://" in place else Path(place).read_bytes()
    except (OSError, ValueError) as error:
        is_missing = isinstance(error, ObjectMissing)
        if "://" in place and not is_missing:
            raise
        reason = "nothing there" if is_missing else getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"`config` must be the URI or path of a TOML file, got {place!r} ({reason}); upload it "
            "first, a pod sees no file of your machine"
        ) from None
    seen = hashlib.sha256(data).hexdigest()
    if pinned and seen != pinned["digest"]:
        raise ConfigError(
            f"`config` must have the sha256 {pinned['digest']}, got {seen} of {place!r}; the file "
            "changed after the run was set up: upload it again or drop the pin"
        )
    return parse_toml(data, name=place)


def split_overrides(text: str) -> list[str]:
    """Split `a.b=1 c.d='x y'` as a shell would, but keep the escapes of values.

    A value in brackets, or in quotes with a backslash inside, stays unchanged, as TOML. Elsewhere a
    backslash escapes a space, a quote or a backslash, and is kept before any other character.

    Example:
        >>> split_overrides("a.b='x y' a.c=[1, 2]")
        ['a.b=x y', 'a.c=[1, 2]']

    Raises:
        ConfigError: a quote is not closed.
    """
    words = []
    rest = text.lstrip()
    while rest:
        end = _toml_end(rest)
        if end:
            words.append(rest[:end])
        elif match := _WORD.match(rest):
            end = match.end()
            words.append(_QUOTED.sub(_unquote, match[0]))
        else:
            raise ConfigError(
                "`overrides` must be `section.key=value` separated by spaces, got a quote or "
                f"backslash that nothing closes: {rest!r:.200}"
            )
        rest = rest[end:].lstrip()
    return words


def _toml_end(text: str) -> int:
    """Return the end of the first override if its value must stay TOML, else 0."""
    match = _TOML_VALUE.match(text)
    if match is None:
        return 0
    closing = {"[": "]", "{": "}"}.get(match["opening"], match["opening"])
    start = match.end() - 1
    for end in (m.end() for m in re.finditer(rf"{re.escape(closing)}(?=\s|$)", text)):
        try:
            load_toml(f"v = {text[start:end]}", name="overrides")
        except ConfigError:
            continue
        return end if closing in "]}" or "\\" in text[start:end] else 0
    return 0


def _unquote(match: re.Match[str]) -> str:
    quoted = match[0]
    if quoted[0] == "'":
        return quoted[1:-1]
    if quoted[0] == '"':
        return re.sub(r'\\(["\\])', r"\1", quoted[1:-1])
    return quoted[1:]


def build_config(
    *, preset: str, config: str, overrides: str, model: str, dataset: str, seed: int
) -> dict[str, dict[str, Any]]:
    """Return the resolved configuration.

    Later layers win: preset, TOML file (URI or path), overrides (`section.key=value` separated by
    spaces), then the run parameters `model`, `dataset` and `seed`. Empty texts, and a seed of -1,
    change nothing. With a `model.path`, `curate.gsm8k_as` of the preset is ignored, because presets
    set it for models built from scratch.

    Raises:
        ConfigError: every fault of every section in one message.
    """
    if seed < -1:
        raise ConfigError(f"`seed` must be 0 or more, or -1 for the configured one, got {seed}")
    base = load_preset(preset) if preset else {}
    file = read_config_file(config) if config else {}
    words = split_overrides(overrides)
    given: dict[str, dict[str, Any]] = {}
    if model:
        given["model"] = {"path": model}
    if dataset:
        given["curate"] = {"dataset": dataset}
    if seed >= 0:
        given["run"] = {"seed": seed}
    raw = merge(merge(base, file, overrides=words), given)
    if raw.get("model", {}).get("path"):
        base.get("curate", {}).pop("gsm8k_as", None)
        raw = merge(merge(base, file, overrides=words), given)
    return resolve_config(raw)


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
