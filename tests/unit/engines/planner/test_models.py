"""Shapes of models: published counts, latent attention, and config.json of three families."""

import json

import pytest

from planish.base.errors import ConfigError
from planish.engines.planner.models import MODELS, find_model, model_of

MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 56,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(
    ("name", "attention", "expert", "kv_bytes"),
    [
        ("mixtral-8x22b", 4.93, 16.91, 229376),
        ("dbrx", 3.52, 7.93, 163840),
        ("scaled-moe", 7.25, 9.66, 196608),
    ],
)
def test_parameters_and_cache_equal_the_published_counts(name, attention, expert, kv_bytes):
    model = MODELS[name]
    shapes = model.attention_matrices(1)
    assert round(model.layers * sum(a * b for a, b in shapes) / 1e9, 2) == attention
    assert round(model.expert_parameters / 1e9, 2) == expert
    assert model.all_layers * model.kv_bytes(1) == kv_bytes


@pytest.mark.parametrize(
    ("config", "name"),
    [(MIXTRAL, "mixtral-8x22b"), (QWEN3, "qwen3-235b"), (DEEPSEEK, "deepseek-v3")],
)
def test_a_config_file_gives_the_model_of_the_table(tmp_path, config, name):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = find_model(str(tmp_path))
    expected = vars(MODELS[name]) | {"name": tmp_path.name, "head_dim": found.head_dim}
    assert vars(found) == expected
    assert found == find_model(str(tmp_path / "config.json"))


def test_key_value_heads_are_replicated_beyond_their_number():
    qwen = MODELS["qwen3-235b"]
    assert [qwen.kv_bytes(tp) for tp in (1, 2, 4, 8)] == [2048, 1024, 512, 512]
    assert qwen.attention_matrices(8)[0] == (4096, 8192 // 8 + 2 * 128)
    assert qwen.splits_over(8)
    # The queries are wider than the residual stream.
    assert qwen.attention_matrices(1) == [(4096, 8192 + 1024), (8192, 4096)]


def test_latent_attention_caches_its_compressed_rows_on_every_gpu():
    model = MODELS["deepseek-v3"]
    assert [model.kv_bytes(tp) for tp in (1, 8)] == [2 * 576, 2 * 576]
    assert model.all_layers == 61


def test_tied_embeddings_are_stored_once_and_several_modalities_are_read_by_their_language():
    nested = {"model_type": "qwen3_vl_moe", "vocab_size": 1, "text_config": QWEN3}
    assert model_of(nested, "q") == model_of(QWEN3, "q")
    tied, apart = (model_of({**QWEN3, "tie_word_embeddings": t}, "q") for t in (True, False))
    assert apart.attention_bytes(1) - tied.attention_bytes(1) == 2 * 151936 * 4096


def test_layers_without_experts_are_counted_in_each_family():
    assert model_of({**QWEN3, "mlp_only_layers": [0, 5]}, "q").dense_layers == 2
    every_second = model_of({**QWEN3, "decoder_sparse_step": 2}, "q")
    assert (every_second.layers, every_second.dense_layers) == (47, 47)
    assert every_second.dense_size == 12288
    assert model_of(QWEN3, "q").dense_size == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3", "num_hidden_layers": 2}, "got a dense one"),
        ({**MIXTRAL, "hidden_size": None}, "as `hidden_size`, got None"),
        ({**MIXTRAL, "hidden_size": "6144"}, "got '6144'"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "at most as many experts per token"),
        ({**QWEN3, "mlp_only_layers": 3}, "must be a list, got 3"),
        ({**QWEN3, "num_experts": "x"}, "whole number of experts"),
        ({**QWEN3, "num_hidden_layers": 10**12}, "whole number of 1 to 10000000"),
        ({**QWEN3, "mlp_only_layers": list(range(94))}, "at least one layer with experts"),
    ],
)
def test_a_config_that_can_not_be_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        model_of(config, "m")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_file_that_is_no_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"must (be JSON|hold a JSON object), got"):
        find_model(str(tmp_path))


def test_an_unknown_model_is_refused_with_the_names():
    with pytest.raises(ConfigError, match=r"mixtral-8x22b.*got 'mixtrall'"):
        find_model("mixtrall")
