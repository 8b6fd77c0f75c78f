"""Post-training algorithms: pure functions of tensors and one short file per published recipe.

Nothing here imports torch at run time: the functions only call methods of the tensors that they
are given, so that configurations can be checked by processes that have no use for torch.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from planish.config import Section
from planish.errors import ConfigError

if TYPE_CHECKING:
    from planish.algorithms.base import Algorithm

ALGORITHMS: dict[str, str] = {
    "dapo": "planish.algorithms.dapo:Dapo",
    "grpo": "planish.algorithms.grpo:Grpo",
}
"""Name to `module:Class`; the class meets `planish.algorithms.base.Algorithm`."""

DEFAULT_ALGORITHM = "dapo"


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class behind `name`.

    Raises:
        ConfigError: no such algorithm; the nearest name is given.
    """
    if name not in ALGORITHMS:
        close = difflib.get_close_matches(str(name), list(ALGORITHMS), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"`algorithm.name` must be one of {sorted(ALGORITHMS)}, got {name!r}{hint}"
        )
    module, _, attribute = ALGORITHMS[name].partition(":")
    found: type[Algorithm] = getattr(importlib.import_module(module), attribute)
    return found


def algorithm_config(raw: Mapping[str, Any]) -> type[Section]:
    """Return the configuration class that the raw `[algorithm]` table asks for by its `name`."""
    return algorithm_class(raw.get("name", DEFAULT_ALGORITHM)).config_class


def build_algorithm(raw: Mapping[str, Any]) -> Algorithm:
    """Build the algorithm of a resolved `[algorithm]` table.

    Raises:
        ConfigError: unknown name, key or value.
    """
    return algorithm_class(raw.get("name", DEFAULT_ALGORITHM)).from_table(raw)
