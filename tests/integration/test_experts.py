"""A policy with experts through every stage: what moves between them is one tensor per expert."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from planish import store
from planish.engines.weights import PinnedWeights
from planish.models.policy import load_policy
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.reports import UpdateReport, read_report
from tests.integration import runs

EXPERTS = "model.num_experts=4 model.experts_per_token=2 model.expert_intermediate_size=32"


def pin(root, version):
    uri = layout.policy(root, version)
    return read_manifest(uri).ref(uri).pin()


def newest_state(root):
    """Return the URI of the train state of the newest step."""
    folder = layout.state(root, 0).rpartition("/")[0]
    steps = {uri.removeprefix(f"{folder}/").partition("/")[0] for uri in store.list_uris(folder)}
    return f"{folder}/{max(steps)}"


def logits(policy_pin):
    """Return the logits of a few tokens by the modules of transformers, [2, 12, vocabulary]."""
    ids = torch.arange(24).view(2, 12) % 50 + 4
    with torch.inference_mode():
        return load_policy(policy_pin).model(input_ids=ids, use_cache=False).logits


@pytest.mark.slow
def test_experts_are_pretrained_sampled_trained_by_two_processes_and_exported(tmp_path):
    root = f"file://{tmp_path}/run"
    overrides = f"{EXPERTS} train.num_processes=2 train.replay_routing=true"
    overrides += " algorithm.correction=off"
    runs.run(root, tmp_path / "log", shards=1, compact=True, overrides=overrides)
    before, after = (PinnedWeights(pin(root, version)) for version in (0, 1))
    assert after.names() == before.names()
    experts = [name for name in after.names() if ".mlp.experts." in name]
    layers = len({name.split(".")[2] for name in experts})
    assert len(experts) == layers * 4 * 3
    assert any(not after.read(name).equal(before.read(name)) for name in experts)
    assert load_policy(pin(root, 1)).model.config.num_experts == 4
    scalars = read_report(UpdateReport, layout.update(root, 1)).scalars
    assert scalars["num_rollouts"] > 0
    assert scalars["mismatch_logprob_max"] < 1e-4
    assert scalars["routing_disagreement"] < 0.01
    check_three_processes_go_on(tmp_path, root)
    check_a_merged_folder(tmp_path, root)


def check_three_processes_go_on(tmp_path, root):
    """What two processes saved is what three load: without a learning rate the policy stays."""
    other = f"file://{tmp_path}/three"
    overrides = f"{EXPERTS} train.num_processes=3 train.learning_rate=1e-30"
    overrides += " algorithm.correction=off rollout.max_generation_rounds=30"
    options = {"overrides": overrides, "resume_from": root, "allow_config_change": True}
    runs.run(other, tmp_path / "three.log", shards=1, compact=True, **options)
    files = [uri for uri in store.list_uris(newest_state(other)) if "/policy.model/" in uri]
    assert len(files) == 3
    first, last = (PinnedWeights(p) for p in (pin(root, 1), pin(other, 1)))
    assert first.names() == last.names()
    assert all(first.read(name).equal(last.read(name)) for name in first.names())
    scalars = read_report(UpdateReport, layout.update(other, 1)).scalars
    assert scalars["mismatch_logprob_max"] < 1e-4


def check_a_merged_folder(tmp_path, root):
    """The reshard pipeline writes the policy that the run exported."""
    target = f"file://{tmp_path}/reshard"
    command = [sys.executable, "-m", "pipelines.reshard", "--root", target]
    command += ["--source", newest_state(root), "--layout", "merged", "--policy", pin(root, 1)]
    done = subprocess.run(
        command, cwd=runs.REPOSITORY, env=runs.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    merged = read_manifest(f"{target}/merged").ref(f"{target}/merged").pin()
    assert torch.equal(logits(merged), logits(pin(root, 1)))
