"""vLLM without experts: what it reads, what it refuses, and replicas that share expert ranks."""

import math
from importlib.util import find_spec

import pytest
import torch

from planish.base.errors import EngineError
from planish.engines.config import EngineConfig
from planish.engines.disagg.engine import DisaggEngine
from planish.engines.requests import ModelRef
from planish.models.experts import is_expert
from tests.contract.engines.conftest import FAMILIES
from tests.contract.engines.test_control import weights
from tests.unit.engines.disagg.instances import FAMILIES as SPARSE
from tests.unit.engines.disagg.instances import ThreadRank
from tests.unit.engines.tiny import (
    exact_logits,
    family_policy,
    qwen3_policy,
    reference_greedy,
    request,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM: `make test-engines`"),
]


def experts_policy(seed=0):
    return qwen3_policy(seed, **FAMILIES["experts"])


def start(policy, *, launcher=None, **settings):
    """A started engine."""
    options = {"launcher": launcher} if launcher else {}
    config = EngineConfig(name="vllm_disagg", cache_bytes=16 << 20, **settings)
    engine = DisaggEngine(max_rows=4, config=config, timeout_s=240, **options)
    engine.start(ModelRef(policy=policy))
    return engine


def test_a_dense_model_is_refused():
    with pytest.raises(
        EngineError, match="the engine 'vllm_disagg', got a model with experts is needed"
    ):
        start(qwen3_policy(), launcher=ThreadRank)


def test_no_request_is_answered_with_the_zeros_of_the_start(monkeypatch, caplog):
    """Experts that are never connected fail the first request, in the name of the engine."""
    from planish.engines.vllm import remote_experts

    answers, apply = [], remote_experts.RemoteMethod.apply

    def recording(self, *args, **options):
        answers.append(apply(self, *args, **options))
        return answers[-1]

    monkeypatch.setattr(remote_experts.RemoteMethod, "apply", recording)
    monkeypatch.setattr(remote_experts, "connect", lambda model, compute: 0)
    with start(experts_policy(), launcher=ThreadRank, expert_ranks=2) as engine:
        assert answers, "vLLM has computed nothing at its start"
        assert not any(rows.any() for rows in answers)
        num_answers = len(answers)
        engine.submit([request(0, 4)])
        (output,) = engine.poll(60.0)
        assert output.token_ids == []
        assert "experts must be connected before vLLM computes rows of a request" in output.error
        assert (engine.state, len(answers)) == ("failed", num_answers)
    assert "failed engine=vllm_disagg reason=rank 0" in caplog.text


def test_options_of_vllm_reach_the_attention_ranks_which_leave_room_for_others():
    from planish.engines.vllm.engine import _living

    with start(experts_policy(), launcher=ThreadRank, vllm={"block_size": 64}) as engine:
        (attention,) = _living
        assert attention._llm.vllm_config.cache_config.block_size == 64
        assert engine.generate([request(0, 4)])[0].num_tokens == 4
    assert not _living


SPARSE_ALIKE = ("Qwen3Moe", "Mixtral")
"""Families whose layers the others have too."""
SERVED = {
    "Qwen3Moe": {"head_dim": 32},
    "Qwen2Moe": {"hidden_size": 128},
    "Mixtral": {"hidden_size": 128},
    "DeepseekV3": {
        # Widths of the only kernel for latent attention on the CPU.
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        # As published; the class of transformers has no other.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}
"""What the kernels of vLLM ask beside the sizes of the tiny models."""


@pytest.mark.parametrize(
    "family",
    ["Qwen2Moe", "DeepseekV3", *(pytest.param(f, marks=pytest.mark.full) for f in SPARSE_ALIKE)],
)
def test_every_family_gives_the_log_probabilities_of_a_float64_forward(family):
    sizes = {"num_experts_per_tok": 2, **SPARSE[family], **SERVED[family]}
    policy = family_policy(family, **sizes)
    requests = [request(row, 16, temperature=0.5 * row) for row in range(4)]
    with start(policy, launcher=ThreadRank, expert_ranks=2) as engine:
        outputs = engine.generate(requests)
    for one, output in zip(requests, outputs, strict=True):
        tokens = [*one.prompt_ids, *output.token_ids]
        logits = torch.from_numpy(exact_logits(policy, tokens[:-1]))[len(one.prompt_ids) - 1 :]
        heat = one.sampling.temperature
        exact = (logits / (heat or 1.0)).log_softmax(-1)
        new = torch.tensor(output.token_ids)
        found = torch.tensor(output.logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, exact.gather(-1, new[:, None])[:, 0], rtol=0, atol=1e-5)
        if not heat:
            assert new.tolist() == logits.argmax(-1).tolist()


@pytest.mark.full
def test_two_replicas_share_the_experts_and_give_the_tokens_of_the_plain_model():
    """Real processes: two of vLLM, two of experts; each reads its own tensors and no others."""
    policy = experts_policy()
    named = weights(policy).names()
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in named.items()}
    of_experts = sum(size for name, size in sizes.items() if is_expert(name))
    others = sum(sizes.values()) - of_experts
    requests = [request(row, 24, temperature=0.0) for row in range(4)]
    with start(policy, attention_ranks=2, expert_ranks=2) as engine:
        outputs = engine.generate(requests)
        stats = engine.stats()
    read = [rank["num_bytes"] for rank in stats["ranks"]]
    assert read == [others, others, of_experts / 2, of_experts / 2]
    for one, output in zip(requests, outputs, strict=True):
        assert output.token_ids == reference_greedy(policy, one.prompt_ids, 24)
    # Every prompt token and every new one but the last went through two experts of each layer.
    tokens = sum(len(one.prompt_ids) + 23 for one in requests)
    counts = [sum(layer) for layer in stats["expert_tokens"]]
    assert counts == [2 * tokens] * len(counts)
