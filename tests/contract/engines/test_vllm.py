"""What the engine `vllm` refuses, each by name and before a token is sampled."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from planish.base.errors import ConfigError, EngineError
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef
from planish.engines.vllm.engine import VllmEngine
from planish.engines.weights import DictWeights, open_weights
from planish.models.policy import save_policy
from tests.contract.engines.conftest import FAMILIES
from tests.contract.engines.test_control import weights
from tests.unit.engines.tiny import ids_of, qwen3_policy, request

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
    assert "got 16; take the engine `transformers`" in text


def test_a_device_that_this_build_is_not_for_is_refused():
    assert "which is 'cpu', got 'cuda'" in refused(qwen3_policy(), device="cuda")


@pytest.mark.parametrize("setting", [{"tensor_parallel": 2}, {"quantization": "fp8"}])
def test_what_needs_accelerators_is_refused_on_the_cpu(setting):
    config = EngineConfig(name="vllm", **setting)
    assert "must be 1 and `engine.quantization` 'none'" in refused(qwen3_policy(), config=config)


def test_a_cache_too_small_for_one_sequence_is_refused():
    config = EngineConfig(name="vllm", cache_bytes=1 << 12)
    text = refused(qwen3_policy(), config=config)
    assert (
        "the cache must hold one sequence of 1024 tokens, got `engine.cache_bytes` = 4096" in text
    )


def test_a_tokenizer_of_another_model_is_refused():
    policy = qwen3_policy()
    policy.tokenizer.eos_token_ids = (54,)
    text = refused(policy)
    assert "end tokens must lie in the model's vocabulary of 54, got 54" in text


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_a_policy_folder_with_a_missing_or_an_extra_expert_is_refused(tmp_path, change):
    policy = experts_policy()
    save_policy(f"file://{tmp_path}/p", policy, version=0, parents={}, attributes={})
    (path,) = (tmp_path / "p").glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    other = "model.layers.1.mlp.experts.4.up_proj.weight"
    if change == "missing":
        del tensors[name]
    else:
        tensors[other] = tensors[name].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    pin = pin_of_changed(tmp_path / "p", tmp_path / "q")
    with pytest.raises(EngineError) as caught:
        VllmEngine(max_rows=2, config=SMALL).start(ModelRef(pin=pin))
    wanted = f"{name} is missing" if change == "missing" else f"{other} is of none of the 4 experts"
    assert f"must hold every expert once, got {wanted} (1 in all)" in str(caught.value)


def pin_of_changed(source: Path, target: Path) -> str:
    """Publish the files of a folder anew, as somebody who made them otherwise would have."""
    from planish.records.io import write_files

    attributes = json.loads((source / "manifest.json").read_text())["attributes"]
    files = {p.name: p for p in source.iterdir() if p.name != "manifest.json"}
    return write_files(target.as_uri(), "policy/1", files, parents={}, attributes=attributes).pin()


def test_new_weights_from_a_folder_that_goes_away_leave_the_engine_failed(tmp_path):
    policy = qwen3_policy(1)
    pin = save_policy(f"file://{tmp_path}/p", policy, version=1, parents={}, attributes={}).pin()
    with VllmEngine(max_rows=2, config=SMALL) as engine:
        engine.start(ModelRef(policy=qwen3_policy()))
        source = open_weights(pin)
        source.folder = tmp_path / "gone"
        with pytest.raises(EngineError, match=r"must hold \*.safetensors files, got none"):
            engine.update_weights(source, 1)
        assert (engine.state, engine.version()) == ("failed", 0)
        with pytest.raises(EngineError, match="needs an engine that is ready"):
            engine.generate([request(0, 2)])


def test_weights_from_a_folder_and_from_memory_act_alike(tmp_path):
    policy = experts_policy(1)
    pin = save_policy(f"file://{tmp_path}/p", policy, version=1, parents={}, attributes={}).pin()
    requests = [request(i, 12, temperature=0.0) for i in range(3)]
    with VllmEngine(max_rows=4, config=SMALL) as engine:
        engine.start(ModelRef(policy=experts_policy()))
        from_folder = engine.update_weights(open_weights(pin), 1)
        first = ids_of(engine.generate(requests))
        from_memory = engine.update_weights(weights(policy), 2)
        assert ids_of(engine.generate(requests)) == first
        assert from_folder.num_tensors == from_memory.num_tensors > 30
        extra = {"one_more": policy.model.model.norm.weight.detach()}
        named = {n: open_weights(pin).read(n) for n in open_weights(pin).names()}
        with pytest.raises(EngineError, match="one_more is not of this model"):
            engine.update_weights(DictWeights({**named, **extra}), 3)
        assert ids_of(engine.generate(requests)) == first
    shutil.rmtree(tmp_path / "p")
