import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from planish import store
from planish.base.config import config_sha256
from planish.records import layout
from planish.records.io import read_manifest, read_set, write_set
from planish.records.refs import Ref
from planish.records.rewards import RewardSet, nothing_learnt
from planish.records.rollouts import FinishReason, RolloutSet
from planish.run.stage import PathArtifact, write_json
from planish.show.run import run_tables
from planish.stages.reward.config import RewardConfig
from planish.stages.reward.score import score
from planish.stages.reward.signal import groups_without_signal
from planish.stages.reward.stage import run
from planish.verifiers import Verdict
from tests.unit.stages.reward.test_score import rollouts

POLICY = "ab" * 32
CONFIG = {"run": {"seed": 0}, "reward": {"max_response_tokens": 64, "overlong_buffer_tokens": 16}}
DIGEST = config_sha256(CONFIG)
SHARDS = [
    rollouts([("=7", 5, FinishReason.STOP), ("=8", 56, FinishReason.STOP)]),
    rollouts([("=7", 5, FinishReason.STOP), ("", 64, FinishReason.LENGTH)]),
]


def prepare(root, shards=SHARDS, *, policy=POLICY, digest=DIGEST):
    write_json(layout.run_file(root), {"config": CONFIG, "config_sha256": DIGEST})
    for number, shard in enumerate(shards):
        uri = layout.rollouts(root, 3, number)
        attributes = {"config_sha256": digest, "iteration": 3}
        write_set(uri, shard, parents={"policy": policy}, attributes=attributes)


def reward(root, folder, num_shards=2):
    outputs = {name: PathArtifact(f"{folder}/{name}") for name in ("rewards", "metrics")}
    pin = f"file:///policies/00002#sha256={POLICY}"
    run(root=root, config_sha256=DIGEST, number=1, offset=2, num_shards=num_shards,
        policy_pin=pin, **outputs)  # fmt: skip
    return Ref.from_json(Path(outputs["rewards"].path).read_text()), outputs


def test_rows_follow_the_shards_in_order_and_parents_name_every_shard(file_root, tmp_path):
    prepare(file_root)
    ref, outputs = reward(file_root, tmp_path)
    rewards = read_set(RewardSet, ref.uri, sha256=ref.manifest_sha256)
    assert ref.uri == layout.rewards(file_root, 3)
    assert rewards.reward.tolist() == [1, -1.5, 1, -2]
    assert rewards.keep.all()
    digests = [read_manifest(layout.rollouts(file_root, 3, n)).sha256 for n in (0, 1)]
    parents = read_manifest(ref.uri).parents
    assert parents == {"rollouts-00": digests[0], "rollouts-01": digests[1]}
    assert json.loads(Path(outputs["metrics"].path).read_text())["accuracy_mean"] == 0.5


def test_a_second_run_is_already_done_with_equal_outputs(file_root, tmp_path):
    prepare(file_root)
    first, outputs = reward(file_root, tmp_path)
    metrics = json.loads(Path(outputs["metrics"].path).read_text())
    second, outputs = reward(file_root, tmp_path)
    assert second == first
    assert json.loads(Path(outputs["metrics"].path).read_text()) == metrics
    log = layout.stage_log(file_root, "reward", 3, 0).removeprefix("file://")
    assert json.loads(Path(log).read_text())["already_done"] is True


def test_empty_shards_of_a_stopped_iteration_give_an_empty_set(file_root, tmp_path):
    prepare(file_root, [RolloutSet.empty(), RolloutSet.empty()])
    ref, _ = reward(file_root, tmp_path)
    assert ref.attributes["num_rows"] == 0


def refused(root, folder, caplog, *, code=1, **options):
    with pytest.raises(SystemExit) as caught:
        reward(root, folder, **options)
    assert caught.value.code == code
    return caplog.text


def test_a_missing_shard_is_named(file_root, tmp_path, caplog):
    prepare(file_root)
    text = refused(file_root, tmp_path, caplog, num_shards=3)
    assert "rollout shard 2 must be complete" in text
    assert layout.rollouts(file_root, 3, 2) in text


def test_a_damaged_shard_is_named(file_root, tmp_path, caplog):
    prepare(file_root)
    uri = layout.rollouts(file_root, 3, 1)
    path = Path(uri.removeprefix("file://")) / read_manifest(uri).shards[0].name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert f"`{uri}/shard-00000.parquet`" in refused(file_root, tmp_path, caplog)


def test_a_shard_of_another_policy_or_configuration_is_refused(file_root, tmp_path, caplog):
    prepare(file_root, policy="cd" * 32)
    assert f"must have policy {POLICY}, got {'cd' * 32}" in refused(file_root, tmp_path, caplog)
    prepare(file_root, digest="0" * 64)
    assert "must have config_sha256" in refused(file_root, tmp_path, caplog)


def test_too_many_verifier_errors_fail_the_stage_and_write_nothing(file_root, tmp_path, caplog):
    prepare(file_root, [rollouts([("=7", 5, FinishReason.STOP)], answer="mystery")])
    # No retry mends it.
    text = refused(file_root, tmp_path, caplog, code=2, num_shards=1)
    assert "max_verifier_error_rate" in text
    assert not Path(layout.rewards(file_root, 3).removeprefix("file://")).exists()


WRONG = rollouts([("=8", 5, FinishReason.STOP), ("=9", 5, FinishReason.STOP)])


def test_an_iteration_that_teaches_nothing_is_told_and_the_third_in_a_row_ends_the_run(
    file_root, tmp_path, caplog
):
    prepare(file_root, [WRONG, WRONG])
    ref, outputs = reward(file_root, tmp_path)
    metrics = json.loads(Path(outputs["metrics"].path).read_text())
    assert metrics["iterations_without_signal"] == 1
    assert (metrics["num_groups_wrong"], metrics["num_groups_right"]) == (2, 0)
    told = nothing_learnt(metrics)
    assert told.startswith("Nothing was learnt: all 2 groups wrong; try easier problems")
    assert told in caplog.text
    console = Console(file=io.StringIO(), width=500)
    console.print(*run_tables(file_root))
    assert told[:200] in console.file.getvalue()
    # two iterations before it were the same
    uri = layout.rewards(file_root, 2)
    attributes = {"metrics": {"iterations_without_signal": 2.0}}
    rewards = read_set(RewardSet, ref.uri)
    write_set(uri, rewards, parents={}, attributes=attributes)
    store.delete(f"{ref.uri}/manifest.json")
    for _ in range(2):  # the second time the scores are there already
        with pytest.raises(SystemExit) as caught:
            reward(file_root, tmp_path)
        assert caught.value.code == 2
    assert "So it went in 3 iterations in a row" in caplog.text
    assert "`rollout.max_iterations_without_signal` = 3 ends the run" in caplog.text


def shard_metrics(**counts):
    return {"num_generated_groups": 10.0, **counts}


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ([{"ds/all_wrong_frac": 1.0}], (10, 0)),
        ([{"ds/all_wrong_frac": 0.6, "ds/all_correct_frac": 0.4}], (6, 4)),
        ([{"ds/all_wrong_frac": 1.0, "group_dropped_incomplete": 3.0}] * 2, (14, 0)),
    ],
)
def test_groups_that_sampling_has_dropped_count_as_well(metrics, expected):
    empty = RolloutSet.empty()
    none = score(empty, RewardConfig()).rewards
    found = groups_without_signal(empty, none, [shard_metrics(**m) for m in metrics])
    assert (found["num_groups_wrong"], found["num_groups_right"]) == expected
    told = nothing_learnt({**found, "iterations_without_signal": 1})
    assert ("all right" in told) == (expected[1] > 0)


def test_scores_that_differ_between_wrong_responses_are_a_signal(monkeypatch):
    parts = iter([0.25, 0.5])
    monkeypatch.setattr(
        "planish.stages.reward.score.verify_many",
        lambda rows, _: [Verdict(accuracy=0.0, score=next(parts)) for _ in rows],
    )
    assert groups_without_signal(WRONG, score(WRONG, RewardConfig()).rewards, []) == {}


def test_a_signal_is_one_group_whose_rewards_differ_and_an_empty_iteration_is_none():
    shards = RolloutSet.concat(SHARDS)
    assert groups_without_signal(shards, score(shards, RewardConfig()).rewards, []) == {}
    empty = RolloutSet.empty()
    assert groups_without_signal(empty, score(empty, RewardConfig()).rewards, [{}]) == {}
