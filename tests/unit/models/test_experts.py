import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from planish.base.errors import ConfigError
from planish.engines.requests import ModelRef, Request, Sampling
from planish.engines.transformers.engine import TransformersEngine
from planish.models.config import ModelConfig
from planish.models.experts import disk_tensors, num_experts, on_disk
from planish.models.policy import Policy, build_policy, load_policy, save_policy
from tests.unit.engines.pinned import PinnedWeights

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 54,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "norm_topk_prob": True}


def family(name):
    if name == "qwen3_moe":
        config = Qwen3MoeConfig(**SIZES, **MOE, num_experts=4, head_dim=16)
        return Qwen3MoeForCausalLM(config)
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    config = DeepseekV3Config(
        **SIZES,
        **MOE,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    return DeepseekV3ForCausalLM(config)


FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3"]


@pytest.fixture(params=FAMILIES)
def model(request):
    torch.manual_seed(7)
    return family(request.param).eval()


def greedy(engine):
    sampling = Sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    requests = [
        Request(f"r{i}", tuple(range(4 + i, 9 + 2 * i)), sampling=sampling) for i in range(3)
    ]
    return [output.token_ids for output in engine.generate(requests)]


def test_a_policy_folder_holds_the_very_tensors_that_transformers_saves(model, tmp_path):
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    made = on_disk(model.state_dict(), model.config.to_dict())
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    assert num_experts(model.config.to_dict()) == 4


def test_names_on_disk_are_views_of_the_memory(model):
    state = model.state_dict()
    for tensor in on_disk(state, model.config.to_dict()).values():
        tensor.zero_()
    assert all(not tensor.any() for tensor in state.values())


def test_a_saved_policy_with_experts_loads_as_it_was(model, tmp_path):
    tokenizer = build_policy(ModelConfig(), 0).tokenizer
    uri = f"file://{tmp_path}/policy"
    ref = save_policy(uri, Policy(model, tokenizer), version=3, parents={}, attributes={})
    again = load_policy(ref.pin())
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(again.model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_an_engine_takes_new_weights_by_their_names_on_disk_and_the_old_ones_back(model, tmp_path):
    tokenizer = build_policy(ModelConfig(), 0).tokenizer
    pins = []
    for version in range(2):
        uri = f"file://{tmp_path}/policy{version}"
        policy = Policy(model, tokenizer)
        pins.append(save_policy(uri, policy, version=version, parents={}, attributes={}).pin())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    fresh = []
    for pin in pins:
        with TransformersEngine(max_rows=4, max_model_len=48) as engine:
            engine.start(ModelRef(pin))
            fresh.append(greedy(engine))
    assert fresh[0] != fresh[1]
    with TransformersEngine(max_rows=4, max_model_len=48) as engine:
        engine.start(ModelRef(pins[0]))
        for version, which in enumerate((1, 0, 1), start=1):
            engine.update_weights(PinnedWeights(pins[which]), version)
            assert greedy(engine) == fresh[which]


def test_experts_of_an_unknown_family_are_refused():
    with pytest.raises(ConfigError, match=r"must be of .*mixtral.*, got the `model_type` 'other'"):
        list(disk_tensors("a.mlp.experts.down_proj", (2, 3, 4), {"model_type": "other"}))
