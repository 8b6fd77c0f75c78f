import threading
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from planish.base.config import parse_section
from planish.base.errors import ConfigError, EngineError, RecordError
from planish.engines import open_engine
from planish.engines.base import TurnLock
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef
from planish.engines.transformers.served_model import open_model
from planish.engines.vllm.cpu import check_cpu_sizes
from planish.engines.vllm.engine import VllmEngine
from planish.engines.weights import DictWeights, FolderWeights
from planish.models.logprobs import TokenScorer
from planish.models.policy import save_policy
from planish.records.refs import parse_pin
from tests.integration.waiting import wait_for
from tests.processes import python
from tests.unit.engines.pinned import PinnedWeights
from tests.unit.engines.tiny import (
    family_policy,
    prompt,
    qwen3_policy,
    reference_greedy,
    request,
    start,
)


@pytest.fixture(scope="module")
def policy():
    return qwen3_policy()


@pytest.fixture
def saved(tmp_path, policy):
    return save_policy(
        f"file://{tmp_path}/policies/00003", policy, version=3, parents={}, attributes={}
    ).pin()


def test_engine_and_trainer_log_probabilities_agree(policy):
    engine = start(policy)
    requests = [request(i, 30) for i in range(12)]
    scorer = TokenScorer(policy.model)
    for one, output in zip(requests, engine.generate(requests), strict=True):
        tokens = torch.tensor([[*one.prompt_ids, *output.token_ids]])
        select = (torch.arange(tokens.shape[1]) >= len(one.prompt_ids))[None]
        with torch.inference_mode():
            logprobs, _ = scorer(tokens, None, select, temperature=1.0)
        assert np.abs(logprobs.numpy() - output.logprobs).max() < 2e-4


def test_rows_are_replaced_at_once(policy):
    engine = start(policy, max_rows=4)
    lengths = [3, 9, 1, 4, 8, 2, 6, 5]
    engine.generate([request(i, n) for i, n in enumerate(lengths)])
    stats = engine.stats()
    # four rows over 38 tokens: the greedy schedule ends after 10 steps
    rows = [0] * 4
    for length in lengths:
        rows[rows.index(min(rows))] += length
    assert stats["row_steps"] == sum(lengths)
    assert stats["steps"] == max(rows) == 10
    assert stats["most_rows"] == 4


def test_equal_prompts_of_one_batch_are_prefilled_once(policy):
    engine = start(policy, max_rows=8)
    base = request(3, 5)
    samples = [type(base)(f"s{i}", base.prompt_ids, base.sampling) for i in range(8)]
    outputs = engine.generate(samples)
    assert engine.stats()["prefill_tokens"] == len(base.prompt_ids) - 1
    # equal seeds too: all eight responses are the same
    assert len({tuple(o.token_ids) for o in outputs}) == 1


@pytest.mark.slow
def test_rows_grow_beyond_the_first_allocation():
    policy = qwen3_policy(max_model_tokens=4096)
    engine = start(policy, max_rows=2)
    requests = [request(i, 1100 + i, temperature=0.0) for i in range(2)]
    outputs = engine.generate(requests)
    assert [o.num_tokens for o in outputs] == [1100, 1101]
    narrow = start(policy, max_rows=1).generate([request(1, 200, temperature=0.0)])[0]
    assert outputs[1].token_ids[:200] == narrow.token_ids
    tail = tuple(outputs[0].token_ids[:1090])
    again = engine.generate([request(0, 10, temperature=0.0, prefix=tail)])[0]
    assert again.token_ids == outputs[0].token_ids[1090:]


@pytest.mark.long
def test_a_known_family_is_served_without_the_modules_of_transformers(saved):
    code = (
        "import sys\nfrom planish.engines import open_engine\n"
        "from planish.engines.config import EngineConfig\n"
        "from planish.engines.requests import ModelRef\n"
        f"engine = open_engine(EngineConfig(), ModelRef(pin={saved!r}))\n"
        "print(type(engine._batch.decoder).__name__)\n"
        "print(any('modeling_qwen3' in name for name in sys.modules))"
    )
    found = python("-c", code)
    assert found.stdout.split() == ["FusedDecoder", "False"]


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Phi"])
def test_an_exported_family_gives_the_tokens_of_its_modules(tmp_path, family):
    changes = {"sliding_window": None} if family == "Mistral" else {}
    policy = family_policy(family, tie_word_embeddings=False, **changes)
    pin = save_policy(f"file://{tmp_path}/p", policy, version=1, parents={}, attributes={}).pin()
    requests = [request(i, 12, temperature=0.0) for i in range(4)]
    with open_engine(EngineConfig(), ModelRef(pin=pin)) as engine:
        assert type(engine._batch.decoder).__name__ == (
            "ModuleDecoder" if family == "Phi" else "FusedDecoder"
        )
        for one, output in zip(requests, engine.generate(requests), strict=True):
            assert output.token_ids == reference_greedy(policy, one.prompt_ids, 12)


def test_weights_of_an_export_are_read_by_name_and_box(saved, policy):
    weights = PinnedWeights(saved)
    name = "model.layers.0.mlp.down_proj.weight"
    assert weights.names()[name] == ((64, 192), torch.float32)
    expected = policy.model.model.layers[0].mlp.down_proj.weight.detach()
    assert torch.equal(weights.read(name), expected)
    box = (slice(3, 9), slice(0, 100))
    assert torch.equal(weights.read(name, box), expected[box])
    memory = DictWeights({n: weights.read(n) for n in weights.names()})
    assert torch.equal(memory.read(name, box), expected[box])


def test_an_engine_takes_new_weights_from_an_export(saved, policy):
    engine = start(qwen3_policy(7))
    report = engine.update_weights(PinnedWeights(saved), 4)
    sizes = {id(p): p.nbytes for p in policy.model.parameters()}
    assert (report.num_tensors, report.num_bytes) == (len(sizes), sum(sizes.values()))
    output = engine.generate([request(0, 8, temperature=0.0)])[0]
    assert output.token_ids == reference_greedy(policy, prompt(0), 8)


def test_new_weights_that_are_damaged_change_nothing(saved, tmp_path):
    engine = start(qwen3_policy(7))
    before = engine.generate([request(0, 8)])[0].logprobs
    (path,) = (tmp_path / "policies/00003").glob("*.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RecordError, match="must have the sha256"):
        engine.update_weights(PinnedWeights(saved), 4)
    assert (engine.state, engine.version()) == ("ready", 0)
    assert engine.generate([request(0, 8)])[0].logprobs == before


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"must hold \*.safetensors files, got none"):
        FolderWeights(tmp_path)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (
            {"name": "magic"},
            r"one of \['disagg', 'transformers', 'vllm', 'vllm_disagg'\], got 'magic'",
        ),
        ({"name": "disagg", "micro_batches": 5}, "less than or equal to 4"),
        ({"name": "disagg", "transport": "gloo"}, "'sockets' or 'nixl'"),
        ({"name": "vllm", "tensor_paralel": 2}, "did you mean `tensor_parallel`"),
        ({"name": "vllm", "memory_share": 1.5}, "less than or equal to 1"),
        ({"name": "vllm", "quantization": "int3"}, "'none' or 'fp8'"),
        ({"name": "vllm", "vllm": {"max_num_seqs": 7}}, "got 7; set `rollout.max_rows`"),
        ({"name": "vllm", "vllm": {"quantization": "fp8"}}, "set `engine.quantization`"),
        ({"name": "vllm_disagg", "vllm": {"trust_remote_code": True}}, "or run other code than"),
        ({"name": "vllm", "vllm": {"speculative_config": {"model": "x"}}}, "the method 'ngram'"),
        ({"name": "vllm", "vllm": {"speculative_config": "ngram"}}, "the method 'ngram', got"),
        (
            {"name": "vllm_disagg", "vllm": {"speculative_config": {"method": "ngram"}}},
            "must be left out with the engine 'vllm_disagg'",
        ),
        ({"name": "vllm", "vllm": ["kv_cache_dtype"]}, "valid dictionary"),
    ],
)
def test_a_wrong_setting_of_engines_is_refused(raw, text):
    with pytest.raises(ConfigError, match=text):
        parse_section(EngineConfig, raw, section="engine")


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"name": "disagg"}, 120),
        ({"name": "disagg", "rank_timeout_seconds": 7}, 14),
        ({"name": "vllm_disagg"}, 900),
        ({"name": "vllm_disagg", "rank_timeout_seconds": 5}, 900),
        ({"name": "vllm_disagg", "rank_timeout_seconds": 700}, 1400),
    ],
)
def test_ranks_have_a_time_for_their_start_and_vllm_minutes(settings, seconds):
    assert parse_section(EngineConfig, settings, section="engine").start_seconds == seconds


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_an_engine_whose_package_is_missing_says_where_it_is():
    engine = VllmEngine()
    with pytest.raises(ConfigError, match="needs the package vllm, got No module named 'vllm'"):
        engine.start(ModelRef(policy=qwen3_policy()))


def test_a_failing_step_fails_the_engine_with_its_cause():
    engine = start(qwen3_policy())

    def broken(*_):
        raise RuntimeError("no memory")

    engine._batch.decoder.decode = broken
    with pytest.raises(EngineError, match="RuntimeError: no memory; close it and open another"):
        engine.generate([request(0, 3)])
    assert engine.state == "failed"
    with pytest.raises(EngineError, match="got failed"):
        engine.submit([request(1, 3)])
    engine.close()
    assert engine.state == "closed"


def test_the_lock_serves_threads_in_the_order_they_came():
    lock, order = TurnLock(), []

    def enter(name):
        with lock:
            order.append(name)

    threads = [threading.Thread(target=enter, args=(i,)) for i in range(5)]
    with lock:
        for number, thread in enumerate(threads, 1):
            thread.start()
            wait_for(lambda number=number: len(lock._waiting) == number, 60.0)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fused", [True, False])
def test_a_local_folder_of_a_policy_is_served_as_its_pin_is(saved, fused):
    uri, _ = parse_pin(saved)
    place = uri.removeprefix("file://")
    outputs = []
    for model in (ModelRef(pin=saved), ModelRef(folder=place, version=3)):
        engine = open_model(model, torch.device("cpu"), fused=fused)
        assert engine.version == 3
        outputs.append({name: tensor.clone() for name, tensor in engine.tensors.items()})
    assert outputs[0].keys() == outputs[1].keys()
    assert all(torch.equal(outputs[0][name], outputs[1][name]) for name in outputs[0])


def test_sizes_that_vllm_does_not_take_on_the_cpu_are_named():
    config = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
    check_cpu_sizes(config, [32, 64], 2)
    with pytest.raises(EngineError) as told:
        check_cpu_sizes({**config, "head_dim": 24, "hidden_size": 60}, [32, 64], 4)
    assert "`head_dim` must be one of [32, 64], got 24" in str(told.value)
    assert "`hidden_size` must be a multiple of 8, got 60" in str(told.value)
    assert "intermediate_size" not in str(told.value)
    with pytest.raises(EngineError, match="`intermediate_size` must be a multiple of 64, got 96"):
        check_cpu_sizes(config, [32], 8)
