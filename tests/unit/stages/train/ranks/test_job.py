"""What a train job reads belongs together, whoever has written it."""

import json

import pytest

from planish.base.errors import ConfigError, ObjectMissing, PeerLost, RecordError
from planish.records import layout
from planish.records.io import write_set
from planish.stages.train import stage
from planish.stages.train.ranks.job import TrainJob, read_inputs
from planish.store.documents import write_json
from tests.unit.stages.train.runs import add_iteration, random_rollouts, start_run


def state(root):
    return f"{root}/states/step-00000004#sha256={'0' * 64}"


@pytest.mark.parametrize(
    ("own", "version", "is_refused"),
    [(True, 2, True), (True, 3, True), (True, 1, False), (False, 7, False)],
)
def test_the_state_before_an_iteration_is_not_of_a_later_one(own, version, is_refused, monkeypatch):
    root = "file:///absent/a"
    pin = state(root if own else "file:///absent/b")
    job = TrainJob(root, {"train": {}}, "0" * 64, 2, 1, "", pin, f"{root}/r#sha256={'1' * 64}")
    job.__dict__["info"] = {"policy_version": version, "step": 4}
    if is_refused:
        with pytest.raises(ConfigError, match=f"of an earlier policy version, got {version}"):
            stage._next_step(job)
    else:
        with pytest.raises(ObjectMissing):
            stage._next_step(job)


@pytest.mark.parametrize("num_shards", [2, 3])
def test_rewards_of_other_rollouts_are_told(tmp_path, num_shards):
    run = start_run(tmp_path.as_uri())
    rewards, facts = add_iteration(run, 1).pin(), (run.root, run.config, run.digest, 1)
    assert read_inputs(TrainJob(*facts, 2, run.policy_pin, "", rewards)).rollouts.num_groups == 8
    # Rollouts that were sampled again, and a shard that nobody has scored.
    made = random_rollouts(run.policy, 7)
    write_set(layout.rollouts(run.root, 1, num_shards - 1), made, parents={}, attributes={})
    with pytest.raises(RecordError, match="must score the rollouts at"):
        read_inputs(TrainJob(*facts, num_shards, run.policy_pin, "", rewards))


@pytest.mark.parametrize(
    ("files", "lost", "expected"),
    [
        ({"result": {"a": 1}}, None, '{"a": 1}'),
        (
            {"behind": {"message": "wait for rank 1"}},
            "a pod failed",
            "wait for rank 1; a pod failed",
        ),
        # All went well in the end.
        ({"result": {}, "behind": {"message": "wait for rank 1"}}, None, "{}"),
        ({"error": {"error": "ConfigError", "message": "bad"}, "behind": {}}, "a pod", "bad"),
        ({}, "a pod failed", "a pod failed"),
    ],
)
def test_a_task_ends_with_what_its_ranks_have_written(tmp_path, files, lost, expected):
    folder = tmp_path.as_uri()
    pin = f"{folder}/job.json#sha256={'0' * 64}"
    for name, document in files.items():
        write_json(f"{folder}/{name}.json", document)
    error = PeerLost(lost) if lost else None
    if lost:
        kind = ConfigError if "error" in files else PeerLost
        with pytest.raises(kind, match=f"^{expected}$"):
            stage.result_of(pin, error)
    else:
        assert json.loads(stage.result_of(pin, None)) == json.loads(expected)
    stage.forget_result(pin)
    assert [path.name for path in tmp_path.iterdir()] == []
