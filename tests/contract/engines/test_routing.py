"""The experts of each token, as an engine returns them, against the routers of a plain forward."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from planish.base.errors import ConfigError, EngineError
from planish.engines.config import EngineConfig
from planish.engines.disagg.engine import DisaggEngine
from planish.engines.requests import ModelRef
from planish.engines.transformers.engine import TransformersEngine
from tests.contract.engines.test_control import weights
from tests.unit.engines.disagg.instances import ThreadRank
from tests.unit.engines.tiny import family_policy, prompt, qwen3_policy, request

pytestmark = pytest.mark.slow

FAMILIES = {
    "Qwen3Moe": {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
    },
}
NUM_LAYERS = {"Qwen3Moe": 2, "Mixtral": 2, "DeepseekV3": 2}
"""Layers with experts: the first one of DeepSeek-V3 has none."""


WHERE = {"transformers": (*FAMILIES,), "disagg": (*FAMILIES,), "vllm_disagg": ("Qwen3Moe",)}
"""Engines that tell the experts on the CPU, and the families that they are asked for."""
HERE = [name for name in WHERE if find_spec("vllm") or not name.startswith("vllm")]
VLLM_SIZES = {"head_dim": 32, "moe_intermediate_size": 32}
"""What vLLM needs on the CPU."""


def policy_of(engine, family="Qwen3Moe", seed=0):
    sizes = VLLM_SIZES if engine == "vllm_disagg" else {}
    return family_policy(family, seed, **{**FAMILIES[family], **sizes})


@pytest.fixture(params=HERE)
def engine_name(request):
    return request.param


@pytest.fixture(
    scope="module", params=[(name, family) for name in HERE for family in WHERE[name]], ids="-".join
)
def case(request):
    name, family = request.param
    return name, family, policy_of(name, family)


@pytest.fixture
def start():
    """Return started engines, closed at the end; those with ranks have them as threads."""
    made = []

    def make(name, policy, **options):
        options = {"max_rows": 4, "routing": True, **options}
        cls = TransformersEngine
        if name != "transformers":
            cls, options["launcher"] = DisaggEngine, ThreadRank
            options["timeout_s"] = 240.0
            own = (
                {"attention_ranks": 2, "micro_batches": 2}
                if name == "disagg"
                else {"cache_bytes": 16 << 20}
            )
            options["config"] = EngineConfig(name=name, expert_ranks=2, **own)
        made.append(cls(**options))
        made[-1].start(ModelRef(policy=policy))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def wanting(one):
    return replace(one, sampling=replace(one.sampling, want_routing=True))


def plain_routing(policy, ids):
    """Return the choices [tokens, layers, k] of a plain forward, and the scores of all experts."""
    logits, chosen = [], []

    def hear(_, __, given):
        logits.append(given[0])
        chosen.append(given[2])

    gates = [m for name, m in policy.model.named_modules() if name.endswith("mlp.gate")]
    handles = [gate.register_forward_hook(hear) for gate in gates]
    with torch.inference_mode():
        policy.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(chosen, 1).numpy(), torch.stack(logits, 1).sigmoid().numpy()


def assert_equal_but_for_ties(found, policy, ids):
    """Each choice is that of the plain forward; where two experts score alike either will do."""
    expected, scores = plain_routing(policy, ids)
    assert found.shape == expected.shape
    for place in np.ndindex(*expected.shape[:2]):
        ours, theirs = set(found[place].tolist()), set(expected[place].tolist())
        odd = [scores[place][expert] for expert in ours ^ theirs]
        assert not odd or max(odd) - min(odd) < 1e-4, (place, ours, theirs)


def test_every_input_has_the_experts_that_the_routers_of_a_plain_forward_choose(case, start):
    engine_name, name, policy = case
    requests = [wanting(request(i, 5 + 3 * i)) for i in range(7)]
    engine = start(engine_name, policy)
    for one, output in zip(requests, engine.generate(requests), strict=True):
        inputs = (*one.prompt_ids, *output.token_ids)[:-1]
        layers, k = NUM_LAYERS[name], FAMILIES[name]["num_experts_per_tok"]
        assert output.routing.shape == (len(inputs), layers, k)
        assert output.routing.dtype == np.int8
        assert_equal_but_for_ties(output.routing, policy, inputs)
    engine.close()
    assert not any(m._forward_pre_hooks for m in policy.model.modules())


def test_windows_report_all_their_inputs_and_a_taken_back_response_those_so_far(case, start):
    name, _, policy = case
    engine = start(name, policy)
    whole = engine.generate([wanting(request(i, 20)) for i in range(4)])
    for length in (1, 8):
        split = [
            wanting(request(i, 9, prefix=tuple(output.token_ids[:length])))
            for i, output in enumerate(whole)
        ]
        for one, output in zip(split, engine.generate(split), strict=True):
            inputs = (*one.prompt_ids, *one.response_prefix, *output.token_ids)[:-1]
            assert_equal_but_for_ties(output.routing, policy, inputs)
    requests = [wanting(request(i, 50)) for i in range(5)]
    engine.submit(requests)
    for _ in range(6):
        engine.poll(0.0)
    taken = {output.request_id: output for output in engine.abort(None)}
    assert taken["r4"].routing is None  # no row was free
    for one in requests[:4]:
        output = taken[one.request_id]
        inputs = (*one.prompt_ids, *output.token_ids)[:-1]
        assert output.num_tokens == 6
        assert_equal_but_for_ties(output.routing, policy, inputs)


def test_routing_changes_no_token_and_comes_only_where_it_is_wanted(engine_name, start):
    policy = policy_of(engine_name)
    requests = [request(i, 12) for i in range(6)]
    silent = start(engine_name, policy, routing=False)
    plain = silent.generate(requests)
    silent.close()
    mixed = [wanting(one) if i % 2 else one for i, one in enumerate(requests)]
    outputs = start(engine_name, policy).generate(mixed)
    assert [o.logprobs for o in outputs] == [o.logprobs for o in plain]
    assert [o.routing is not None for o in outputs] == [False, True] * 3


def test_new_weights_route_anew(engine_name, start):
    engine = start(engine_name, policy_of(engine_name))
    engine.update_weights(weights(policy_of(engine_name, seed=1)), 1)
    one = wanting(request(0, 10))
    output = engine.generate([one])[0]
    inputs = (*one.prompt_ids, *output.token_ids)[:-1]
    assert_equal_but_for_ties(output.routing, policy_of(engine_name, seed=1), inputs)


def test_a_dense_model_is_refused(engine_name, start):
    with pytest.raises((ConfigError, EngineError), match=r"a model (without|with) experts"):
        start(engine_name, qwen3_policy())


def test_a_beginning_that_vllm_has_in_its_cache_has_its_experts(start):
    """A prompt of two whole blocks is computed once; both requests tell all of their inputs."""
    pytest.importorskip("vllm")
    policy = policy_of("vllm_disagg")
    engine = start("vllm_disagg", policy)
    one = replace(wanting(request(0, 6)), prompt_ids=prompt(3, 150))
    outputs, computed = [], []
    for seed, name in enumerate("ab"):
        again = replace(one, request_id=name, sampling=replace(one.sampling, seed=seed))
        outputs += engine.generate([again])
        (rank,) = (rank for rank in engine.stats()["ranks"] if rank["role"] == "attention")
        computed.append(rank["counts"]["prefill_tokens"])
    assert computed[1] - computed[0] <= computed[0] - 100
    for output in outputs:
        inputs = (*one.prompt_ids, *output.token_ids)[:-1]
        assert_equal_but_for_ties(output.routing, policy, inputs)
