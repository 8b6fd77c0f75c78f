"""The train stage that submits a gang: what the gang is called, and what is refused before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planish.run.gang.cluster import GangCluster
from planish.run.gang.manifests import GangPods
from planish.stages.train import stage
from planish.stages.train.ranks.job import JobResult, TrainJob


@pytest.fixture
def gangs(monkeypatch):
    """The gangs that are submitted; none of them runs."""
    submitted = []
    monkeypatch.setattr(stage, "run_gang", lambda _, gang, before: submitted.append(gang))
    monkeypatch.setattr(stage, "result_of", lambda *_: JobResult(None))
    return submitted


def job_of(root, *, iteration=1, algorithm=None, state_pin="", **train):
    config = {"train": train, "algorithm": algorithm or {"name": "dapo"}}
    return TrainJob(root, config, "0" * 64, iteration, 1, "p#sha256=1", state_pin, "r#sha256=2")


def submit(job, num_nodes=2, pods=None):
    cluster = GangCluster(None, "n", "stage", launcher=job.train.launcher)
    return stage.launch_gang(job, cluster, num_nodes, pods or GangPods())


def test_one_iteration_has_one_name_however_it_is_shared_out(gangs, file_root, monkeypatch):
    job = job_of(file_root)
    submit(job)
    submit(job)
    first, again = gangs
    assert (first.name, first.work) == (again.name, again.work)
    submit(job, 3)
    submit(job, 2, GangPods(gpus=8))
    submit(job_of(file_root, tokens_per_microbatch=96))
    submit(job_of(file_root, launcher="trainjob"))
    others = gangs[2:]
    assert {each.name for each in others} == {first.name}
    assert len({each.work for each in (first, *others)}) == 5
    submit(replace(job, iteration=2))
    submit(job_of(f"{file_root}-2"))
    assert len({each.name for each in gangs}) == 3
