"""Post-training algorithms: pure functions of tensors, and one short file for each published
recipe.

This package does not import torch at run time. Its functions call only methods of the tensors they
get, so processes without torch can check configurations.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from planish.base.config import Section, nearest
from planish.base.errors import ConfigError

if TYPE_CHECKING:
    from planish.algorithms.base import Algorithm, Recipe

ALGORITHMS: dict[str, str] = {
    "dapo": "planish.algorithms.dapo:RECIPE",
    "cispo": "planish.algorithms.cispo:RECIPE",
    "grpo": "planish.algorithms.grpo:RECIPE",
    "gspo": "planish.algorithms.gspo:RECIPE",
    "ppo": "planish.algorithms.ppo:RECIPE",
    "tppo": "planish.algorithms.tppo:RECIPE",
    "vapo": "planish.algorithms.vapo:RECIPE",
    "vc_ppo": "planish.algorithms.vc_ppo:RECIPE",
}
"""Name of an algorithm to `module:attribute` of its `planish.algorithms.base.Recipe`."""

DEFAULT_ALGORITHM = "dapo"


def algorithm_recipe(raw: Mapping[str, Any]) -> Recipe:
    """Return the recipe that the raw `[algorithm]` table names in its key `name`.

    Raises:
        ConfigError: there is no such algorithm; the message gives the nearest name.
    """
    name = raw.get("name", DEFAULT_ALGORITHM)
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(
            f"`algorithm.name` must be one of {sorted(ALGORITHMS)}, got {name!r:.200}"
            f"{nearest(str(name), ALGORITHMS)}"
        )
    module, _, attribute = ALGORITHMS[name].partition(":")
    recipe: Recipe = getattr(importlib.import_module(module), attribute)
    return recipe


def algorithm_config(raw: Mapping[str, Any]) -> type[Section]:
    """Return the configuration class of the raw `[algorithm]` table."""
    return algorithm_recipe(raw).config_class


def build_algorithm(raw: Mapping[str, Any]) -> Algorithm:
    """Build the algorithm of an `[algorithm]` table.

    Raises:
        ConfigError: unknown name, key or value.
    """
    return algorithm_recipe(raw).build(raw)
