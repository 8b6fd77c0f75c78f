"""A policy with experts through every stage: what moves between them is one tensor per expert."""

from __future__ import annotations

import pytest

from planish.engines.weights import open_weights
from planish.models.policy import load_policy
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.reports import UpdateReport, read_report
from tests.integration import runs

EXPERTS = "model.num_experts=4 model.experts_per_token=2 model.expert_intermediate_size=32"


def pin(root, version):
    uri = layout.policy(root, version)
    return read_manifest(uri).ref(uri).pin()


@pytest.mark.slow
def test_experts_are_pretrained_sampled_trained_by_two_processes_and_exported(tmp_path):
    root = f"file://{tmp_path}/run"
    overrides = f"{EXPERTS} train.num_processes=2 algorithm.correction=off"
    runs.run(root, tmp_path / "log", iterations=2, overrides=overrides)
    before, after = (open_weights(pin(root, version)) for version in (0, 2))
    assert after.names() == before.names()
    experts = [name for name in after.names() if ".mlp.experts." in name]
    layers = len({name.split(".")[2] for name in experts})
    assert len(experts) == layers * 4 * 3
    assert any(not after.read(name).equal(before.read(name)) for name in experts)
    assert load_policy(pin(root, 2)).model.config.num_experts == 4
    scalars = read_report(UpdateReport, layout.update(root, 1)).scalars
    assert scalars["num_rollouts"] > 0
    assert scalars["mismatch_logprob_max"] < 1e-4
