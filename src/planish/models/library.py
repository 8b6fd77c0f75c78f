"""Import of transformers without its unused dependencies."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from planish.base.errors import ConfigError
from planish.models.headers import language_config
from planish.models.shapes import CAP

_ARCHITECTURE = re.compile(r"[A-Za-z0-9]+(?P<head>For[A-Za-z]+)")
_MATHEMATICS = re.compile(
    r"soft_?cap|multiplier|logits?_scal|scale_attn|query_pre_attn|sliding_window|partial_rotary"
    r"|clip_qkv|alibi|sink|qk_(layer_?)?norm|(attention|qkv|mlp|o)_bias|parallel_residual"
)
"""Names of settings that change the computation of a decoder."""
_READERS = {CAP: ("gemma2", "vaultgemma")}
"""Settings that only some families of transformers read, and these families."""
UNUSED = ("sklearn", "scipy")


def load_transformers() -> Any:
    """Import transformers with the base of all its models.

    If it finds scikit-learn, it imports that with scipy and pandas, for a decoding method that no
    stage uses; it imports scipy for the loss of object detection. Both take a quarter of the start
    of every stage, so this function hides them.
    """
    # Once loaded, transformers may have found them, and then imports them.
    is_first = "transformers" not in sys.modules
    hidden = [name for name in UNUSED if is_first and name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        import transformers

        # Stages that only look at a model have no torch in their image.
        if transformers.is_torch_available():
            import transformers.generation.utils
            import transformers.modeling_layers
    finally:
        for name in hidden:
            del sys.modules[name]
    return transformers


def unread_settings(config: Mapping[str, Any]) -> list[str]:
    """Return settings of a config.json that change the mathematics and that transformers ignores.

    A setting that is off, or a factor of 1, changes nothing. Other engines may read the settings,
    so that engine and trainer would compute two models.
    """
    load_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = language_config(config)
    family = config.get("model_type")
    if family not in CONFIG_MAPPING:
        return []
    made = CONFIG_MAPPING[family]
    defaults = made().to_dict()
    known = {*defaults, *made.attribute_map, *(defaults.get("rope_parameters") or ())}
    off = "sliding_window" if config.get("use_sliding_window") is False else None
    return [
        name
        for name, value in config.items()
        if _MATHEMATICS.search(name)
        and (value is True or value not in (None, False, "", 0, 1))
        and name != off
        and (name not in known or family not in _READERS.get(name, (family,)))
    ]


def model_class(config: Mapping[str, Any], heads: Sequence[str] = ("ForCausalLM",)) -> Any:
    """Return the class of transformers that a config.json names.

    `heads` are the accepted endings of the class name.

    Raises:
        ConfigError: this version of transformers has no such class.
    """
    transformers = load_transformers()
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else ""
    match = _ARCHITECTURE.fullmatch(str(name))
    is_known = match and match["head"] in heads
    found = getattr(transformers, name, None) if is_known else None
    if found is None:
        wanted = " or ".join(heads)
        raise ConfigError(
            "`architectures` in config.json must name a class of transformers "
            f"{transformers.__version__} that ends in {wanted}, got {names!r:.200}; choose another "
            "model: code that comes with a model is never run"
        )
    return found
