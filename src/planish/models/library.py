"""transformers, opened without what nothing here uses."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from planish.base.errors import ConfigError

_ARCHITECTURE = re.compile(r"[A-Za-z0-9]+(?P<head>For[A-Za-z]+)")
UNUSED = ("sklearn", "scipy")


def load_transformers() -> Any:
    """Import transformers with what all its models stand on.

    Where it finds scikit-learn it loads that too, with scipy and pandas, for a way of decoding that
    no stage uses, and scipy for the loss of object detection: a quarter of the start of every
    stage. So it does not find them.
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


def model_class(config: Mapping[str, Any], heads: Sequence[str] = ("ForCausalLM",)) -> Any:
    """Return the class of transformers that a config.json names.

    `heads` are the endings of the names of classes that will do.

    Raises:
        ConfigError: this version of transformers has no such class.
    """
    transformers = load_transformers()
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    match = _ARCHITECTURE.fullmatch(name) if isinstance(name, str) else None
    found = None
    if match is not None and match["head"] in heads:
        found = getattr(transformers, match[0], None)
    if found is None:
        wanted = " or ".join(f"'Qwen3{head}'" for head in heads)
        raise ConfigError(
            "`architectures` in config.json must name a model that this version of transformers "
            f"({transformers.__version__}) knows, such as {wanted}, got {names!r:.200}; choose "
            "another model: code that comes with a model is never run"
        )
    return found
