"""The table of what vLLM serves is that of the vLLM in this environment."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from planish.engines.architectures import VLLM, WINDOWED

pytest.importorskip("vllm")


def test_the_table_names_the_models_of_transformers_that_vllm_has_a_class_for():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS as SERVED

    names = {name for v in KNOWN.values() for name in (v if isinstance(v, tuple | list) else [v])}
    assert {name for name in names & set(SERVED) if name.endswith("ForCausalLM")} == VLLM


def test_the_models_with_a_window_for_each_layer_are_those_whose_source_has_one():
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS as SERVED

    root, having = Path(find_spec("vllm").origin).parent, set()
    for name in VLLM:
        module = SERVED[name][0]
        if "." in module:  # a package of one family
            files = (root / module.removeprefix("vllm.").replace(".", "/")).rglob("*.py")
        else:
            files = [root / f"model_executor/models/{module}.py"]
        if any(
            word in file.read_text()
            for file in files
            for word in ("per_layer_sliding", "window_size")
        ):
            having.add(name)
    # The first layers of its parent are refused by number.
    assert having - {"Qwen3ForCausalLM"} == WINDOWED
