"""Which layers get adapters, the same by the names in memory and by those of a folder."""

import pytest
import torch
import transformers

from planish.base.errors import ConfigError
from planish.models.adapters import (
    KEY,
    Adapters,
    check_same,
    configured,
    find_layers,
    is_adapter,
    num_trained,
)
from planish.models.config import ModelConfig
from planish.models.experts import on_disk
from planish.models.lora import add_adapters, merge_adapters, merged_weights

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "Phi3": {"pad_token_id": 0},
    "Qwen3Moe": {"num_experts": 4, "head_dim": 8, **EXPERTS},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def model_of(family):
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def trained_layers(model):
    return {
        name.removesuffix(".lora_A.default.weight")
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".lora_A." in name
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_a_folder_find_the_layers_that_get_adapters(family):
    model = model_of(family)
    tensors = on_disk(model.state_dict(), model.config.to_dict())
    layers = find_layers({name: tuple(t.shape) for name, t in tensors.items()}, [])
    add_adapters(model, Adapters(4, 8.0, ()), seed=[0])
    assert set(layers) == trained_layers(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == num_trained(layers, 4)
    assert not any(part in name for name in layers for part in ("experts", "gate.", "lm_head"))
    per_layer = {name.rpartition(".")[2] for name in layers}
    assert "o_proj" in per_layer
    assert ("gate_proj" in per_layer) == (family in ("Llama", "Qwen2", "Qwen3", "Gemma2"))


def test_only_the_named_layers_get_adapters_and_b_times_a_begins_at_zero():
    model, other = model_of("Qwen2"), model_of("Qwen2")
    ids = torch.arange(8)[None]
    before = model(ids).logits
    for seen, seed in ((model, [7, 0]), (other, [7, 1])):
        torch.manual_seed(5)
        wanted = torch.get_rng_state()
        add_adapters(seen, Adapters(4, 8.0, ("q_proj", "v_proj")), seed=seed)
        assert torch.equal(torch.get_rng_state(), wanted)
    assert {name.rpartition(".")[2] for name in trained_layers(model)} == {"q_proj", "v_proj"}
    assert torch.equal(model(ids).logits, before)
    ours, theirs = (m.model.layers[0].self_attn.q_proj.lora_A for m in (model, other))
    assert not torch.equal(ours["default"].weight, theirs["default"].weight)


def test_merged_weights_compute_what_weights_and_adapters_compute_together():
    model = model_of("Qwen2").double()
    add_adapters(model, Adapters(4, 8.0, ()), seed=[0])
    model.double()
    layer = model.model.layers[0].mlp.up_proj
    torch.manual_seed(1)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        torch.nn.init.normal_(parameter, std=0.2)
    base = layer.base_layer.weight.detach().clone()
    change = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    ids = torch.arange(8)[None]
    wanted = model(ids).logits.detach()
    merged = merged_weights(model)
    assert not any(is_adapter(name) for name in merged)
    assert torch.allclose(merged["model.layers.0.mlp.up_proj.weight"], base + 2 * change)
    assert torch.equal(layer.base_layer.weight, base)
    plain = model_of("Qwen2").double()
    plain.load_state_dict(merged)
    assert torch.allclose(plain(ids).logits, wanted, atol=1e-10)
    merge_adapters(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.allclose(model(ids).logits, wanted, atol=1e-10)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("Qwen2", ["q_proj", "attn"], r"which has \['down_proj', .*got \['attn'\]; name some"),
        ("Qwen3Moe", ["q_proj", "down_proj"], r"got \['down_proj'\] of routed experts, which take"),
        ("Qwen3Moe", ["gate"], r"got \['gate'\]; name some"),
        ("Mixtral", ["gate_up_proj"], r"got \['gate_up_proj'\] of routed experts"),
    ],
)
def test_a_layer_that_is_not_there_or_of_experts_is_refused_by_name(family, targets, message):
    with pytest.raises(ConfigError, match=message):
        add_adapters(model_of(family), Adapters(4, 8.0, tuple(targets)), seed=[0])


def test_a_model_without_linear_layers_of_its_own_is_refused():
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)
    with pytest.raises(ConfigError, match=r"set `model\.lora_rank = 0` for this model"):
        add_adapters(transformers.GPT2LMHeadModel(config), Adapters(4, 8.0, ()), seed=[0])


def test_settings_off_leave_no_trace_and_a_negative_rank_is_refused():
    plain = ModelConfig().model_dump()
    assert not any(name.startswith("lora") for name in plain)
    assert configured(ModelConfig(lora_alpha=4.0)) is None
    on = ModelConfig(lora_rank=8, lora_target_modules=["v_proj", "q_proj"])
    assert on.model_dump().keys() - plain.keys() == {
        "lora_rank", "lora_alpha", "lora_target_modules",
    }  # fmt: skip
    assert configured(on) == Adapters(8, 32.0, ("q_proj", "v_proj"))
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        ModelConfig(lora_rank=-1)


def test_a_state_goes_on_with_the_adapters_that_it_was_saved_with():
    ours = Adapters(8, 32.0, ())
    check_same({KEY: ours.to_json()}, ours, pin="p")
    check_same({}, None, pin="p")
    for held, wanted, message in (
        ({KEY: ours.to_json()}, Adapters(4, 32.0, ()), "rank 8, .* in 'p', got rank 4"),
        ({KEY: ours.to_json()}, Adapters(8, 16.0, ()), "alpha 32.0, .*got rank 8, alpha 16.0"),
        ({KEY: ours.to_json()}, None, "rank 8, .*got all weights"),
        ({}, ours, "all weights in 'p', got rank 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_same(held, wanted, pin="p")
