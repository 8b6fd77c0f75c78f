"""What the engine `vllm` refuses, each by name and before a token is sampled."""

import re
import shutil
from dataclasses import fields, replace
from importlib.util import find_spec

import numpy as np
import pytest

from planish.base.errors import ConfigError, EngineBusy, EngineError, RecordError
from planish.engines.config import VLLM_OURS, EngineConfig
from planish.engines.disagg.engine import DisaggEngine
from planish.engines.requests import EngineState, ModelRef
from planish.engines.vllm.engine import VllmEngine
from planish.engines.weights import DictWeights
from planish.models.policy import DTYPES, save_policy
from planish.records.rollouts import FinishReason
from tests.contract.engines.conftest import FAMILIES
from tests.contract.engines.test_control import weights
from tests.unit.engines.disagg.instances import ThreadRank
from tests.unit.engines.pinned import PinnedWeights
from tests.unit.engines.tiny import family_policy, ids_of, qwen3_policy, request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM: `make test-engines`"),
]

SMALL = EngineConfig(name="vllm", cache_bytes=16 << 20)


def experts_policy(seed=0):
    return qwen3_policy(seed, **FAMILIES["experts"])


def refused(policy, *, config=SMALL, **options):
    """Return why an engine does not start."""
    with pytest.raises((EngineError, ConfigError)) as caught:
        VllmEngine(max_rows=2, config=config, **options).start(ModelRef(policy=policy))
    return str(caught.value)


def test_a_width_of_heads_that_the_kernels_lack_is_refused():
    text = refused(qwen3_policy(head_dim=16))
    assert "`head_dim` must be one of [32, 64" in text
    assert "got 16 for vLLM on the CPU; take the engine `transformers`" in text


@pytest.mark.parametrize("head", ["float32", "bfloat16", None])
def test_the_head_computes_in_the_type_that_the_policy_names_or_in_float32(head):
    policy = qwen3_policy(dtype="bfloat16")
    if head:
        policy.model.config.head_dtype = head
    engine = VllmEngine(max_rows=2, config=SMALL)
    with engine:
        engine.start(ModelRef(policy=policy))
        assert (
            engine.apply(lambda model: model.logits_processor.head_dtype)
            == DTYPES[head or "float32"]
        )


def test_a_device_that_this_build_is_not_for_is_refused():
    assert "which is 'cpu', got 'cuda'" in refused(qwen3_policy(), device="cuda")


def test_what_needs_accelerators_is_refused_on_the_cpu():
    config = EngineConfig(name="vllm", quantization="fp8")
    text = refused(qwen3_policy(), config=config)
    assert "`engine.quantization` must be 'none' on the CPU, got 'fp8'" in text
    config = EngineConfig(name="vllm", vllm={"speculative_config": {"method": "ngram"}})
    text = refused(qwen3_policy(), config=config)
    assert "`engine.vllm.speculative_config` must be left out on the CPU, where vLLM gives" in text
    config = EngineConfig(name="vllm", tensor_parallel=2)
    text = refused(experts_policy(), config=config)
    assert "must be 1 on the CPU for a model with experts, got 2; take an accelerator" in text


@pytest.mark.parametrize(("policy", "ranks"), [(experts_policy, 3), (qwen3_policy, 1)])
def test_experts_that_ranks_can_not_share_evenly_are_refused(policy, ranks):
    config = EngineConfig(name="vllm", tensor_parallel=ranks, expert_parallel=True)
    count = 4 if policy is experts_policy else 0
    text = refused(policy(), config=config)
    assert f"divisible by the ranks with `engine.expert_parallel`, got {count} and " in text
    assert f"`engine.tensor_parallel` = {ranks}; change the ranks" in text


@pytest.mark.parametrize("name", ["vllm", "vllm_disagg"])
def test_tensors_that_vllm_drops_are_refused_by_name(name):
    """Its Qwen3-MoE has no bias of the output projection, and takes the others without a word."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    policy = family_policy("Qwen3Moe", head_dim=32, attention_bias=True, **sizes)
    if name == "vllm":
        text = refused(policy)
    else:
        config = EngineConfig(name=name, cache_bytes=16 << 20)
        with pytest.raises(EngineError) as caught:
            DisaggEngine(max_rows=2, config=config, launcher=ThreadRank).start(
                ModelRef(policy=policy)
            )
        text = str(caught.value)
    assert "got a model of vLLM without model.layers.0.self_attn.o_proj.bias [32]" in text
    assert "model.layers.1.self_attn.o_proj.bias [32] (2 in all)" in text


def test_a_tensor_that_a_change_of_weights_drops_ends_the_engine():
    def forget(model):
        load = model.load_weights
        model.load_weights = lambda given: load(
            (name, tensor) for name, tensor in given if name != "model.norm.weight"
        )

    engine = VllmEngine(max_rows=2, config=SMALL)
    with engine:
        engine.start(ModelRef(policy=qwen3_policy()))
        engine.apply(forget)
        with pytest.raises(EngineError, match=r"without model.norm.weight \[\d+\] \(1 in all\)"):
            engine.update_weights(weights(qwen3_policy(1)), 1)
        assert engine.state is EngineState.FAILED


def test_a_cache_too_small_for_one_sequence_is_refused():
    config = EngineConfig(name="vllm", cache_bytes=1 << 12)
    text = refused(qwen3_policy(), config=config)
    assert (
        "the cache must hold one sequence of 1024 tokens, got `engine.cache_bytes` = 4096" in text
    )


def test_a_second_vllm_of_a_process_is_refused_by_name_and_the_first_goes_on():
    asked = [request(0, 8, temperature=0.0)]
    with VllmEngine(max_rows=2, config=SMALL) as engine:
        engine.start(ModelRef(policy=qwen3_policy()))
        before = ids_of(engine.generate(asked))
        second = VllmEngine(max_rows=2, config=SMALL)
        with pytest.raises(EngineBusy, match="got a second engine `vllm` beside one that is ready"):
            second.start(ModelRef(policy=qwen3_policy(1)))
        second.close()
        assert ids_of(engine.generate(asked)) == before
        engine.submit(asked)
        engine.poll(0.0)
        with pytest.raises(EngineBusy, match="beside one that is running; close that one"):
            VllmEngine(max_rows=2, config=SMALL).start(ModelRef(policy=qwen3_policy(1)))
        assert [o.token_ids for o in engine.poll(60.0)] == before
    # One that could not start leaves the place as well.
    assert "head_dim" in refused(qwen3_policy(head_dim=16))
    with VllmEngine(max_rows=2, config=SMALL) as engine:
        engine.start(ModelRef(policy=qwen3_policy()))
        assert ids_of(engine.generate(asked)) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"no_such_option": 1}, r"options of this vLLM's `EngineArgs`, got \['no_such_option'\]"),
        ({"kv_cache_dtype": "int3"}, "change `engine.vllm` = {'kv_cache_dtype': 'int3'}"),
        ({"block_size": "wide"}, "change `engine.vllm` = {'block_size': 'wide'}"),
        ({"attention_backend": "NONE_SUCH"}, "change `engine.vllm` = {'attention_backend': "),
    ],
)
def test_options_that_this_vllm_does_not_take_are_refused_by_name(options, text):
    told = refused(qwen3_policy(), config=SMALL.model_copy(update={"vllm": options}))
    assert re.search(text, told), told


def test_options_of_vllm_reach_it_and_ours_are_those_that_none_may_name(monkeypatch):
    import vllm
    from vllm.v1.engine.llm_engine import LLMEngine

    ours = {}

    class Recording(vllm.EngineArgs):
        def __init__(self, **options):
            ours.update(options)
            super().__init__(**options)

    monkeypatch.setattr(vllm, "EngineArgs", Recording)
    contexts, opened = [], LLMEngine.from_engine_args

    def opening(arguments, context):
        contexts.append(context.name)
        return opened(arguments, context)

    monkeypatch.setattr(LLMEngine, "from_engine_args", opening)
    config = SMALL.model_copy(update={"vllm": {"block_size": 64, "seed": 5}})
    with VllmEngine(max_rows=2, config=config) as engine:
        engine.start(ModelRef(policy=qwen3_policy()))
        found = engine._llm.vllm_config
        assert (found.cache_config.block_size, found.model_config.seed) == (64, 5)
    assert ours.keys() - config.vllm.keys() <= VLLM_OURS.keys()
    assert contexts == ["LLM_CLASS"]
    assert VLLM_OURS.keys() <= {option.name for option in fields(vllm.EngineArgs)}


def test_a_change_of_weights_writes_no_line_of_layers_without_weights(caplog):
    with VllmEngine(max_rows=2, config=SMALL) as engine, caplog.at_level("WARNING"):
        engine.start(ModelRef(policy=qwen3_policy()))
        engine.update_weights(weights(qwen3_policy(1)), 1)
    assert "Failed to load weights" not in caplog.text


def test_new_weights_that_are_damaged_change_nothing_and_a_failure_while_loading_is_final(
    tmp_path, monkeypatch
):
    from planish.engines.vllm.weights import PolicyTransfer

    policy = qwen3_policy(1)
    pin = save_policy(f"file://{tmp_path}/p", policy, version=1, parents={}, attributes={}).pin()
    (path,) = (tmp_path / "p").glob("*.safetensors")
    good = path.read_bytes()
    asked = [request(0, 8, temperature=0.0)]
    with VllmEngine(max_rows=2, config=SMALL) as engine:
        engine.start(ModelRef(policy=qwen3_policy()))
        before = ids_of(engine.generate(asked))
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(RecordError, match=f"`{path.name}` must have the sha256"):
            engine.update_weights(PinnedWeights(pin), 1)
        assert (engine.state, engine.version()) == ("ready", 0)
        assert ids_of(engine.generate(asked)) == before
        path.write_bytes(good)
        receive = PolicyTransfer.receive_weights

        def half(transfer, info):
            receive(transfer, info)
            raise OSError("the disk is gone")

        monkeypatch.setattr(PolicyTransfer, "receive_weights", half)
        with pytest.raises(EngineError, match="the disk is gone"):
            engine.update_weights(PinnedWeights(pin), 1)
        assert (engine.state, engine.version()) == ("failed", 0)
        with pytest.raises(EngineError, match="needs an engine that is ready"):
            engine.generate(asked)


def test_weights_from_a_folder_and_from_memory_act_alike(tmp_path):
    policy = experts_policy(1)
    pin = save_policy(f"file://{tmp_path}/p", policy, version=1, parents={}, attributes={}).pin()
    requests = [request(i, 12, temperature=0.0) for i in range(3)]
    with VllmEngine(max_rows=4, config=SMALL) as engine:
        engine.start(ModelRef(policy=experts_policy()))
        from_folder = engine.update_weights(PinnedWeights(pin), 1)
        first = ids_of(engine.generate(requests))
        from_memory = engine.update_weights(weights(policy), 2)
        assert ids_of(engine.generate(requests)) == first
        assert from_folder.num_tensors == from_memory.num_tensors > 30
        extra = {"one_more": policy.model.model.norm.weight.detach()}
        named = {n: PinnedWeights(pin).read(n) for n in PinnedWeights(pin).names()}
        with pytest.raises(EngineError, match="one_more is not of this model"):
            engine.update_weights(DictWeights({**named, **extra}), 3)
        assert ids_of(engine.generate(requests)) == first
    shutil.rmtree(tmp_path / "p")


def test_experts_are_not_returned_on_the_cpu_and_never_of_a_dense_model():
    text = refused(experts_policy(), routing=True)
    assert "`rollout.keep_routing` must be false with the engine `vllm` on the CPU" in text
    assert "must be false for a model without experts" in refused(qwen3_policy(), routing=True)
    guessing = SMALL.model_copy(update={"vllm": {"speculative_config": {"method": "ngram"}}})
    told = refused(experts_policy(), routing=True, config=guessing)
    assert "must be false with `engine.vllm.speculative_config`" in told


def choice(position):
    """What the stand-in for a capture says of a position: [decoder layers, experts per token]."""
    return np.array([[position % 4, (position + 1) % 4], [(position + 2) % 4, position % 3]])


def test_experts_that_vllm_reports_come_with_every_way_to_end(monkeypatch):
    # This build captures nothing, so the rows that a worker would send are put into its outputs.
    policy = experts_policy()
    requests = [request(i, 9) for i in range(3)]
    sent = {}
    with VllmEngine(max_rows=4, config=SMALL) as engine:
        engine.start(ModelRef(policy=policy))
        free = engine.generate(requests)
        get_output = engine._llm.engine_core.get_output

        def with_routing():
            outputs = get_output()
            for part in outputs.outputs:
                name = next(n for n in sent if part.request_id.startswith(n))
                end = sent[name][1] + len(part.new_token_ids)
                rows = [choice(position) for position in range(sent[name][0], end)]
                part.routed_experts = np.array(rows, np.uint8)
                sent[name] = (end, end)
            return outputs

        monkeypatch.setattr(engine._llm.engine_core, "get_output", with_routing)
        engine._routing = engine.routing = True
        engine._routing_dtype = "int8"
        engine._eos = frozenset({free[1].token_ids[4]})
        asked = [
            requests[0],
            replace(requests[1], sampling=replace(requests[1].sampling, ignore_eos=False)),
            replace(requests[2], response_prefix=tuple(free[2].token_ids[:2])),
        ]
        asked = [replace(r, sampling=replace(r.sampling, want_routing=True)) for r in asked]
        # A step that samples its first token has computed all before it.
        sent.update(
            (r.request_id, (0, len(r.prompt_ids) + len(r.response_prefix) - 1)) for r in asked
        )
        engine.submit(asked)
        outputs = {}
        for _ in range(6):
            outputs.update((o.request_id, o) for o in engine.poll(0.0))
        outputs.update((o.request_id, o) for o in engine.abort(["r2"]))
        while len(outputs) < 3:
            outputs.update((o.request_id, o) for o in engine.poll(1.0))
    reasons = [outputs[r.request_id].finish_reason for r in asked]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT]
    for one in asked:
        output = outputs[one.request_id]
        num_inputs = len(one.prompt_ids) + len(one.response_prefix) + output.num_tokens - 1
        assert output.num_tokens > 0
        assert output.routing.dtype == np.int8
        assert (output.routing == [choice(position) for position in range(num_inputs)]).all()


@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.full), "experts"])
def test_without_packing_anew_this_build_would_go_on_with_old_weights(kind, monkeypatch):
    # Where this fails, vLLM packs by itself, and `PolicyTransfer.finish_weight_update` may stop.
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    from planish.engines.vllm.weights import PolicyTransfer

    def half_finished(transfer):
        finalize_layerwise_reload(transfer.model, transfer.model_config)
        if kind == "experts":  # then they alone are left as they were
            transfer.model.lm_head.quant_method.process_weights_after_loading(
                transfer.model.lm_head
            )

    sizes, requests = FAMILIES[kind], [request(i, 12, temperature=0.0) for i in range(4)]
    found = {}
    for name in ("packed", "not packed"):
        with VllmEngine(max_rows=4, config=SMALL) as engine:
            engine.start(ModelRef(policy=qwen3_policy(**sizes)))
            if name == "not packed":
                monkeypatch.setattr(PolicyTransfer, "finish_weight_update", half_finished)
            engine.update_weights(weights(qwen3_policy(1, **sizes)), 1)
            found[name] = ids_of(engine.generate(requests))
    assert found["packed"] != found["not packed"]
