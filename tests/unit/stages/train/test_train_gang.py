"""The train stage that submits a gang: what the gang is called, and what is refused before it."""

from dataclasses import replace

import pytest

from planish import store
from planish.base.errors import ConfigError, LayoutMismatch, RecordError
from planish.records.refs import parse_pin
from planish.run.gang.cluster import GangCluster
from planish.run.gang.manifests import GangPods
from planish.stages.train import stage
from planish.stages.train.ranks import job as job_module
from planish.stages.train.ranks.job import JobResult, TrainJob, read_job, write_job


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


def test_a_trainer_that_the_image_lacks_is_refused_before_the_gang(gangs, file_root, monkeypatch):
    job = job_of(file_root, trainer="megatron")
    monkeypatch.setattr("planish.base.parallel.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"find the package 'megatron'.*planish\[megatron\]"):
        submit(job)
    assert gangs == []
    submit(job_of(file_root))
    monkeypatch.setattr("planish.base.parallel.find_spec", lambda name: object())
    submit(job)
    assert len(gangs) == 2


@pytest.mark.parametrize(
    ("algorithm", "critic", "held", "is_refused"),
    [
        ("vapo", {}, {"step": 1}, True),
        ("vapo", {"init": "random"}, {"step": 1}, True),
        ("vapo", {}, {"step": 1, "critic": {"sizes": 1}}, False),
        ("vapo", {"init": "model", "path": "Qwen/Qwen2.5-0.5B"}, {"step": 1}, False),
        ("dapo", {}, {"step": 1}, False),
        ("vapo", {}, None, False),
    ],
)
def test_a_state_without_the_critic_that_is_needed_is_refused_before_the_gang(
    gangs, file_root, monkeypatch, algorithm, critic, held, is_refused
):
    """As ranks refuse it; the first iteration has no state, and a named critic begins anew."""
    monkeypatch.setattr(job_module, "read_state_info", lambda pin: held)
    job = job_of(file_root, algorithm={"name": algorithm}, state_pin="s#sha256=3" if held else "")
    job = replace(job, config={**job.config, "critic": critic})
    if is_refused:
        with pytest.raises(LayoutMismatch, match=r"must hold a critic.*`critic\.init`"):
            submit(job)
    else:
        submit(job)
    assert len(gangs) == (not is_refused)


def test_a_torn_job_document_is_refused(file_root):
    job = job_of(file_root)
    pin = write_job(job)
    assert read_job(pin, TrainJob) == job
    uri, _ = parse_pin(pin)
    store.write(uri, job.to_json().encode()[:-20])
    with pytest.raises(
        RecordError, match=r"must be the job that the stage has written.*other bytes"
    ):
        read_job(pin, TrainJob)


def test_one_iteration_has_one_name_however_it_is_shared_out(gangs, file_root):
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
