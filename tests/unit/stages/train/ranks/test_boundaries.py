"""Steps that are committed within an iteration, and attempts that go on from them: one process."""

import logging
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from planish import store
from planish.base.errors import EXIT_TRANSIENT, RecordError
from planish.checkpoint import api
from planish.checkpoint.train_state import save
from planish.records import layout
from planish.records.io import read_manifest, write_set
from planish.records.rollouts import RolloutSet
from planish.run.signals import Terminated
from planish.stages.rollout.groups import as_set
from planish.stages.train.config import PLACEMENT, TrainConfig
from planish.stages.train.ranks.job import TrainJob, read_inputs
from planish.stages.train.ranks.worker import train_iteration
from planish.stages.train.stage import train
from tests.unit.stages.rollout.test_sampler import group
from tests.unit.stages.train.runs import add_iteration, rewards_for, start_run, tiny_config

NUM_STEPS = 8


class Crash(Exception):
    """Ends an attempt like a machine that fails: nothing is said any more."""


class AskedAt(threading.Event):
    """Set from the boundary after so many steps on; or that boundary crashes."""

    def __init__(self, steps, crashes=False):
        super().__init__()
        self.left, self.crashes = steps, crashes

    def is_set(self):
        self.left -= 1
        if self.left < 0 and self.crashes:
            raise Crash
        return self.left < 0


def job_of(root, algorithm="dapo", **train_changes):
    tiny = start_run(root, tiny_config(algorithm, num_passes=2))
    add_iteration(tiny, 1)
    rewards = layout.rewards(tiny.root, 1)
    job = TrainJob(
        root=tiny.root,
        config=tiny.config,
        # States of different settings of commits are compared below.
        config_sha256="0" * 64,
        iteration=1,
        num_shards=2,
        policy_pin=tiny.policy_pin,
        state_pin="",
        rewards_pin=read_manifest(rewards).ref(rewards).pin(),
    )
    return with_train(job, **train_changes)


def with_train(job, **changes):
    return replace(job, config={**job.config, "train": {**job.config["train"], **changes}})


def outcome_of(job, result):
    return result.state.manifest_sha256, store.read(layout.update(job.root, job.iteration))


def committed(job):
    """Steps that are committed, of whatever configuration, after saves under way have ended."""
    from planish.checkpoint.save.engine import default_engine

    default_engine().wait()
    return [
        entry.step for entry in api.list_checkpoints(layout.step_commits(job.root, job.iteration))
    ]


def leave_at(job, steps, **options):
    with pytest.raises(Terminated) as left:
        train_iteration(job, asked=AskedAt(steps, **options))
    assert left.value.code == EXIT_TRANSIENT


def crash_at(job, steps):
    with pytest.raises(Crash):
        train_iteration(job, asked=AskedAt(steps, crashes=True))


def has_no_commits(job):
    return store.list_uris(layout.step_commits(job.root, 1)) == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """State and report of both algorithms without commits."""
    outcomes = {}
    for algorithm in ("dapo", "vapo"):
        job = job_of(tmp_path_factory.mktemp(algorithm).as_uri(), algorithm)
        outcomes[algorithm] = outcome_of(job, train_iteration(job))
    return outcomes


@pytest.fixture
def job(tmp_path):
    return job_of(tmp_path.as_uri(), commit_steps=2)


@pytest.fixture(autouse=True)
def lines(caplog):
    caplog.set_level(logging.INFO, logger="planish")


@pytest.mark.parametrize("algorithm", ["dapo", "vapo"])
def test_an_attempt_that_crashed_is_gone_on_with_to_equal_digests(
    tmp_path, undisturbed, algorithm, caplog
):
    job = job_of(tmp_path.as_uri(), algorithm, commit_steps=2)
    crash_at(job, 5)
    assert committed(job) == [2, 4]
    crash_at(job, 3)
    assert "resumed steps=4 of=8 commit_steps=2" in caplog.messages
    assert committed(job) == [4, 6]
    result = train_iteration(job)
    assert "resumed steps=6 of=8 commit_steps=2" in caplog.messages
    assert outcome_of(job, result) == undisturbed[algorithm]
    assert has_no_commits(job)


def test_an_attempt_that_is_asked_to_end_commits_its_last_step(job, undisturbed, caplog):
    leave_at(job, 3)
    assert any(line.startswith("left steps_lost=0 ") for line in caplog.messages)
    assert committed(job) == [2, 3]
    assert outcome_of(job, train_iteration(job)) == undisturbed["dapo"]
    assert "resumed steps=3 of=8 commit_steps=2" in caplog.messages


def test_without_commits_the_steps_are_lost_and_told(job, undisturbed, caplog):
    job = with_train(job, commit_steps=0)
    leave_at(job, 3)
    assert any(line.startswith("left steps_lost=3 ") for line in caplog.messages)
    assert has_no_commits(job)
    assert outcome_of(job, train_iteration(job)) == undisturbed["dapo"]


def test_more_steps_than_an_iteration_has_commit_nothing(job, undisturbed, caplog):
    job = with_train(job, commit_steps=NUM_STEPS)
    assert outcome_of(job, train_iteration(job)) == undisturbed["dapo"]
    assert not any(line.startswith("commit begun") for line in caplog.messages)
    assert "resumed steps=0 of=8 commit_steps=8" in caplog.messages


def damage(job, step):
    """Flip a byte in the middle of every tensor file of a commit."""
    (uri,) = (
        entry.uri
        for entry in api.list_checkpoints(layout.step_commits(job.root, 1))
        if entry.step == step
    )
    for name in store.list_uris(uri):
        if name.endswith(".safetensors"):
            data = bytearray(store.read(name))
            data[-8] ^= 1
            store.write(name, bytes(data))


def test_the_commit_before_a_torn_one_is_loaded(job, undisturbed, caplog):
    crash_at(job, 5)
    assert committed(job) == [2, 4]
    damage(job, 4)
    assert outcome_of(job, train_iteration(job)) == undisturbed["dapo"]
    assert "resumed steps=2 of=8 commit_steps=2" in caplog.messages
    assert any("checkpoint_skipped" in line and "step-00000004" in line for line in caplog.messages)


def test_where_every_commit_is_torn_the_iteration_begins_anew(job, undisturbed, caplog):
    crash_at(job, 5)
    for step in committed(job):
        damage(job, step)
    assert outcome_of(job, train_iteration(job)) == undisturbed["dapo"]
    assert any(line.startswith("commits removed, the iteration begins") for line in caplog.messages)
    assert "resumed steps=0 of=8 commit_steps=2" in caplog.messages
    assert has_no_commits(job)


def test_a_commit_of_another_configuration_is_ignored_and_told(job, undisturbed, caplog):
    crash_at(with_train(job, learning_rate=1e-3), 5)
    assert committed(job) == [2, 4]
    assert outcome_of(job, train_iteration(job)) == undisturbed["dapo"]
    ignored = [line for line in caplog.messages if line.startswith("commit ignored uri=")]
    assert len(ignored) == 2
    assert "resumed steps=0 of=8 commit_steps=2" in caplog.messages
    assert has_no_commits(job)


def test_a_commit_is_found_by_what_it_depends_on_and_not_by_who_shares_the_work(job):
    assert set(PLACEMENT) <= set(TrainConfig.model_fields)
    moved = with_train(
        job, num_processes=4, trainer="megatron", tensor_parallel=2, commit_steps=7, queue="q"
    )
    assert moved.steps_place == job.steps_place
    assert with_train(job, learning_rate=1e-3).steps_place != job.steps_place
    for other in (
        replace(job, num_shards=1),
        replace(job, rewards_pin=job.rewards_pin[:-64] + "1" * 64),
        replace(job, config={**job.config, "run": {"seed": 8}}),
        replace(job, config={**job.config, "algorithm": {"name": "vapo"}}),
    ):
        assert other.steps_place != job.steps_place


def test_steps_are_counted_over_the_run_and_an_iteration_goes_on_from_its_own(job):
    first = train_iteration(job).state
    add_iteration(start_run(job.root, tiny_config(num_passes=2)), 2)
    uri = layout.rewards(job.root, 2)
    rewards = read_manifest(uri).ref(uri).pin()
    second = replace(job, iteration=2, state_pin=first.pin(), rewards_pin=rewards)
    undisturbed = outcome_of(second, train_iteration(with_train(second, commit_steps=0)))
    crash_at(second, 5)
    assert committed(second) == [NUM_STEPS + 2, NUM_STEPS + 4]
    assert outcome_of(second, train_iteration(second)) == undisturbed


def test_an_iteration_that_is_done_is_rid_of_its_commits_by_the_next_attempt(job):
    crash_at(job, 3)
    assert committed(job) == [2]
    kept = {uri: store.read(uri) for uri in store.list_uris(layout.step_commits(job.root, 1))}
    train(job)
    for uri, data in kept.items():
        store.write(uri, data)
    # As an attempt leaves it that is killed between its state and the removal.
    assert train(job).already_done
    assert has_no_commits(job)


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
