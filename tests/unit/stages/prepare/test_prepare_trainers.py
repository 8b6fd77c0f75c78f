"""What a trainer would refuse at its start is refused by prepare, from config.json alone."""

import pytest

from planish.models.shapes import shape_of
from planish.stages.prepare.devices import trainer_faults
from tests.unit.stages.prepare.test_prepare_devices import configured

WINDOWS = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("setting", "model", "words"),
    [
        ("megatron", {"model_type": "qwen2", **WINDOWS}, "sliding windows"),
        ("megatron", {"model_type": "qwen2", **WINDOWS, "use_sliding_window": False}, ""),
        ("megatron", {"model_type": "qwen2", **WINDOWS, "max_window_layers": 2}, ""),
        ("megatron", {"model_type": "qwen3", "attention_bias": True}, "biases of its projections"),
        ("megatron", {"model_type": "llama", "mlp_bias": True}, "biases of its projections"),
        ("megatron", {"model_type": "llama", "hidden_act": "gelu"}, "`hidden_act` 'gelu'"),
        ("megatron", {"model_type": "llama", "rope_scaling": {"type": "yarn"}}, "`rope_type` 'y"),
        ("megatron", {"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, ""),
        ("megatron", {"model_type": "llama", "rope_parameters": {"rope_type": "longrope"}},
         "`rope_type` 'longrope'"),
        ("megatron", {"model_type": "qwen3_moe", **MOE, "decoder_sparse_step": 2},
         "layers without experts"),
        ("megatron", {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1},
         "one expert for each token"),
        ("megatron", {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                      "sliding_window": 8}, "sliding windows"),
        ("context", {"model_type": "mistral", "sliding_window": 64}, "with sliding windows; take"),
        ("context", {"model_type": "mistral", "sliding_window": None}, ""),
        ("context", {"model_type": "qwen2", **WINDOWS}, "with sliding windows; take"),
        ("context", {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
         "with sliding windows; take"),
        ("context", {"model_type": "qwen2", **WINDOWS, "max_window_layers": 2}, ""),
    ],
)  # fmt: skip
def test_what_a_trainer_refuses_at_its_start_is_refused_by_prepare(setting, model, words):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 1024}
    settings = {"megatron": 'train.trainer="megatron"', "context": "train.context_parallel=2"}
    config = configured("dapo-qwen2.5-7b", settings[setting])
    faults = trainer_faults(config, shape_of({**sizes, **model}))
    assert len(faults) == bool(words)
    assert words in "".join(faults)
