"""Critics: built from a policy, from nothing, or from a reward model on disk."""

import json

import pytest
import torch
import transformers

from planish.base.errors import CheckpointError, ConfigError
from planish.models.config import ModelConfig
from planish.models.critic import (
    blank_critic,
    critic_from_policy,
    describe_critic,
    load_critic_model,
    random_critic,
)
from planish.models.logprobs import ValueScorer
from planish.models.policy import build_policy, save_policy

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
    return load_critic_model(str(folder), seed=3, head_std=0.01, vocab_size=vocab_size)


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
    assert seen.item() == pytest.approx(wanted.item(), abs=1e-6)
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
    with pytest.raises(ConfigError, match="'Qwen3ForSequenceClassification' or 'Qwen3ForCausalLM'"):
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
    again.load_state_dict(first.state_dict())
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
