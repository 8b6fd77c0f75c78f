"""Facts of a run: from whole, damaged and missing files to plain values."""

import hashlib
import json

import pytest

from planish import store
from planish.base.errors import StoreUnavailable
from planish.records import layout
from planish.run.events import record_event
from planish.stages.report.events import ALERTS, ATTEMPTS, COMMITS, CORDONS, GANGS
from planish.stages.report.facts import ReportFacts, TaskLog
from planish.stages.report.gather import gather
from planish.stages.report.page import build_page
from planish.stages.report.reader import Reader
from planish.stages.report.render import render_html, render_markdown
from planish.store.documents import read_json, write_json
from tests.unit.stages.report.synthetic_run import BEGAN, Clock, disturb, write_alert


def page_of(facts):
    return build_page(facts, failed_task="", error_message="")


def test_a_healthy_run_is_read_completely(healthy_root):
    facts = gather(healthy_root, "SUCCEEDED")
    assert facts == gather(healthy_root, "SUCCEEDED")
    assert facts.missing == []
    assert facts.iterations == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(facts.tasks) == 3 + 8 * 5 + 1
    assert [*facts.evaluations] == [0, 8]
    assert [*facts.policies] == list(range(9))
    assert [*facts.states] == [16 * i for i in range(1, 9)]
    scores = [(scalars["accuracy"], scalars["greedy"]) for scalars in (facts.before, facts.after)]
    assert scores == [(0.2784, 0.336), (0.4831, 0.5025)]
    assert facts.rise_error == 0.0052
    assert facts.num_tokens == 8 * (22500 + 22800)
    assert facts.stage_seconds["sft"] == 31.0
    assert facts.stage_seconds["checkpoint"] == pytest.approx(8 * 0.3)
    assert facts.is_success
    assert facts.failed == []
    # The largest gradient comes from the mini-batches, a pin from the bytes of the manifest.
    assert facts.updates[1]["grad_norm_max"] > facts.updates[1]["grad_norm"]
    last = facts.policies[8]
    digest = hashlib.sha256(store.read(f"{last.uri}/manifest.json")).hexdigest()
    assert last.pin() == f"{layout.policy(healthy_root, 8)}#sha256={digest}"


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
    assert facts.series("update/a", "rollout/a") == {1: pytest.approx(0.3), 2: 0.5}
    assert facts.series("rollout/a", combine=max) == {1: 0.6, 2: 0.5}


@pytest.mark.parametrize("root", ["", "nonsense", "file://relative", "file:///a/../b", "s3://"])
def test_a_root_that_can_not_be_is_told_not_raised(root):
    facts = gather(root)
    assert len(facts.missing) >= 5
    assert facts.tasks == []


def test_a_root_that_does_not_exist_gives_a_list_of_what_is_missing(tmp_path):
    assert {
        "the configuration (run.json): not written",
        "stage logs: no stage has begun",
        "updates: no iteration has trained",
        "evaluation: no policy has been evaluated",
    } <= set(gather(f"file://{tmp_path}/nothing").missing)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"schema": "update/9"}', b"[" * 100_000, b"null"],
)
def test_damaged_files_are_named_and_the_rest_is_read(short_root, data):
    disturb(short_root)
    for uri in (
        layout.run_file(short_root),
        layout.update(short_root, 1),
        layout.stage_log(short_root, "train", 1, 0),
        f"{layout.evaluation(short_root, 0)}/report.json",
        f"{layout.policy(short_root, 1)}/manifest.json",
        f"{layout.rewards(short_root, 2)}/manifest.json",
        f"{layout.prompts(short_root)}/manifest.json",
        f"{layout.alerts(short_root)}/a.json",
        layout.event(short_root, "d"),
    ):
        store.write(uri, data)
    facts = gather(short_root)
    assert facts.iterations == [2]
    assert [*facts.policies] == [0, 2]
    assert [*facts.evaluations] == [2]
    for what in (
        *("the configuration", "update of iteration 1", "evaluation of policy 0", "policy 1"),
        *("sample rollouts of iteration 2", "the training prompts"),
    ):
        assert any(line.startswith(what) for line in facts.missing), what
    assert render_html(page_of(facts))


def test_numbers_that_are_not_finite_are_left_out(short_root):
    uri = layout.stage_log(short_root, "reward", 1, 0)
    entry = {**read_json(uri), "metrics": {"good": 1.0, "bad": float("nan")}}
    store.write(uri, json.dumps(entry).encode())
    (task,) = (t for t in gather(short_root).tasks if (t.stage, t.iteration) == ("reward", 1))
    assert task.metrics == {"good": 1.0}


def test_alerts_of_the_run_are_kept_and_older_ones_are_not(short_root):
    write_alert(short_root, "old", machine="old", first_second=BEGAN - 500, last_second=BEGAN - 440)
    write_alert(short_root, "new", machine="new", score=3.5)
    assert [(a.machine, a.score) for a in gather(short_root).alerts] == [("new", 3.5)]


def test_an_alert_tells_what_the_run_did_on_the_machine_and_whether_it_is_over(short_root):
    action = "evict done: cordon node-7 and evict train-3"
    write_alert(short_root, "one", machine="node-7", action=action, iteration=7)
    whole = {"machine": "", "metric": "", "kind": "job_wide", "machines": ["a", "b", "c"]}
    write_alert(short_root, "all", **whole, state="resolved", stage="", first_second=BEGAN + 30)
    one, everything = gather(short_root).alerts
    assert (one.machine, one.what, one.where) == (
        "node-7",
        "gpu_duty_cycle",
        "train of iteration 7",
    )
    assert (one.is_over, one.action) == (False, action)
    assert (everything.machine, everything.what, everything.where) == ("3 machines", "job_wide", "")
    assert everything.is_over
    html = render_html(page_of(gather(short_root)))
    assert f"not over</td><td>{action}" in html
    assert "UTC</td><td>none" in html


def test_a_stopped_iteration_and_the_log_of_the_report_itself_are_no_faults(short_root):
    write_json(layout.stopped_file(short_root, 3), {"reason": "stop file"})
    Clock(short_root).log("report", 1.0, state="failed")
    facts = gather(short_root)
    assert facts.is_stopped
    assert (facts.missing, facts.failed) == ([], [])


def test_a_store_that_is_down_is_asked_once_and_an_unforeseen_fault_is_told(caplog):
    calls = []

    def read():
        calls.append(1)
        raise StoreUnavailable("no answer from the object store after 5 tries")

    reader = Reader("file:///r")
    assert reader.attempt("the config", lambda: int("x"), 7) == 7
    assert "unreadable what=the config" in caplog.text
    assert [reader.attempt("a", read, 7) for _ in range(20)] == [7] * 20
    assert len(calls) == 1
    assert reader.missing == [
        "the config: ValueError: invalid literal for int() with base 10: 'x'",
        "everything under the run root: no answer from the object store after 5 tries",
    ]


def test_samples_show_prompts_before_and_after_and_right_and_wrong_responses(healthy_root):
    learned, *others = gather(healthy_root).comparisons
    assert learned.title == "Held-out prompt. Learned: wrong before, right after"
    (_, before), (_, after) = learned.columns
    assert {s.prompt_id for s in before} == {s.prompt_id for s in after}
    assert (before[0].is_correct, after[0].is_correct) == (False, True)
    assert after[0].extracted == after[0].answer
    assert after[0].prompt.endswith("=")
    training = [c for c in others if "raining prompt" in c.title]
    assert training
    for comparison in training:
        samples = [s for _, column in comparison.columns for s in column]
        assert {s.is_correct for s in samples} == {True, False}


def test_an_undisturbed_run_tells_nothing_though_it_has_gangs(short_root):
    record_event(short_root, "gang", 1, begin_seconds=BEGAN, end_seconds=BEGAN + 5, end="complete")
    facts = gather(short_root)
    assert facts.events == []
    page = page_of(facts)
    assert page["recovery"] == []
    assert "Faults and recovery" not in render_html(page) + render_markdown(page)


def test_a_fault_is_told_from_the_alert_to_the_commit_that_was_gone_on_from(short_root):
    record_event(short_root, "gang", 1, begin_seconds=BEGAN, end_seconds=BEGAN + 5, end="complete")
    begin = disturb(short_root)
    facts = gather(short_root)
    assert [(event.row, event.begin_seconds - begin, event.is_bad) for event in facts.events] == [
        (ATTEMPTS, -60, True),
        (GANGS, -58, True),
        (ALERTS, -50, True),
        (CORDONS, -35, False),
        (ATTEMPTS, 0, False),
        (GANGS, 1, False),
        (COMMITS, 9, False),
    ]
    texts = [event.text for event in facts.events]
    assert texts[0] == "train of iteration 2: ended with 75 after 40 s: got 75 from `pod-3`"
    assert texts[1].startswith("gang of 4 pods, megatron tp 2, pp 1, dp 2: every pod must end")
    assert texts[3] == "machine-3: evict done: cordon machine-3 and evict pod-3"
    assert texts[6] == "training went on from step 12 of 80, megatron tp 1, pp 1, dp 3"
    assert facts.alerts[0].action == "evict done: cordon machine-3 and evict pod-3"
    page = page_of(facts)
    (chart,) = page["recovery"]
    for text in (chart.svg, render_html(page), render_markdown(page)):
        assert "training went on from step 12 of 80" in text
    assert all(f">{row}<" in chart.svg for row in (ATTEMPTS, GANGS, COMMITS, ALERTS, CORDONS))
