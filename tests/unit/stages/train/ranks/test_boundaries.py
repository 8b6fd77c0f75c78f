"""Attempts that leave between two steps, and what the state says of the prompts: one process."""

import signal
import subprocess
import sys
import threading

import pytest
import torch

from planish import store
from planish.base.errors import EXIT_TRANSIENT, RecordError
from planish.checkpoint.train_state import save
from planish.records import layout
from planish.records.io import read_manifest, write_set
from planish.records.rollouts import RolloutSet
from planish.run.signals import Terminated
from planish.stages.rollout.groups import as_set
from planish.stages.train.config import PLACEMENT, TrainConfig
from planish.stages.train.ranks.job import TrainJob, read_inputs
from planish.stages.train.ranks.worker import train_iteration
from tests.unit.stages.rollout.test_sampler import group
from tests.unit.stages.train.runs import add_iteration, rewards_for, start_run, tiny_config

NUM_STEPS = 8


class AskedAt(threading.Event):
    """Set from the boundary after so many steps on."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def is_set(self):
        self.left -= 1
        return self.left < 0


def job_of(root, algorithm):
    tiny = start_run(root, tiny_config(algorithm, num_passes=2))
    add_iteration(tiny, 1)
    rewards = layout.rewards(tiny.root, 1)
    return TrainJob(
        root=tiny.root,
        config=tiny.config,
        config_sha256=tiny.digest,
        iteration=1,
        num_shards=2,
        policy_pin=tiny.policy_pin,
        state_pin="",
        rewards_pin=read_manifest(rewards).ref(rewards).pin(),
    )


def outcome_of(job):
    result = train_iteration(job)
    return result.state.manifest_sha256, store.read(layout.update(job.root, job.iteration))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """State and report of both algorithms by an attempt that ends."""
    return {
        algorithm: outcome_of(job_of(tmp_path_factory.mktemp(algorithm).as_uri(), algorithm))
        for algorithm in ("dapo", "vapo")
    }


@pytest.mark.parametrize("steps", [0, 3, NUM_STEPS - 1])
@pytest.mark.parametrize("algorithm", ["dapo", "vapo"])
def test_an_attempt_leaves_before_a_step_and_the_next_one_has_equal_digests(
    tmp_path, undisturbed, algorithm, steps
):
    job = job_of(tmp_path.as_uri(), algorithm)
    with pytest.raises(Terminated) as left:
        train_iteration(job, asked=AskedAt(steps))
    assert left.value.code == EXIT_TRANSIENT
    assert not store.exists(layout.update(job.root, 1))
    assert outcome_of(job) == undisturbed[algorithm]


def test_who_shares_the_work_is_a_setting_of_the_stage():
    assert set(PLACEMENT) <= set(TrainConfig.model_fields)


RANK = """
import sys, time
from planish.stages.train.ranks.boundaries import Sigterm
asked = Sigterm()
if sys.argv[1] == "steps":
    asked.is_set()
print("ready", flush=True)
while not (sys.argv[1] == "steps" and asked.is_set()):
    time.sleep(0.02)
"""


@pytest.mark.parametrize(("when", "code"), [("loads", -signal.SIGTERM), ("steps", 0)])
def test_a_rank_whose_first_step_has_not_begun_ends_at_once(when, code):
    words = [sys.executable, "-c", RANK, when]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as rank:
        assert rank.stdout.readline() == b"ready\n"
        rank.send_signal(signal.SIGTERM)
        try:
            assert rank.wait(timeout=60) == code
        finally:
            rank.kill()


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
            facts = {"versions": [version], "ordinals": [shard]}
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
