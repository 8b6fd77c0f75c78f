"""Windows, caps, scales and ropes of each family: trainer and engine against eager in float64."""

import copy

import numpy as np
import pytest
import torch

from planish.base.parallel import Grid
from planish.models.critic import blank_critic, critic_from_policy, describe_critic, random_critic
from planish.models.library import unread_settings
from planish.models.logprobs import ValueScorer
from planish.models.packing import pack_rows
from planish.stages.train.config import TrainConfig
from planish.stages.train.fsdp2 import Fsdp2Sharding
from tests.unit.engines.tiny import family_policy, request, start

CPU = torch.device("cpu")
TOLERANCE = 5e-4
"""Ten times what float32 gave and more; another attention is tenths away."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
THETA = {"rope_theta": 100.0}
KINDS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HEAD = {"head_dim": 8}
GRANITE = {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}
GEMMA2 = {**HEAD, "sliding_window": 4, "layer_types": KINDS, "query_pre_attn_scalar": 20}
MODELS = {
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3 | THETA}),
    "llama-linear-biases": (
        "Llama", {"rope_parameters": LINEAR | THETA, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN | THETA}),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": KINDS[::-1]},
    ),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN | THETA}),
    "qwen3": ("Qwen3", {}),
    "qwen3-windows": (
        "Qwen3", {"use_sliding_window": True, "sliding_window": 4, "layer_types": KINDS},
    ),
    "qwen3-experts": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": False}),
    "mistral-window": ("Mistral", {"sliding_window": 4}),
    "mistral-yarn": ("Mistral", {"sliding_window": None, "rope_parameters": YARN | THETA}),
    "mixtral-window": (
        "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "gemma2-cap": ("Gemma2", GEMMA2 | {"attn_logit_softcapping": 0.7}),
    "gemma2-small-cap": ("Gemma2", GEMMA2 | {"attn_logit_softcapping": 0.05}),
    "gemma2-caps": (
        "Gemma2", GEMMA2 | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    ),
    "gemma2-none": (
        "Gemma2", GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "vaultgemma-cap": ("VaultGemma", GEMMA2 | {"attn_logit_softcapping": 0.7}),
    "gemma3-window": ("Gemma3Text", {"sliding_window": 4, "query_pre_attn_scalar": 20}),
    "granite-multipliers": ("Granite", {**GRANITE, "logits_scaling": 2.0}),
    "cohere-scale": ("Cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    "phi-partial": ("Phi", {"rope_parameters": {"rope_type": "default", **THETA,
                                                "partial_rotary_factor": 0.5}}),
    "phi3-window": ("Phi3", {"sliding_window": 4}),
    "gpt2-scale": ("GPT2", {}),
}  # fmt: skip


def policy_of(name):
    """A policy whose attention is far from even, and its logits in eager float64 of given rows."""
    family, changes = MODELS[name]
    policy = family_policy(family, **changes)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    exact = copy.deepcopy(policy.model).double()
    exact.set_attn_implementation("eager")
    if "experts" in name or "mixtral" in name:
        exact.set_experts_implementation("eager")
    return policy, exact


def logprobs_of(exact, ids):
    with torch.no_grad():
        logits = exact(input_ids=ids, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("name", MODELS)
def test_the_trainer_attends_as_eager_attention_in_float64(name):
    policy, exact = policy_of(name)
    ids = torch.randint(4, 50, (3, 24), generator=torch.Generator().manual_seed(2))
    select = torch.arange(24).expand(3, 24) > 0
    wanted = logprobs_of(exact, ids)[select[:, 1:]]
    sharding = Fsdp2Sharding(
        policy.model, config=TrainConfig(device="cpu"), grid=Grid(), device=CPU, is_frozen=True
    )
    packing = pack_rows(np.full(3, 24), 24) if sharding.packs else None
    with torch.no_grad():
        seen = sharding.scorer(ids, packing, select, 1.0)[0]
    far = (seen - wanted).abs().max()
    print(f"{name} trainer {far:.1e}")
    assert far < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_attends_as_eager_attention_in_float64(name):
    policy, exact = policy_of(name)
    asked = [request(i, 14 + 2 * i) for i in range(3)]
    for one, output in zip(asked, start(policy, max_rows=2).generate(asked), strict=True):
        ids = torch.tensor([[*one.prompt_ids, *output.token_ids]])
        wanted = logprobs_of(exact, ids)[0, len(one.prompt_ids) - 1 :]
        far = np.abs(np.array(output.logprobs) - wanted.numpy()).max()
        print(f"{name} engine {far:.1e}")
        assert far < TOLERANCE


@pytest.mark.parametrize("name", ["gemma2-cap", "vaultgemma-cap"])
@pytest.mark.parametrize("made", [critic_from_policy, random_critic, "from a state"])
def test_a_critic_has_the_cap_of_its_policy(name, made):
    policy, _ = policy_of(name)
    if made == "from a state":
        first = critic_from_policy(policy.model, seed=1, head_std=0.5)
        critic = blank_critic(describe_critic(first)).to_empty(device="cpu")
        critic.body.rotary_emb = first.body.rotary_emb
        critic.load_state_dict(first.state_dict())
    else:
        critic = made(policy.model, seed=1, head_std=0.5)
    exact = copy.deepcopy(critic).double()
    exact.body.set_attn_implementation("eager")
    ids = torch.randint(4, 50, (2, 20), generator=torch.Generator().manual_seed(2))
    select = torch.arange(20).expand(2, 20) > 0
    with torch.no_grad():
        hidden = exact.body(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = exact.head(hidden).flatten()
        far = (ValueScorer(critic)(ids, None, select) - wanted).abs().max()
    print(f"{name} critic {far:.1e}")
    assert far < TOLERANCE


@pytest.mark.parametrize(
    ("family", "settings", "unread"),
    [
        ("qwen2", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ("gemma3_text", {"attn_logit_softcapping": None, "sliding_window": 512}, []),
        ("gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, []),
        ("llama", {"sliding_window": 4096}, ["sliding_window"]),
        ("llama", {"sliding_window": 4096, "use_sliding_window": False}, []),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ("llama", {"partial_rotary_factor": 1.0, "rope_scaling": None, "rope_theta": 1e4}, []),
        ("glm4", {"partial_rotary_factor": 0.5}, []),
        ("phi3", {"partial_rotary_factor": 0.5}, []),
        ("qwen3", {"residual_multiplier": 0.2, "logits_scaling": 8.0},
         ["residual_multiplier", "logits_scaling"]),
        ("granite", {"residual_multiplier": 0.2, "logits_scaling": 8.0}, []),
        ("llama", {"clip_qkv": 8, "alibi": True}, ["clip_qkv", "alibi"]),
        ("llama", {"attention_bias": True, "mlp_bias": True, "pretraining_tp": 1}, []),
        ("qwen2", {"sliding_window": 32768, "max_window_layers": 28, "use_sliding_window": False},
         []),
        ("nobody", {"attn_logit_softcapping": 50.0}, []),
        # Known to the class of settings, and read by no line of its family.
        ("deepseek_v2", {"norm_topk_prob": True}, ["norm_topk_prob"]),
        ("deepseek_v2", {"norm_topk_prob": False}, []),
        ("deepseek_v32", {"mlp_bias": True}, ["mlp_bias"]),
        ("nemotron_h", {"attention_bias": True}, ["attention_bias"]),
        ("gpt_oss", {"hidden_act": "gelu"}, ["hidden_act"]),
        ("gpt_oss", {"hidden_act": "silu"}, []),
        # Read by its family alone.
        ("qwen3_moe", {"norm_topk_prob": False}, []),
        ("mixtral", {"norm_topk_prob": True, "sliding_window": 64}, ["norm_topk_prob"]),
        ("gemma3_text", {"sliding_window_pattern": 6}, []),
        ("gemma2", {"sliding_window_pattern": 6}, ["sliding_window_pattern"]),
        ("qwen3", {"attention_bias": True, "rms_norm_eps": 1e-5}, []),
        ("mistral", {"attention_bias": True}, ["attention_bias"]),
    ],
)  # fmt: skip
def test_a_setting_that_transformers_leaves_out_is_found(family, settings, unread):
    assert unread_settings({"model_type": family, **settings}) == unread
    inner = {"model_type": "outer", "text_config": {"model_type": family, **settings}}
    assert unread_settings(inner) == unread
