from __future__ import annotations

import hashlib

import pytest

from planish import store
from planish.base.errors import StoreUnavailable
from planish.records import layout
from planish.stages.report.facts import ReportFacts, TaskLog
from planish.stages.report.gather import Reader, gather
from planish.stages.report.page import build_page
from planish.store.documents import read_json
from tests.unit.stages.report.synthetic_run import BEGAN, Clock, write_json


def test_a_healthy_run_is_read_completely(healthy_root):
    facts = gather(healthy_root)
    assert facts.missing == []
    assert facts.name == "arithmetic"
    assert facts.iterations == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(facts.tasks) == 3 + 8 * 5 + 1
    assert [e.version for e in facts.evaluations] == [0, 8]
    assert [p.number for p in facts.policies] == list(range(9))
    assert [s.number for s in facts.states] == [16 * i for i in range(1, 9)]


def test_key_numbers_are_those_of_the_run(healthy_root):
    facts = gather(healthy_root, "SUCCEEDED")
    assert (facts.before.accuracy, facts.after.accuracy) == (0.2784, 0.4831)
    assert (facts.before.greedy, facts.after.greedy) == (0.336, 0.5025)
    assert facts.rise_error == 0.0052
    assert facts.num_tokens == 8 * (22500 + 22800)
    assert facts.stage_seconds["sft"] == 31.0
    assert facts.stage_seconds["checkpoint"] == pytest.approx(8 * 0.3)
    assert facts.is_success
    assert facts.failed == []


def test_the_pin_of_a_policy_is_the_digest_of_its_manifest(healthy_root):
    last = gather(healthy_root).policies[-1]
    data = store.read(f"{last.uri}/manifest.json")
    assert last.pin == f"{layout.policy(healthy_root, 8)}#sha256={hashlib.sha256(data).hexdigest()}"


def test_the_largest_gradient_norm_comes_from_the_minibatches(healthy_root):
    update = gather(healthy_root).updates[1]
    assert update["grad_norm_max"] > update["grad_norm"]


def test_seconds_of_parallel_tasks_count_once():
    tasks = [
        TaskLog("rollout", 1, 0, "done", 10.0, 5.0),
        TaskLog("rollout", 1, 1, "done", 11.0, 6.0),
        TaskLog("reward", 1, 0, "done", 20.0, 1.0),
    ]
    assert ReportFacts("file:///r", tasks=tasks).busy_seconds == 8.0


def test_means_of_shards_are_weighted_by_their_groups():
    facts = ReportFacts("file:///r")
    facts.tasks = [
        TaskLog("rollout", 1, 0, "done", 0, 1, metrics={"a": 0.2, "num_generated_groups": 30.0}),
        TaskLog("rollout", 1, 1, "done", 0, 1, metrics={"a": 0.6, "num_generated_groups": 10.0}),
        TaskLog("rollout", 2, 0, "done", 0, 1, metrics={"a": 0.5, "num_generated_groups": 0.0}),
    ]
    assert facts.per_iteration("rollout", "a") == {1: pytest.approx(0.3), 2: 0.5}
    assert facts.per_iteration("rollout", "a", max) == {1: 0.6, 2: 0.5}


def test_a_root_that_does_not_exist_gives_a_list_of_what_is_missing(tmp_path):
    facts = gather(f"file://{tmp_path}/nothing")
    assert "the configuration (run.json): not written" in facts.missing
    assert "stage logs: no stage has begun" in facts.missing
    assert "updates: no iteration has trained" in facts.missing
    assert "evaluation: no policy has been evaluated" in facts.missing


@pytest.mark.parametrize("root", ["", "nonsense", "file://relative", "file:///a/../b", "s3://"])
def test_a_root_that_can_not_be_is_told_not_raised(root):
    facts = gather(root)
    assert len(facts.missing) >= 5
    assert facts.tasks == []


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"schema": "update/9"}', b"[" * 100_000, b"null"],
)
def test_damaged_files_are_named_and_the_rest_is_read(short_root, data):
    for uri in (
        layout.run_file(short_root),
        layout.update(short_root, 1),
        layout.stage_log(short_root, "train", 1, 0),
        f"{layout.evaluation(short_root, 0)}/report.json",
        f"{layout.policy(short_root, 1)}/manifest.json",
        f"{layout.rewards(short_root, 2)}/manifest.json",
        f"{layout.prompts(short_root)}/manifest.json",
        f"{layout.alerts(short_root)}/a.json",
    ):
        store.write(uri, data)
    facts = gather(short_root)
    assert facts.iterations == [2]
    assert [p.number for p in facts.policies] == [0, 2]
    assert [e.version for e in facts.evaluations] == [2]
    for what in ("update of iteration 1", "evaluation of policy 0", "policy 1", "rollouts of iter"):
        assert any(what in line for line in facts.missing), what


def test_numbers_that_are_none_are_left_out(short_root):
    uri = layout.stage_log(short_root, "reward", 1, 0)
    entry = read_json(uri)
    entry["metrics"] = {"good": 1, "text": "NaN", "flag": True, "none": None, "huge": 10**400}
    entry["start_seconds"] = "soon"
    write_json(uri, entry)
    task = next(t for t in gather(short_root).tasks if t.stage == "reward" and t.iteration == 1)
    assert task.metrics == {"good": 1.0}
    assert task.start_seconds == 0.0


def test_a_hostile_stage_name_is_reduced_to_plain_letters(short_root):
    write_json(
        f"{layout.logs(short_root)}/x.json",
        {"stage": "$\\frac<\x00\u6f22>", "state": "running", "start_seconds": BEGAN + 9},
    )
    assert "??frac????" in {task.stage for task in gather(short_root).tasks}


def test_alerts_of_the_run_are_kept_and_older_ones_are_not(short_root):
    for name, first in (("old", BEGAN - 500), ("new", BEGAN + 20)):
        write_json(
            f"{layout.alerts(short_root)}/{name}.json",
            {"machine": name, "metric": "cpu", "score": 3.5, "first_second": first,
             "last_second": first + 60, "action": "none"},
        )  # fmt: skip
    assert [(a.machine, a.score) for a in gather(short_root).alerts] == [("new", 3.5)]


def test_a_stopped_iteration_is_not_missing(short_root):
    write_json(layout.stopped_file(short_root, 3), {"reason": "stop file"})
    facts = gather(short_root)
    assert facts.is_stopped
    assert facts.missing == []


def test_the_log_of_the_report_itself_is_ignored(short_root):
    Clock(short_root).log("report", 1.0, state="failed")
    assert all(task.stage != "report" for task in gather(short_root).tasks)


def test_a_store_that_is_down_is_asked_once():
    calls = []

    def read():
        calls.append(1)
        raise StoreUnavailable("no answer from the object store after 5 tries")

    reader = Reader("file:///r")
    assert [reader.attempt("a", read, 7) for _ in range(20)] == [7] * 20
    assert len(calls) == 1
    assert reader.missing == [
        "everything under the run root: no answer from the object store after 5 tries"
    ]


def test_an_unforeseen_fault_is_told_not_raised(caplog):
    reader = Reader("file:///r")
    assert reader.attempt("the config", lambda: int("x"), 7) == 7
    assert reader.missing[0].startswith("the config: ValueError: invalid literal")
    assert "unreadable what=the config" in caplog.text


def test_samples_show_the_same_held_out_prompt_before_and_after(healthy_root):
    learned = gather(healthy_root).comparisons[0]
    assert learned.title == "Held-out prompt. Learned: wrong before, right after"
    (_, before), (_, after) = learned.columns
    assert {s.prompt_id for s in before} == {s.prompt_id for s in after}
    assert not before[0].is_correct
    assert after[0].is_correct
    assert after[0].extracted == after[0].answer
    assert after[0].prompt.endswith("=")


def test_samples_show_a_right_and_a_wrong_training_response(healthy_root):
    training = [c for c in gather(healthy_root).comparisons if "raining prompt" in c.title]
    assert training
    for comparison in training:
        samples = [s for _, column in comparison.columns for s in column]
        assert {s.is_correct for s in samples} == {True, False}


def test_gathering_twice_gives_equal_facts(healthy_root):
    assert gather(healthy_root) == gather(healthy_root)


@pytest.mark.slow
def test_an_alert_tells_what_the_run_did_on_the_machine_and_whether_it_is_over(short_root):
    alert = {
        "machine": "node-7",
        "metric": "cpu_usage",
        "kind": "dissimilar",
        "score": 2.5,
        "state": "firing",
        "stage": "train",
        "iteration": 7,
        "first_second": BEGAN + 20,
        "last_second": BEGAN + 300,
        "action": "evict done: cordon node-7 and evict train-3",
    }
    whole = {"machine": "", "metric": "", "kind": "job_wide", "machines": ["a", "b", "c"]}
    whole |= {"state": "resolved", "first_second": BEGAN + 30, "last_second": BEGAN + 90}
    for name, record in (("one", alert), ("all", whole)):
        write_json(f"{layout.alerts(short_root)}/{name}.json", record)
    facts = gather(short_root, "SUCCEEDED")
    one, everything = build_page(facts, failed_task="", error_message="").alerts
    where = "train of iteration 7"
    assert (one["machine"], one["metric"], one["where"]) == ("node-7", "cpu_usage", where)
    assert (one["end"], one["action"]) == ("not over", alert["action"])
    assert (everything["machine"], everything["metric"]) == ("3 machines", "job_wide")
    assert everything["end"] != "not over"
    assert everything["where"] == ""
