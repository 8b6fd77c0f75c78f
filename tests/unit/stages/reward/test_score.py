import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from planish import store
from planish.base.config import config_sha256, parse_section
from planish.base.errors import EXIT_CONFIG, ConfigError, VerifierFailure, exit_code
from planish.records import layout
from planish.records.files import WEIGHTS, write_files
from planish.records.io import read_manifest, read_set, write_set
from planish.records.refs import Ref
from planish.records.rewards import RewardSet, judged_late, nothing_learnt
from planish.records.rollouts import FinishReason, RolloutSet
from planish.run.stage import PathArtifact
from planish.show.run import run_tables
from planish.stages.reward.config import RewardConfig
from planish.stages.reward.score import score
from planish.stages.reward.signal import groups_without_signal
from planish.stages.reward.stage import run
from planish.store.documents import write_json
from planish.verifiers import Verdict
from tests.unit.records import rules
from tests.unit.records.samples import build_rollouts

STOP, LENGTH, WINDOW, ABORT = FinishReason
CONFIG = RewardConfig(max_response_tokens=64, overlong_buffer_tokens=16)
UNIFORM = CONFIG.model_copy(update={"keep_uniform_groups": True})


def rollouts(*groups, verifier="trace", answer="7"):
    """Each group is a list of (response, length in tokens, finish)."""
    flat = [row for rows in groups for row in rows]
    return build_rollouts(
        [[1]] * len(groups),
        [[2] * length for _, length, _ in flat],
        group_index=[group for group, rows in enumerate(groups) for _ in rows],
        finish=[row[2] for row in flat],
        response=[row[0] for row in flat],
        answer=[answer] * len(flat),
        verifier=[verifier] * len(flat),
    )


def test_rewards_worked_by_hand():
    done = score(
        rollouts(
            [("3+4=7", 5, STOP), ("3+4=8", 56, STOP), ("no", 64, LENGTH), ("3+4=7", 64, LENGTH)]
        ),
        CONFIG,
    )
    rewards = done.rewards
    rules.check(rewards)
    assert rewards.accuracy.tolist() == [1, 0, 0, 1]
    assert rewards.outcome.tolist() == [1, -1, -1, 1]
    assert rewards.length_penalty.tolist() == [0, -0.5, -1, -1]
    assert rewards.reward.tolist() == [1, -1.5, -2, 0]
    assert rewards.has_reward.tolist() == [True] * 4
    assert rewards.keep.tolist() == [True] * 4
    assert rewards.rollout_id == [f"{0:016x}-00{sample}" for sample in range(4)]
    assert rewards.extracted == ["7", "8", "", "7"]
    metrics = done.metrics
    assert metrics["accuracy_mean"] == 0.5
    assert metrics["reward_mean"] == -0.625
    assert metrics["num_invalid_rollouts"] == 1
    assert metrics["truncated_fraction"] == 0.5
    assert metrics["response_tokens_mean"] == 47.25
    assert metrics["response_tokens_right_mean"] == 34.5
    assert metrics["num_penalised_rollouts"] == 3


def test_groups_without_contrast_are_dropped_by_accuracy_and_not_by_reward():
    right = [("=7", 5, STOP), ("=7", 60, STOP)]
    wrong = [("=8", 5, STOP), ("=9", 5, STOP)]
    mixed = [("=7", 5, STOP), ("=9", 5, STOP)]
    batch = rollouts(right, wrong, mixed)
    done = score(batch, CONFIG)
    assert done.rewards.keep.tolist() == [False] * 4 + [True] * 2
    assert (done.metrics["num_groups"], done.metrics["num_kept_groups"]) == (3, 1)
    kept = score(batch, UNIFORM)
    assert kept.rewards.keep.all()


def test_a_failed_response_drops_its_group_and_gets_no_reward():
    done = score(
        rollouts([("=7", 5, STOP), ("=8", 5, STOP), ("=7", 1, ABORT)], [("=7", 5, STOP)]),
        UNIFORM,
    )
    assert done.rewards.keep.tolist() == [False] * 3 + [True]
    assert done.rewards.has_reward.tolist() == [True, True, False, True]
    assert done.rewards.reward.tolist() == [1, -1, 0, 1]
    assert done.metrics["num_incomplete_groups"] == 1
    assert done.metrics["num_aborted_rollouts"] == 1


def test_windows_of_a_group_are_kept_with_what_is_finished_of_it():
    batch = rollouts(
        [("=7", 24, WINDOW), ("=8", 24, WINDOW)],
        [("=7", 5, STOP), ("=7", 64, LENGTH), ("=7", 63, WINDOW)],
        [("=8", 5, STOP)],
    )
    done = score(batch, UNIFORM)
    rewards = done.rewards
    rules.check(rewards)
    assert rewards.keep.all()
    assert rewards.has_reward.tolist() == [False, False, True, True, False, True]
    # whatever the text of an unfinished response says, it is not judged
    assert rewards.accuracy.tolist() == [0, 0, 1, 1, 0, 0]
    assert rewards.outcome.tolist() == [0, 0, 1, 1, 0, -1]
    assert rewards.length_penalty.tolist() == [0, 0, 0, -1, 0, 0]
    assert rewards.reward.tolist() == [0, 0, 1, 0, 0, -1]
    assert rewards.extracted == ["", "", "7", "7", "", "8"]
    metrics = done.metrics
    assert (metrics["num_window_rollouts"], metrics["num_scored_rollouts"]) == (3, 3)
    assert metrics["accuracy_mean"] == pytest.approx(2 / 3)
    assert metrics["truncated_fraction"] == pytest.approx(1 / 3)


def test_an_iteration_in_which_nothing_finished_has_counts_only():
    done = score(rollouts([("=7", 24, WINDOW)], [("", 24, WINDOW)]), UNIFORM)
    assert done.rewards.keep.tolist() == [True, True]
    assert done.rewards.reward.tolist() == [0, 0]
    assert done.metrics["num_window_rollouts"] == 2
    assert not {"accuracy_mean", "reward_mean", "truncated_fraction"} & set(done.metrics)


def test_hostile_responses_are_scored():
    texts = ["\ud800=7", "=" * 10**6, "\x00", "9" * 10**6 + "=7", "=\u0667"]
    done = score(rollouts([(t, 5, STOP) for t in texts]), CONFIG)
    assert done.rewards.accuracy.tolist() == [1, 0, 0, 1, 0]
    rules.check(done.rewards)


def test_more_than_one_percent_of_verifier_errors_fails_loudly():
    batch = rollouts(*[[("=7", 5, STOP)] * 2] * 100)
    batch.answer[0] = batch.answer[1] = "mystery"
    assert score(batch, CONFIG).metrics["num_verifier_errors"] == 2
    batch.answer[2] = "mystery"
    with pytest.raises(VerifierFailure) as caught:
        score(batch, CONFIG)
    assert exit_code(caught.value) == EXIT_CONFIG
    for part in ("3 of 200", "mystery", f"{0:016x}-000", "0.01"):
        assert part in str(caught.value)


def test_a_response_that_takes_the_verifier_too_long_is_wrong_and_ends_nothing(monkeypatch, caplog):
    def judge(text, gold, seconds):
        if "hostile" in (gold, text):
            return None
        return 0.0

    monkeypatch.setattr("planish.verifiers.math_answer._asked", judge)
    texts = ["Answer: x", "Answer: hostile", "Answer: x", "Answer: 1/3"]
    batch = rollouts([(text, 1, STOP) for text in texts], verifier="math", answer="x")
    done = score(batch, CONFIG)
    assert done.rewards.accuracy.tolist() == [1, 0, 1, 0]
    assert done.rewards.has_reward.all()
    assert done.metrics["num_verifier_timeouts"] == 1
    assert done.metrics["num_verifier_errors"] == 0
    assert done.metrics["num_wrong_rollouts"] == 2
    assert judged_late(done.metrics) == "1 of 4 responses took the verifier too long: wrong"
    assert judged_late(score(rollouts([("=7", 1, STOP)]), CONFIG).metrics) == ""
    assert "1 of 4 responses counted as wrong: they could not be judged in time" in caplog.text
    # A ground truth that takes as long against anything is to blame itself.
    batch = rollouts([("Answer: x", 1, STOP)], verifier="math", answer="hostile")
    with pytest.raises(VerifierFailure, match="'hostile' takes too long to read"):
        score(batch, CONFIG)


def own_reward(tmp_path, monkeypatch, name, value, *columns):
    parameters = ", ".join(("response", "answer", *columns))
    (tmp_path / f"{name}.py").write_text(f"def reward({parameters}):\n    return {value}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return f"{name}:reward"


def test_a_score_between_0_and_1_lies_between_wrong_and_right(tmp_path, monkeypatch):
    verifier = own_reward(tmp_path, monkeypatch, "partial_reward", "len(response) / 8")
    texts = ("", "xx", "xxxx", "x" * 8)
    batch = rollouts([(text, 1, STOP) for text in texts], verifier=verifier)
    config = CONFIG.model_copy(update={"reward_correct": 2.0, "overlong_penalty_factor": 0.0})
    rewards = score(batch, config).rewards
    rules.check(rewards)
    assert rewards.outcome.tolist() == [-1.0, -0.25, 0.5, 2.0]
    assert rewards.accuracy.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_a_reward_that_is_no_number_fails_the_stage_and_says_why(tmp_path, monkeypatch):
    verifier = own_reward(tmp_path, monkeypatch, "nan_reward", "float('nan')")
    with pytest.raises(VerifierFailure) as failed:
        score(rollouts([("x", 1, STOP)] * 4, verifier=verifier), CONFIG)
    assert "4 of 4 rows (0 timeouts)" in str(failed.value)
    assert "nan_reward:reward must return a number from 0 to 1, got nan" in str(failed.value)


def test_a_verifier_that_is_not_here_is_an_error_of_the_configuration():
    with pytest.raises(ConfigError, match="No module named 'not_here'"):
        score(rollouts([("x", 1, STOP)], verifier="not_here.at_all:reward"), CONFIG)
    with pytest.raises(ConfigError, match="did you mean 'exact'"):
        score(rollouts([("x", 1, STOP)], verifier="exakt"), CONFIG)


def test_functions_add_their_weighted_scores_and_leave_accuracy_to_the_verifier(
    tmp_path, monkeypatch
):
    by_column = own_reward(tmp_path, monkeypatch, "column_reward", "share", "share")
    config = parse_section(
        RewardConfig,
        {
            "max_response_tokens": 64,
            "overlong_buffer_tokens": 16,
            "reward_wrong": 0.0,
            "functions": [{"name": "exact", "weight": -0.5}, {"name": by_column, "weight": 0.25}],
        },
        section="reward",
    )
    batch = rollouts([("=7", 5, STOP), ("7", 5, STOP), ("no", 5, STOP), ("x", 5, WINDOW)])
    extra = [f'{{"share": {share}}}' for share in (1.0, 0.5, 0.0, 1.0)]
    done = score(replace(batch, extra=extra), config)
    rules.check(done.rewards)
    assert done.rewards.accuracy.tolist() == [1, 0, 0, 0]
    assert done.rewards.reward.tolist() == [1.25, -0.375, 0, 0]
    assert [json.loads(scores) for scores in done.rewards.scores] == [
        {"trace": 1, "exact": 0, by_column: 1},
        {"trace": 0, "exact": 1, by_column: 0.5},
        {"trace": 0, "exact": 0, by_column: 0},
        {"trace": 0, "exact": 0, by_column: 0},
    ]
    means = {key[11:]: v for key, v in done.metrics.items() if key.startswith("score_mean/")}
    assert means == {"verifier": 1 / 3, "exact": 1 / 3, by_column: 0.5}
    with pytest.raises(VerifierFailure, match="takes the column `share`"):
        score(batch, config)


def test_groups_whose_scores_differ_are_kept_though_no_response_is_right(tmp_path, monkeypatch):
    verifier = own_reward(tmp_path, monkeypatch, "graded_reward", "len(response) / 4")
    same = [("a", 5, STOP), ("b", 60, STOP)]
    done = score(rollouts(same, [("a", 5, STOP), ("ab", 5, STOP)], verifier=verifier), CONFIG)
    assert done.rewards.keep.tolist() == [False, False, True, True]
    assert done.rewards.scores is None


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"max_response_tokens": 64, "overlong_buffer_tokens": 65}, "got 65 and 64"),
        ({"reward_correct": -1.0}, "must be greater than"),
        ({"functions": [{"name": "exact"}, {"name": "exact"}]}, "must have different names"),
    ],
)
def test_impossible_settings_are_refused(table, words):
    with pytest.raises(ConfigError, match=words):
        parse_section(RewardConfig, table, section="reward")


WEIGHTS_SUM = "00c0ffee"
RUN = {"run": {"seed": 0}, "reward": {"max_response_tokens": 64, "overlong_buffer_tokens": 16}}
DIGEST = config_sha256(RUN)
SHARDS = [
    rollouts([("=7", 5, FinishReason.STOP), ("=8", 56, FinishReason.STOP)]),
    rollouts([("=7", 5, FinishReason.STOP), ("", 64, FinishReason.LENGTH)]),
]


def prepare(root, shards=SHARDS, **changed):
    write_json(layout.run_file(root), {"config": RUN, "config_sha256": DIGEST})
    named = {"policy_version": 2, WEIGHTS: WEIGHTS_SUM}
    write_files(layout.policy(root, 2), "policy/1", {}, parents={}, attributes=named)
    for number, shard in enumerate(shards):
        uri = layout.rollouts(root, 3, number)
        attributes = {"config_sha256": DIGEST, "iteration": 3, **named, **changed}
        write_set(uri, shard, parents={}, attributes=attributes)


def reward(root, folder, num_shards=2):
    outputs = {name: PathArtifact(f"{folder}/{name}") for name in ("rewards", "metrics")}
    policy = layout.policy(root, 2)
    pin = read_manifest(policy).ref(policy).pin()
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


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        (WEIGHTS, "0badf00d", WEIGHTS_SUM),
        ("policy_version", 1, 2),
        ("config_sha256", "0" * 64, DIGEST),
    ],
)
def test_a_shard_of_another_policy_or_configuration_is_refused(
    name, value, wanted, file_root, tmp_path, caplog
):
    prepare(file_root, **{name: value})
    assert f"must have {name} {wanted}, got {value}" in refused(file_root, tmp_path, caplog)


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
        "planish.verifiers.judging.verify_many",
        lambda rows, _: [Verdict(accuracy=0.0, score=next(parts)) for _ in rows],
    )
    assert groups_without_signal(WRONG, score(WRONG, RewardConfig()).rewards, []) == {}


def test_a_signal_is_one_group_whose_rewards_differ_and_an_empty_iteration_is_none():
    shards = RolloutSet.concat(SHARDS)
    assert groups_without_signal(shards, score(shards, RewardConfig()).rewards, []) == {}
    empty = RolloutSet.empty()
    assert groups_without_signal(empty, score(empty, RewardConfig()).rewards, [{}]) == {}
