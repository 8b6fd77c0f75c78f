"""A policy with experts through every stage: what moves between them is one tensor per expert."""

import numpy as np
import pytest

from planish import store
from planish.engines import ENGINES
from planish.models.policy import load_policy
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.reports import UpdateReport, read_report
from tests.integration import reshard_training, runs
from tests.unit.engines.pinned import PinnedWeights
from tests.unit.engines.tiny import exact_logprobs

pytestmark = pytest.mark.slow

EXPERTS = "model.num_experts=4 model.experts_per_token=2 model.expert_intermediate_size=32"


def pin(root, version):
    uri = layout.policy(root, version)
    return read_manifest(uri).ref(uri).pin()


def newest_state(root):
    """Return the URI of the train state of the newest step."""
    folder = layout.state(root, 0).rpartition("/")[0]
    steps = {uri.removeprefix(f"{folder}/").partition("/")[0] for uri in store.list_uris(folder)}
    return f"{folder}/{max(steps)}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Root of a run whose policy two processes have trained."""
    folder = tmp_path_factory.mktemp("experts")
    root = f"file://{folder}/run"
    overrides = f"{EXPERTS} train.num_processes=2 train.replay_routing=true"
    overrides += " algorithm.correction=off"
    runs.run(root, folder / "log", shards=1, overrides=overrides)
    return root


@pytest.fixture(scope="module")
def resharded(trained, tmp_path_factory):
    """Root of a run that goes on with three processes, without a learning rate."""
    folder = tmp_path_factory.mktemp("three")
    root = f"file://{folder}/run"
    overrides = f"{EXPERTS} train.num_processes=3 train.learning_rate=1e-30"
    overrides += " algorithm.correction=off rollout.max_generation_rounds=30"
    options = {"overrides": overrides, "resume_from": trained, "allow_config_change": True}
    runs.run(root, folder / "log", shards=1, **options)
    return root


def test_experts_are_pretrained_sampled_and_trained_by_two_processes(trained):
    before, after = (PinnedWeights(pin(trained, version)) for version in (0, 1))
    assert after.names() == before.names()
    experts = [name for name in after.names() if ".mlp.experts." in name]
    layers = len({name.split(".")[2] for name in experts})
    assert len(experts) == layers * 4 * 3
    assert any(not after.read(name).equal(before.read(name)) for name in experts)
    assert load_policy(pin(trained, 1)).model.config.num_experts == 4
    scalars = read_report(UpdateReport, layout.update(trained, 1)).scalars
    assert scalars["num_rollouts"] > 0
    assert scalars["mismatch_logprob_max"] < 1e-4
    assert scalars["routing_disagreement"] < 0.01


@pytest.mark.full
def test_what_two_processes_saved_is_what_three_load_and_export(trained, resharded):
    files = [uri for uri in store.list_uris(newest_state(resharded)) if "/policy.model/" in uri]
    assert len(files) == 3
    first, last = (PinnedWeights(p) for p in (pin(trained, 1), pin(resharded, 1)))
    assert first.names() == last.names()
    assert all(first.read(name).equal(last.read(name)) for name in first.names())
    scalars = read_report(UpdateReport, layout.update(resharded, 1)).scalars
    assert scalars["mismatch_logprob_max"] < 1e-4


@pytest.fixture(scope="module")
def sampled_on_vllm(trained):
    """Name of an engine on vLLM -> what it samples from the export; empty where vLLM is not."""
    if not reshard_training.ENGINES_PYTHON.exists():
        return {}
    names = [name for name in ENGINES if name.startswith("vllm")]
    return reshard_training.sample_elsewhere(pin(trained, 1), 1.0, *names)


def expect_exact(trained, samples):
    policy = load_policy(pin(trained, 1))
    for one, (token_ids, logprobs) in zip(reshard_training.requests(1.0), samples, strict=True):
        assert np.abs(exact_logprobs(policy, one, token_ids) - logprobs).max() < 1e-5


@pytest.mark.parametrize("engine", ["transformers", "disagg"])
def test_engines_sample_an_export_as_a_float64_forward_does(trained, engine):
    expect_exact(trained, reshard_training.sample(pin(trained, 1), engine, 1.0))


@pytest.mark.full
@pytest.mark.parametrize("engine", sorted(name for name in ENGINES if name.startswith("vllm")))
def test_engines_on_vllm_sample_it_so_too(trained, sampled_on_vllm, engine):
    if sampled_on_vllm:
        expect_exact(trained, sampled_on_vllm[engine])
    else:
        pytest.skip(f"{reshard_training.ENGINES_PYTHON} is missing: `make engines`")
