"""Checks of a policy folder before an engine reads a tensor."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from planish.base.errors import EngineError
from planish.models.experts import expert_faults
from planish.models.headers import dtype_name
from planish.models.policy import read_model_config
from planish.models.tokens import Tokenizer, load_tokenizer

_DTYPES = ("float64", "float32", "bfloat16", "float16")


def check_policy(folder: Path, names: Collection[str]) -> tuple[dict[str, Any], Tokenizer]:
    """Return configuration and tokenizer of a policy folder with tensors of these names.

    Raises:
        EngineError: the message has all faults, e.g. an unusable type, quantised weights, missing
            or surplus experts, a tokenizer of another model.
    """
    config, tokenizer = read_model_config(folder), load_tokenizer(folder)
    faults = []
    dtype = dtype_name(config)
    if dtype not in _DTYPES:
        faults.append(f"`dtype` {dtype!r} in place of one of {', '.join(_DTYPES)}")
    if config.get("quantization_config"):
        faults.append(
            "a `quantization_config`, though weights change in training: engines quantise them by "
            "themselves (`engine.quantization`)"
        )
    vocabulary, last = config.get("vocab_size"), max(tokenizer.eos_token_ids)
    if vocabulary is not None and last >= int(vocabulary):
        faults.append(
            f"the end token {last} beyond the model's vocabulary of {vocabulary}: the tokenizer is "
            "of another model"
        )
    faults += expert_faults(names, config)
    if faults:
        raise EngineError(
            f"a policy must be one that engines can serve, got {'; '.join(faults[:5])} "
            f"({len(faults)} in all); export the policy of this run again"
        )
    return config, tokenizer
