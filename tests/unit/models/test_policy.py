"""Policies: built, saved, loaded, exported; refused when they do not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from planish.base.errors import ConfigError, ObjectMissing, RecordError
from planish.models.config import ModelConfig
from planish.models.policy import (
    build_policy,
    load_model,
    load_policy,
    save_policy,
)
from planish.records.io import read_manifest, write_files
from planish.records.refs import parse_pin

TINY = ModelConfig(num_layers=1, hidden_size=16, intermediate_size=24, head_dim=8)
FACTS = {"config_sha256": "c" * 64, "seed": 7}


def save(folder, policy, version=0, **attributes):
    uri = f"file://{folder}"
    return save_policy(uri, policy, version=version, parents={}, attributes={**FACTS, **attributes})


def same_weights(left, right):
    pairs = zip(left.state_dict().items(), right.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_default_policy_has_the_published_number_of_parameters():
    policy = build_policy(ModelConfig(), seed=0)
    assert sum(p.numel() for p in policy.model.parameters()) == 102_208
    assert policy.model.get_output_embeddings().weight is policy.model.model.embed_tokens.weight
    assert not policy.model.training


def test_equal_seeds_give_equal_weights_and_leave_the_global_noise_alone():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first, second, other = (build_policy(TINY, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.rand(3), expected)
    assert same_weights(first.model, second.model)
    assert not same_weights(first.model, other.model)


def test_saved_policy_loads_with_equal_weights_and_tokens(tmp_path):
    policy = build_policy(TINY, seed=1)
    ref = save(tmp_path / "p", policy, version=3)
    assert ref.schema == "policy/1"
    assert ref.attributes["policy_version"] == 3
    assert ref.attributes["dtype"] == "float32"
    assert ref.attributes["layout"] == "hf"
    loaded = load_policy(ref.pin())
    assert loaded.version == 3
    assert loaded.folder is not None
    assert same_weights(policy.model, loaded.model)
    messages = [{"role": "user", "content": "1+2="}]
    assert loaded.tokenizer.encode_prompt(messages) == policy.tokenizer.encode_prompt(messages)
    assert not loaded.model.training


def test_saved_folder_opens_with_the_automatic_classes(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = build_policy(TINY, seed=1)
    save(tmp_path / "p", policy)
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "p"))
    assert same_weights(policy.model, model)
    assert len(AutoTokenizer.from_pretrained(str(tmp_path / "p"))) == model.config.vocab_size
    assert model.generation_config.eos_token_id == [2]


def test_saving_is_a_pure_function_of_the_policy(tmp_path):
    refs = [save(tmp_path / name, build_policy(TINY, seed=1)) for name in ("a", "b")]
    assert refs[0].manifest_sha256 == refs[1].manifest_sha256
    manifest = read_manifest(refs[0].uri)
    assert manifest.attributes["seed"] == 7
    for shard in manifest.shards:
        assert str(tmp_path).encode() not in (tmp_path / "a" / shard.name).read_bytes()


def test_bfloat16_policy_keeps_its_type_unless_another_is_asked_for(tmp_path):
    policy = build_policy(TINY.model_copy(update={"dtype": "bfloat16"}), seed=1)
    ref = save(tmp_path / "p", policy)
    assert ref.attributes["dtype"] == "bfloat16"
    assert load_policy(ref.pin()).model.dtype == torch.bfloat16
    assert load_policy(ref.pin(), dtype=torch.float32).model.dtype == torch.float32


def test_another_digest_or_a_damaged_file_is_refused(tmp_path):
    ref = save(tmp_path / "p", build_policy(TINY, seed=1))
    with pytest.raises(RecordError, match="sha256"):
        load_policy(f"{ref.uri}#sha256={'0' * 64}")
    path = tmp_path / "p" / "config.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(RecordError, match=r"config\.json"):
        load_policy(ref.pin())


def test_missing_policy_and_wrong_schema_are_told_apart(tmp_path):
    with pytest.raises(ObjectMissing):
        load_policy(f"file://{tmp_path}/none#sha256={'0' * 64}")
    ref = write_files(f"file://{tmp_path}/x", "other/1", {"a": b"1"}, parents={}, attributes={})
    with pytest.raises(RecordError, match="policy/1"):
        load_policy(ref.pin())


def test_manifest_without_policy_version_is_refused(tmp_path):
    ref = save(tmp_path / "p", build_policy(TINY, seed=1))
    folder = tmp_path / "p"
    files = {path.name: path for path in folder.iterdir() if path.name != "manifest.json"}
    bare = write_files(f"file://{tmp_path}/q", "policy/1", files, parents={}, attributes={})
    with pytest.raises(RecordError, match="must hold `policy_version` as an integer, got None"):
        load_policy(bare.pin())
    assert parse_pin(ref.pin())[1] == ref.manifest_sha256


@pytest.mark.parametrize(
    ("architectures", "seen"),
    [
        (["MyOwnForCausalLM"], "MyOwnForCausalLM"),
        (["Qwen3ForTokenClassification"], "Qwen3ForTokenClassification"),
        (["__import__"], "__import__"),
        ([], r"\[\]"),
        ([["Qwen3ForCausalLM"]], "Qwen3ForCausalLM"),
        ("Qwen3ForCausalLM", "Qwen3ForCausalLM"),
    ],
)
def test_unknown_architecture_is_refused_by_name(tmp_path, architectures, seen):
    save(tmp_path / "p", build_policy(TINY, seed=1))
    path = tmp_path / "p" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": architectures}))
    with pytest.raises(ConfigError, match=f"`architectures` in config.json.*{seen}"):
        load_model(tmp_path / "p")


def test_incomplete_weights_are_refused_instead_of_filled_with_noise(tmp_path):
    save(tmp_path / "p", build_policy(TINY, seed=1))
    path = tmp_path / "p" / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"complete, got none for \['model.norm.weight'\]"):
        load_model(tmp_path / "p")


def test_weights_of_another_shape_or_no_weights_at_all_are_a_clear_error(tmp_path):
    save(tmp_path / "p", build_policy(TINY, seed=1))
    wider = TINY.model_copy(update={"hidden_size": 32})
    save(tmp_path / "q", build_policy(wider, seed=1))
    data = (tmp_path / "q" / "model.safetensors").read_bytes()
    for wrong in (data, data[:100], b""):
        (tmp_path / "p" / "model.safetensors").write_bytes(wrong)
        with pytest.raises(ConfigError, match="must hold a model that"):
            load_model(tmp_path / "p")
