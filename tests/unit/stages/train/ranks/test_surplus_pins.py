import pytest
import torch

from planish.base.errors import RecordError
from planish.checkpoint.train_state import save
from planish.records import layout
from planish.records.io import read_manifest, write_set
from planish.records.rollouts import RolloutSet
from planish.stages.rollout.groups import as_set
from planish.stages.train.ranks.job import TrainJob, read_inputs
from tests.unit.stages.rollout.test_sampler import group
from tests.unit.stages.train.runs import rewards_for


def one_group(version):
    return as_set([group(0, "m", version)])


def job_after(root, iteration, surplus_versions, *, state_pin="", staleness=1):
    """Rollouts of one shard per item, whose surplus set (if any) is of that policy version."""
    parents = {}
    rollouts = one_group(iteration - 1)
    num_shards = len(surplus_versions)
    for shard, version in enumerate(surplus_versions):
        digest = ""
        if version is not None:
            facts = {"versions": [version], "ordinals": [shard], "num_right": [1]}
            uri = layout.surplus(root, iteration, shard)
            ref = write_set(uri, one_group(version), parents={}, attributes=facts)
            digest = ref.manifest_sha256
        consumed = [(iteration - 1) * num_shards + shard]
        facts = {"consumed": consumed, "surplus_sha256": digest}
        uri = layout.rollouts(root, iteration, shard)
        ref = write_set(uri, rollouts, parents={}, attributes=facts)
        parents[f"rollouts-{shard:02d}"] = ref.manifest_sha256
    rewards = rewards_for(RolloutSet.concat([rollouts] * num_shards), 0)
    ref = write_set(layout.rewards(root, iteration), rewards, parents=parents, attributes={})
    config = {"rollout": {"max_staleness": staleness}}
    return TrainJob(root, config, "c", iteration, num_shards, "", state_pin, ref.pin())


def data_of(job):
    return read_inputs(job).stream.to_data()


def test_the_state_names_surplus_sets_below_the_root(file_root):
    data = data_of(job_after(file_root, 3, [2, None, 2]))
    digests = [read_manifest(layout.surplus(file_root, 3, s)).sha256 for s in (0, 2)]
    assert data["surplus"] == [
        f"iterations/00003/surplus/00#sha256={digests[0]}",
        f"iterations/00003/surplus/02#sha256={digests[1]}",
    ]
    assert (data["next"], data["pending"]) == (9, [0, 1, 2, 3, 4, 5])


def test_sets_that_the_next_policy_may_not_train_on_are_left_out(file_root):
    # the next policy is version 4: sampled by 2 is 2 old, by 3 is 1 old
    data = data_of(job_after(file_root, 4, [2, 3]))
    assert [pin.split("#")[0] for pin in data["surplus"]] == ["iterations/00004/surplus/01"]
    data = data_of(job_after(file_root, 4, [2, 3], staleness=2))
    assert len(data["surplus"]) == 2


def test_a_state_without_surplus_holds_the_cursor_alone(file_root):
    data = data_of(job_after(file_root, 1, [None, None]))
    assert data == {"next": 2, "pending": []}


def test_sets_of_the_state_before_are_used_up(file_root):
    data = data_of(job_after(file_root, 1, [0]))
    state = {"model": {"x": torch.zeros(1)}, "extra": {"data": data}}
    pin = save(layout.state(file_root, 1), state, parents={}, attributes={}).pin()
    after = data_of(job_after(file_root, 2, [None], state_pin=pin))
    assert after == {"next": 2, "pending": []}


def test_another_surplus_set_than_the_rollouts_name_is_refused(file_root):
    job = job_after(file_root, 2, [1])
    uri = layout.surplus(file_root, 2, 0)
    write_set(uri, one_group(0), parents={}, attributes={"versions": [0]})
    with pytest.raises(RecordError):
        read_inputs(job)
