"""Policies: built, saved, loaded, exported; refused when they do not fit."""

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional

from planish.base.errors import CheckpointError, ConfigError, RecordError
from planish.models.config import ModelConfig
from planish.models.critic import (
    blank_critic,
    critic_from_policy,
    describe_critic,
    open_critic_model,
    random_critic,
)
from planish.models.logprobs import ValueScorer
from planish.models.policy import (
    DTYPES,
    build_policy,
    head_dtype,
    load_model,
    load_policy,
    name_head_dtype,
    policy_tokenizer,
    save_policy,
)
from planish.models.tokens import Tokenizer
from planish.records.io import read_manifest, write_files
from planish.records.refs import parse_pin
from tests.rounding import VALUES

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


def test_policies_with_the_same_tokenizer_share_it_and_no_weights_are_read(tmp_path):
    pins = [save(tmp_path / str(n), build_policy(TINY, n), n).pin() for n in range(2)]
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    first, second = (policy_tokenizer(pin) for pin in pins)
    assert first is second
    assert first.encode_response("12") == build_policy(TINY, 0).tokenizer.encode_response("12")
    policy = build_policy(TINY, 0)
    policy.tokenizer.backend.chat_template += " "
    assert policy_tokenizer(save(tmp_path / "other", policy).pin()) is not first


def test_equal_seeds_give_equal_weights_and_leave_the_global_noise_alone():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first, second, other = (build_policy(TINY, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.rand(3), expected)
    assert same_weights(first.model, second.model)
    assert not same_weights(first.model, other.model)


def test_a_policy_keeps_the_ends_that_its_run_has_named(tmp_path):
    policy = build_policy(TINY, seed=1)
    policy.tokenizer = Tokenizer(policy.tokenizer.backend, [9, 3], has_all_ends=True)
    loaded = load_policy(save(tmp_path / "p", policy).pin())
    again = load_policy(save(tmp_path / "again", loaded).pin())
    assert again.tokenizer.eos_token_ids == (9, 3)


@pytest.mark.parametrize(
    ("dtype", "head", "named"),
    [("float32", "float32", None), ("bfloat16", "float32", "float32"),
     ("float32", "bfloat16", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16")],
)  # fmt: skip
def test_a_policy_names_the_type_of_its_head_and_copies_of_it_compute_in_it(
    tmp_path, dtype, head, named
):
    config = TINY.model_copy(update={"dtype": dtype, "head_dtype": head})
    policy = build_policy(config, seed=1)
    name_head_dtype(policy.model.config, config)
    pin = save(tmp_path / "p", policy).pin()
    assert json.loads((tmp_path / "p" / "config.json").read_text()).get("head_dtype") == named
    model = copy.deepcopy(load_policy(pin).model)
    ids = torch.arange(1, 7)[None]
    states = model.model(input_ids=ids).last_hidden_state
    wanted = functional.linear(*(x.to(DTYPES[head]) for x in (states, model.lm_head.weight)))
    assert torch.equal(model(input_ids=ids).logits, wanted)
    assert head_dtype(vars(model.config)) == DTYPES[head]


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


SIZES = {
    "vocab_size": 54,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def policy():
    return build_policy(ModelConfig(num_layers=2, hidden_size=16, head_dim=8), seed=1)


def reward_model(folder, family="Qwen3", num_labels=1, **changes):
    """A tiny reward model as a library for reward modelling would save it."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes}, num_labels=num_labels)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    model.save_pretrained(folder)
    return model


def load(folder, vocab_size=54):
    critic, boxes = open_critic_model(str(folder), seed=3, head_std=0.01, vocab_size=vocab_size)
    weights = {name: tuple(p.shape) for name, p in critic.named_parameters() if p.is_meta}
    assert all(name.startswith("body.") for name in weights)
    read = {name: boxes.read(name, s, (0,) * len(s), s).float() for name, s in weights.items()}
    critic.load_state_dict(read, strict=False, assign=True)
    return critic


def test_a_critic_begins_with_the_backbone_of_the_policy_and_shares_nothing_with_it(policy):
    critic = critic_from_policy(policy.model, seed=3, head_std=0.01)
    ours, theirs = critic.body.state_dict(), policy.model.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    addresses = {p.data_ptr() for p in policy.model.parameters()}
    assert not addresses & {p.data_ptr() for p in critic.parameters()}
    assert not any(name.startswith("lm_head") for name, _ in critic.named_parameters())
    assert not critic.training


def test_a_new_head_has_the_asked_spread_and_no_bias():
    wide = build_policy(ModelConfig(num_layers=1, hidden_size=4096, head_dim=8), seed=1)
    head = critic_from_policy(wide.model, seed=3, head_std=0.01).head
    assert head.weight.shape == (1, 4096)
    assert head.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert head.bias.tolist() == [0.0]


def test_equal_seeds_give_equal_critics_and_leave_the_global_noise_alone(policy):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    for build in (critic_from_policy, random_critic):
        one, two, other = (build(policy.model, seed=s, head_std=0.1) for s in (4, 4, 5))
        pairs = zip(one.parameters(), two.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert not torch.equal(one.head.weight, other.head.weight)
    assert torch.equal(torch.rand(3), expected)


def test_a_random_critic_has_the_sizes_of_the_policy_and_weights_of_its_own(policy):
    critic = random_critic(policy.model, seed=4, head_std=0.1)
    for (name, mine), theirs in zip(
        critic.body.named_parameters(), policy.model.model.parameters(), strict=True
    ):
        assert mine.shape == theirs.shape
        assert "norm" in name or not torch.equal(mine, theirs), name


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_a_reward_model_gives_backbone_and_head(tmp_path, family):
    model = reward_model(tmp_path, family)
    critic = load(tmp_path)
    ids = torch.randint(4, 50, (1, 9))
    with torch.no_grad():
        wanted = model(ids[:, :-1]).logits
        select = torch.zeros_like(ids, dtype=torch.bool)
        select[0, -1] = True
        # A reward model scores the state after its last token: the state before the next one.
        seen = ValueScorer(critic)(ids, None, select)
    assert wanted.shape == (1, 1)
    assert seen.item() == pytest.approx(wanted.item(), abs=VALUES)
    assert critic.head.bias.tolist() == [0.0]


def test_a_causal_language_model_gives_its_backbone_under_a_new_head(tmp_path, policy):
    save_policy(f"file://{tmp_path}/p", policy, version=0, parents={}, attributes={})
    critic = load(tmp_path / "p")
    made = critic_from_policy(policy.model, seed=3, head_std=0.01)
    assert all(
        torch.equal(a, b) for a, b in zip(critic.parameters(), made.parameters(), strict=True)
    )


def test_a_reward_model_in_half_precision_is_widened(tmp_path):
    reward_model(tmp_path).bfloat16().save_pretrained(tmp_path)
    assert {p.dtype for p in load(tmp_path).parameters()} == {torch.float32}


def test_models_that_are_no_critic_are_refused(tmp_path):
    reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(ConfigError, match=r"one label and a linear head `score`.*\(2, 16\)"):
        load(tmp_path / "two")
    reward_model(tmp_path / "small", vocab_size=20)
    with pytest.raises(ConfigError, match="must know the 54 tokens of the policy, got 20"):
        load(tmp_path / "small")
    torch.manual_seed(0)
    labels = transformers.Qwen3ForTokenClassification(transformers.Qwen3Config(**SIZES))
    labels.save_pretrained(tmp_path / "labels")
    with pytest.raises(ConfigError, match="ends in ForSequenceClassification or ForCausalLM"):
        load(tmp_path / "labels")


def test_a_reward_model_without_its_head_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    reward_model(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(
        {k: v for k, v in load_file(path).items() if not k.startswith("score")},
        path,
        metadata={"format": "pt"},
    )
    with pytest.raises(ConfigError, match=r"complete, got none for \['score.weight'\]"):
        load(tmp_path)


def test_a_folder_that_is_not_there_is_named_by_the_key_of_the_critic(tmp_path):
    with pytest.raises(ConfigError, match=r"`critic\.path` must be an existing folder"):
        load(tmp_path / "nothing")


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_a_critic_is_built_again_from_its_description_alone(tmp_path, family):
    changes = {} if family == "Qwen3" else {"max_position_embeddings": 64, "rope_theta": 5000.0}
    reward_model(tmp_path, family, **changes)
    first = load(tmp_path)
    text = json.dumps(describe_critic(first))
    again = blank_critic(json.loads(text))
    shapes = {name: x.shape for name, x in first.state_dict().items()}
    assert {name: x.shape for name, x in again.state_dict().items()} == shapes
    again.load_state_dict(first.state_dict(), assign=True)
    ids = torch.arange(1, 41).view(2, 20)
    select = (torch.arange(20) > 0).expand(2, 20)
    with torch.inference_mode():
        values = [ValueScorer(critic)(ids, None, select) for critic in (first, again)]
    assert torch.equal(*values)
    assert not again.training
    assert {p.dtype for p in again.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"architecture": "Qwen3Model"},
        {"architecture": "os.Model", "config": {}},
        {"architecture": "NoSuchModel", "config": {}},
        {"architecture": "AutoModel", "config": {}},
        {"architecture": 3, "config": {}},
    ],
)
def test_a_description_that_names_no_backbone_is_refused(description):
    with pytest.raises(CheckpointError, match="must name the backbone of its critic"):
        blank_critic(description)
