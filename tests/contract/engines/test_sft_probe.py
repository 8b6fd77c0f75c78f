"""The cold start measures with the engine of the run, whichever it is."""

import itertools
import json

import pytest
import torch

from planish.base.errors import ConfigError
from planish.engines.config import EngineConfig
from planish.models.policy import build_policy
from planish.records.io import read_manifest
from planish.records.refs import Ref
from planish.stages.sft.config import SftConfig
from planish.stages.sft.probe import Probe
from planish.stages.sft.stage import run
from planish.stages.sft.traces import encode_traces
from planish.stages.sft.training import train_steps
from tests.contract.engines.conftest import HERE
from tests.unit.tiny_run import artifact, make_run, sums, tiny_model, write_data

SETTINGS = {"transformers": {}, "vllm": {"name": "vllm", "cache_bytes": 16 << 20}}
"""Engines of a dense policy."""

PAIRS = [(a, b) for a in range(1, 6) for b in range(6)]
WIDE_HEADS = {"head_dim": 32}
"""The least that vLLM's attention knows on the CPU."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HERE if name in SETTINGS])
def test_the_probe_follows_the_weights_that_are_trained(name):
    policy = build_policy(tiny_model().model_copy(update=WIDE_HEADS), 0)
    prompts, traces = sums(PAIRS)
    encoded = encode_traces(traces, policy.tokenizer)
    config = SftConfig(traces_per_minibatch=10, warmup_steps=2, max_response_tokens=6, max_rows=30)
    engine = EngineConfig(**SETTINGS[name])
    with Probe(policy, config, engine, run_seed=0, dtype=torch.float32) as probe:
        before = probe.accuracy(prompts, num_samples=1, temperature=0.0)
        steps = train_steps(policy, encoded, config, seed=0, learning_rate=1e-2, warmup_steps=2)
        for _ in itertools.islice(steps, 300):
            pass
        after = [probe.accuracy(prompts, num_samples=1, temperature=0.0) for _ in range(2)]
    assert before < 0.2
    assert after[0] == after[1] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HERE if name in SETTINGS])
def test_the_stage_measures_with_the_engine_of_the_run(name, file_root, tmp_path, caplog):
    caplog.set_level("INFO")
    prompts = write_data(file_root)
    digest = make_run(file_root, model=WIDE_HEADS, engine=SETTINGS[name], sft={"max_rows": 8})
    run(
        root=file_root,
        config_sha256=digest,
        prompts=artifact(tmp_path, "prompts", prompts),
        policy=artifact(tmp_path, "policy"),
        metrics=artifact(tmp_path, "metrics"),
    )
    ref = Ref.from_json((tmp_path / "artifacts/policy").read_text())
    metrics = json.loads((tmp_path / "artifacts/metrics").read_text())
    assert read_manifest(ref.uri).attributes["metrics"] == metrics
    assert (metrics["steps"], metrics["num_probes"]) == (6.0, 4.0)
    assert 0.0 <= metrics["accuracy"] <= 1.0
    assert ("started engine=vllm" in caplog.text) == (name == "vllm")
    # One change of weights for each measurement: at steps 3 and 6.
    assert caplog.text.count("updated version=") == 2


@pytest.mark.skipif("vllm" in HERE, reason="vLLM is here")
def test_without_the_engine_of_the_run_the_cold_start_says_where_it_is():
    policy = build_policy(tiny_model(), 0)
    engine = EngineConfig(name="vllm")
    with pytest.raises(ConfigError, match=r"needs the package vllm.*use the image `rollout`"):
        Probe(policy, SftConfig(), engine, run_seed=0, dtype=torch.float32)
