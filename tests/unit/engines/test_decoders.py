import numpy as np
import pytest
import torch

from planish.base.errors import EngineError
from planish.engines.requests import ModelRef
from planish.engines.transformers import fused_decoder
from planish.engines.transformers.engine import TransformersEngine
from planish.models.policy import DTYPES, save_policy
from tests.unit.engines.tiny import (
    family_policy,
    qwen3_policy,
    reference_greedy,
    reference_logprobs,
    request,
    start,
)

pytestmark = pytest.mark.slow


def check_against_the_plain_forward(policy, engine):
    requests = [request(i, 5 + 3 * i, temperature=0.0) for i in range(6)]
    outputs = engine.generate(requests)
    for one, output in zip(requests, outputs, strict=True):
        expected = reference_greedy(policy, one.prompt_ids, one.sampling.max_new_tokens)
        assert output.token_ids == expected
        logprobs = reference_logprobs(policy, one.prompt_ids, output.token_ids)
        assert np.abs(np.array(output.logprobs) - logprobs).max() < 2e-4


THETA = {"rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, **THETA}


@pytest.mark.parametrize(
    ("decoder", "family", "changes"),
    [
        ("Fused", "Llama", {"num_key_value_heads": 1}),
        ("Fused", "Qwen2", {"num_key_value_heads": 2}),
        ("Fused", "Qwen3", {"num_key_value_heads": 2}),
        ("Fused", "Mistral", {"num_key_value_heads": 4, "sliding_window": None}),
        ("Fused", "Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Fused", "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}}),
        ("Fused", "Llama", {"rope_parameters": LLAMA3}),
        ("Module", "GPT2", {}),
        ("Module", "Mistral", {"sliding_window": 5}),
        (
            *("Module", "Qwen3Moe"),
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        ),
        ("Module", "Gemma3Text", {"sliding_window": 6, "query_pre_attn_scalar": 16}),
        ("Module", "Phi", {}),
    ],
)
def test_a_decoder_equals_the_plain_forward(decoder, family, changes):
    policy = family_policy(family, **changes)
    engine = start(policy, max_rows=3)
    assert type(engine._batch.decoder).__name__ == f"{decoder}Decoder"
    check_against_the_plain_forward(policy, engine)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Phi3ForCausalLM", {}),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}),
        ("LlamaForCausalLM", {"rms_norm_eps": None}),
        ("LlamaForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("LlamaForCausalLM", {"sliding_window": 5}),
        ("LlamaForCausalLM", {"rope_parameters": None}),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    ],
)
def test_what_the_fused_decoder_does_not_cover_goes_elsewhere(architecture, changes):
    good = {
        "hidden_act": "silu",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    }
    names = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]
    assert fused_decoder.fits("LlamaForCausalLM", good, names)
    assert not fused_decoder.fits(architecture, {**good, **changes}, names)
    for other in ("model.layers.0.mlp.extra", names[1].replace(".1.", ".2.")):
        assert not fused_decoder.fits("LlamaForCausalLM", good, [*names, other])


def test_half_precision_gives_nearly_the_log_probabilities_of_single_precision():
    requests = [request(i, 10) for i in range(4)]
    exact = qwen3_policy()
    half = qwen3_policy()
    half.model.to(torch.bfloat16)
    for fused in (True, False):
        for one, output in zip(requests, start(half, fused=fused).generate(requests), strict=True):
            expected = reference_logprobs(exact, one.prompt_ids, output.token_ids)
            assert np.abs(np.array(output.logprobs) - expected).mean() < 0.05
            assert output.num_tokens == 10


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("head", ["float32", "bfloat16", None])
def test_the_head_computes_in_the_type_that_the_policy_names_or_in_float32(tmp_path, fused, head):
    policy = qwen3_policy(dtype="bfloat16")
    if head:
        policy.model.config.head_dtype = head
    pin = save_policy(f"file://{tmp_path}/p", policy, version=0, parents={}, attributes={}).pin()
    engine = TransformersEngine(max_rows=2, fused=fused)
    engine.start(ModelRef(pin=pin))
    decoder = engine._running().decoder
    decoder.cache.reserve(2)
    rows = torch.arange(2)
    ids, where, bias = torch.tensor([5, 6]), torch.zeros_like(rows), torch.zeros(2, 1)
    with torch.inference_mode():
        logits = decoder.decode(ids, where, rows * decoder.cache.width, bias)
    assert logits.dtype == DTYPES[head or "float32"]


def test_a_model_with_state_space_layers_is_refused():
    policy = family_policy("Llama")
    policy.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(EngineError, match=r"must be full or sliding.*\['linear_attention'\]"):
        TransformersEngine().start(ModelRef(policy=policy))


def test_the_probe_refuses_a_decoder_that_computes_something_else():
    policy = qwen3_policy()
    inner = policy.model.forward

    def drifting(*args, **kwargs):
        output = inner(*args, **kwargs)
        if not kwargs.get("use_cache"):
            output.logits = output.logits * 1.5
        return output

    policy.model.forward = drifting
    engine = TransformersEngine()
    with pytest.raises(EngineError, match=r"FusedDecoder .* ModuleDecoder .* tolerances"):
        engine.start(ModelRef(policy=policy))
    assert engine.state == "failed"


def test_swapped_gate_and_up_weights_are_noticed():
    policy = qwen3_policy()
    expected = reference_greedy(policy, request(0).prompt_ids, 8)
    for layer in policy.model.model.layers:
        gate, up = layer.mlp.gate_proj, layer.mlp.up_proj
        gate.weight.data, up.weight.data = up.weight.data.clone(), gate.weight.data.clone()
    output = start(policy).generate([request(0, 8, temperature=0.0)])[0]
    assert output.token_ids != expected
