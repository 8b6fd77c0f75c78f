"""The table of what vLLM serves is that of the vLLM in this environment."""

import pytest

from planish.engines.architectures import VLLM

pytest.importorskip("vllm")


def test_the_table_names_the_models_of_transformers_that_vllm_has_a_class_for():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS as SERVED

    names = {name for v in KNOWN.values() for name in (v if isinstance(v, tuple | list) else [v])}
    assert {name for name in names & set(SERVED) if name.endswith("ForCausalLM")} == VLLM
