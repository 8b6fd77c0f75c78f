"""Import of transformers without dependencies that no stage uses."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planish.base.errors import ConfigError
from planish.models.headers import language_config

_ARCHITECTURE = re.compile(r"[A-Za-z0-9]+(?P<head>For[A-Za-z]+)")
_MATHEMATICS = re.compile(
    r"soft_?cap|multiplier|logits?_scal|scale_attn|query_pre_attn|window|partial_rotary|norm_topk"
    r"|clip_qkv|alibi|sink|qk_(layer_?)?norm|_bias$|parallel_residual|hidden_act|norm_eps"
)
"""Pattern for names of settings that change how a decoder computes from its tensors."""
UNUSED = ("sklearn", "scipy")


def load_transformers() -> Any:
    """Import transformers with the base of all its models.

    If scikit-learn is installed, transformers imports it with scipy and pandas, for a decoding
    method that no stage uses. It imports scipy for the loss of object detection. These imports take
    a quarter of the start of every stage, so this function hides the packages.
    """
    # If transformers is loaded already, it may have found the packages and import them later.
    is_first = "transformers" not in sys.modules
    hidden = [name for name in UNUSED if is_first and name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        import transformers

        # Stages that only inspect a model have no torch in their image.
        if transformers.is_torch_available():
            import transformers.generation.utils
            import transformers.modeling_layers
    finally:
        for name in hidden:
            del sys.modules[name]
    return transformers


def unread_settings(config: Mapping[str, Any]) -> list[str]:
    """Return the settings of a config.json that change the computation but that transformers
    ignores.

    Other engines may read such a setting; engine and trainer would then compute two different
    models. A setting is ignored if no line of the family's code reads its name, even if the
    family's configuration class has it. These settings do not count: a value that is the class's
    default, and, for a name that the class lacks, a false value or a factor of 1.
    """
    root = Path(load_transformers().__file__).parent
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = language_config(config)
    family = config.get("model_type")
    if family not in CONFIG_MAPPING:
        return []
    made = CONFIG_MAPPING[family]
    defaults = made().to_dict()
    folder = root.joinpath(*made.__module__.split(".")[1:-1])
    files = [*folder.glob("modeling_*.py"), *folder.glob("configuration_*.py")]
    read = set().union(*map(_names_in, files), made.attribute_map)
    off = {"sliding_window"} if config.get("use_sliding_window") is False else set()
    return [
        name
        for name, value in config.items()
        if _MATHEMATICS.search(name)
        and name not in read | off
        and (value is True or value != defaults.get(name, value and 1.0))
    ]


def _names_in(file: Path) -> set[str]:
    """Return the names of attributes that a module reads, and of settings in calls and imports."""
    found, kept = set(), set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            # An assignment `self.x = config.x` alone does not use the setting.
            is_kept = ast.unparse(node.targets[0]) == f"self.{node.value.attr}"
            kept |= {node.value} if is_kept else set()
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node not in kept:
            found.add(node.attr)
        elif isinstance(node, ast.Call):
            found |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
        elif isinstance(node, ast.ImportFrom) and "_sliding_window_" in ast.unparse(node):
            # All families share the function that makes masks with sliding windows.
            found.add("sliding_window")
    return found


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
