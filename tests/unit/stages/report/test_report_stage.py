"""The report stage: artifacts, copies under the root, the webhook, and roots of other runs."""

import hashlib
import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from planish import store
from planish.base.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_TRANSIENT, StoreUnavailable
from planish.records import layout
from planish.run.events import record_event
from planish.run.lock import Holder, acquire, hand_over
from planish.run.stage import PathArtifact, stage_main
from planish.stages.report.events import ALERTS, ATTEMPTS, CORDONS, GANGS
from planish.stages.report.facts import ReportFacts, TaskLog
from planish.stages.report.gather import gather
from planish.stages.report.page import build_page
from planish.stages.report.reader import Reader
from planish.stages.report.render import render_html, render_markdown
from planish.stages.report.stage import add_control, run, write_running
from planish.stages.report.webhook import post
from planish.store.documents import read_json, write_json
from tests.servers.scripted_http import Reply, ScriptedServer
from tests.unit.stages.prepare.test_prepare_stage import run_stage
from tests.unit.stages.report.synthetic_run import BEGAN, Clock, disturb, write_alert

FIRST, SECOND = Holder("cluster", run_id="first"), Holder("cluster", run_id="second")


@pytest.fixture
def artifacts(tmp_path):
    names = ("report", "summary")
    return {name: PathArtifact(str(tmp_path / "out" / name)) for name in names}


def report(root, artifacts, *, state="SUCCEEDED", failed_task="", error_message=""):
    run(
        root=root, state=state, failed_task=failed_task, error_message=error_message,
        max_restarts=0, **artifacts,
    )  # fmt: skip
    return {name: Path(artifact.path).read_text() for name, artifact in artifacts.items()}


def test_the_page_of_a_running_run_reloads_itself_until_the_run_has_ended(short_root, artifacts):
    entry = {"stage": "train", "iteration": 3, "shard": 0, "state": "running"}
    write_json(
        layout.stage_log(short_root, "train", 3, 0), {**entry, "start_seconds": 1.0, "seconds": 2.0}
    )
    folder = layout.report(short_root)
    write_running(short_root, 3)
    page = store.read(f"{folder}/report.html").decode()
    assert '<meta http-equiv="refresh" content="20">' in page
    assert "Running</span>" in page
    assert 'id="samples"' in page
    # A task that works is no failure, and what is not there yet is not missing.
    assert 'id="failure"' not in page
    assert 'id="missing"' not in page
    assert not store.exists(f"{folder}/summary.json")
    report(short_root, artifacts)
    assert "refresh" not in store.read(f"{folder}/report.html").decode()


def test_a_long_run_is_drawn_after_ever_fewer_iterations(short_root):
    drawn = []
    for iteration in (*range(1, 42), 1000, 1001):
        uri = f"{layout.report(short_root)}/report.html"
        write_running(short_root, iteration)
        if store.exists(uri):
            drawn.append(iteration)
            store.delete(uri)
    assert drawn == [*range(1, 41), 1000]


def test_artifacts_and_the_copy_in_the_root_are_the_same(short_root, artifacts, tmp_path):
    written = report(short_root, artifacts)
    folder = layout.report(short_root)
    assert store.read(f"{folder}/report.html").decode() == written["report"]
    assert store.read(f"{folder}/report.md").decode() == written["summary"]
    assert artifacts["report"].metadata["accuracy_after"] == 0.4831
    wanted = {
        "accuracy_before": 0.2784, "accuracy_after": 0.4831, "greedy_before": 0.336,
        "greedy_after": 0.5025, "iterations": 2, "state": "SUCCEEDED",
    }  # fmt: skip
    summary = read_json(f"{folder}/summary.json")
    assert {name: summary[name] for name in wanted} == wanted
    assert summary["seconds_by_stage"]["sft"] == 31.0
    target = tmp_path / "again.html"
    code = stage_main(
        run,
        ["--root", short_root, "--state", "SUCCEEDED", "--failed-task", "", "--error-message", "",
         "--max-restarts", "0", "--report", str(target), "--summary", str(tmp_path / "s.md")],
    )  # fmt: skip
    assert code == 0
    assert target.read_text() == written["report"]


def test_what_supervised_training_gave_instead_is_drawn_into_the_report(short_root, artifacts):
    assert "supervised instead" not in report(short_root, artifacts)["report"]
    add_control(short_root, "SUCCEEDED", {"accuracy": 0.357, "greedy": 0.738, "seconds": 60.0})
    folder = layout.report(short_root)
    page = store.read(f"{folder}/report.html").decode()
    assert "supervised instead" in page
    assert "35.7 %" in page
    assert read_json(f"{folder}/summary.json")["control"]["greedy"] == 0.738


def test_a_root_without_anything_still_gives_a_report(tmp_path, artifacts):
    written = report(
        f"file://{tmp_path}/none", artifacts, state="FAILED", failed_task="post-train",
        error_message="prepare said no",
    )  # fmt: skip
    assert "prepare said no" in written["report"]
    for missing in (
        "the configuration (run.json): not written",
        "stage logs: no stage has begun",
        "updates: no iteration has trained",
        "evaluation: no policy has been evaluated",
    ):
        assert missing in written["summary"]
    assert artifacts["report"].metadata["iterations"] == 0.0


def failed(root, artifacts):
    """Report on a root that can not be written; returns the exit code and the page."""
    with pytest.raises(SystemExit) as ended:
        report(root, artifacts, state="FAILED")
    return ended.value.code, Path(artifacts["report"].path).read_text()


def test_a_root_that_can_not_be_still_gives_a_report(artifacts):
    code, page = failed("file:///a/../b", artifacts)
    assert code == EXIT_CONFIG
    assert "What this report could not read" in page


def test_a_store_that_is_down_at_the_end_fails_the_stage_as_transient(artifacts, monkeypatch):
    settings = {"ENDPOINT": "127.0.0.1:1", "ACCESS_KEY": "key", "SECRET_KEY": "secret"}
    for name, value in {**settings, "RETRY_SECONDS": "0"}.items():
        monkeypatch.setenv(f"MINIO_{name}", value)
    code, page = failed("s3://bucket/run", artifacts)
    assert code == EXIT_TRANSIENT
    assert "everything under the run root" in page


def test_a_page_that_can_not_be_stored_fails_the_stage(short_root, artifacts):
    store.write(layout.report(short_root), b"a file where the folder goes")
    code, page = failed(short_root, artifacts)
    assert code == EXIT_FAILED
    assert "<svg" in page


def files(root):
    folder = Path(root.removeprefix("file://"))
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("run_id", "overrides"), [("second", ""), ("second", "rollout.no_such_key=1"), (None, "")]
)
def test_a_run_that_is_refused_writes_nothing_under_a_root_in_use(
    short_root, artifacts, tmp_path, monkeypatch, run_id, overrides
):
    acquire(short_root, FIRST)
    monkeypatch.setenv("RUN_ID", "first")
    report(short_root, artifacts)
    before = files(short_root)
    monkeypatch.delenv("RUN_ID")
    if run_id:
        monkeypatch.setenv("RUN_ID", run_id)
    with pytest.raises(SystemExit) as prepared:
        run_stage(tmp_path / "prepare", short_root, overrides=overrides)
    with pytest.raises(SystemExit) as reported:
        report(short_root, artifacts, state="FAILED")
    assert (prepared.value.code, reported.value.code) == (2, 2)
    assert files(short_root) == before


def test_a_run_that_has_handed_its_root_over_still_reports(short_root, artifacts, monkeypatch):
    acquire(short_root, FIRST)
    hand_over(short_root, FIRST)
    acquire(short_root, SECOND)
    monkeypatch.setenv("RUN_ID", "first")
    report(short_root, artifacts)
    assert store.exists(f"{layout.report(short_root)}/report.html")


def test_by_hand_a_run_that_has_ended_is_reported_on(short_root, artifacts):
    acquire(short_root, FIRST, now=1000.0)
    report(short_root, artifacts)
    assert store.exists(f"{layout.report(short_root)}/report.html")


@contextmanager
def server(status, **headers):
    found = ScriptedServer(lambda request: Reply(status, headers=headers))
    try:
        yield f"{found.url}/hook", found.requests
    finally:
        found.close()


def test_the_webhook_of_the_secret_gets_the_summary_and_its_address_shows_nowhere(
    short_root, artifacts, monkeypatch, caplog
):
    caplog.set_level("INFO")
    with server(200) as (url, seen):
        monkeypatch.setenv("PLANISH_WEBHOOK", f"{url}?token=s3cret")
        written = report(short_root, artifacts)
    (sent,) = seen
    assert (sent.path, sent.headers["Content-Type"]) == ("/hook?token=s3cret", "application/json")
    assert sent.json["accuracy_after"] == 0.4831
    assert "webhook sent" in caplog.text
    logs = Path(layout.logs(short_root).removeprefix("file://"))
    stored = [path.read_text() for path in (*logs.iterdir(), *logs.with_name("report").iterdir())]
    assert "s3cret" not in "".join([caplog.text, *written.values(), *stored])


def test_a_webhook_that_fails_does_not_fail_the_stage(short_root, artifacts, monkeypatch):
    monkeypatch.setenv("PLANISH_WEBHOOK", "http://127.0.0.1:1/x")
    assert "<svg" in report(short_root, artifacts)["report"]


@pytest.mark.parametrize("status", [404, 500])
def test_a_refusal_is_a_warning(status, caplog):
    with server(status) as (url, seen):
        assert not post(url, {})
    assert len(seen) == 1
    assert "webhook not sent error=HTTPError" in caplog.text


def test_a_redirect_is_not_followed():
    with server(200) as (goal, reached), server(307, Location=goal) as (url, seen):
        assert not post(url, {})
    assert (len(seen), len(reached)) == (1, 0)


@pytest.mark.parametrize(
    "url",
    [
        *("file:///s3cret", "ftp://s3cret/x", "http://", "http://[s3cret", "no url", "https:///x"),
        *("s3cret:token", "http://127.0.0.1:1/s3cret"),
    ],
)
def test_other_addresses_are_refused_and_no_part_of_them_is_logged(url, caplog):
    assert not post(url, {})
    assert "webhook not sent" in caplog.text
    assert "s3cret" not in caplog.text


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


def test_a_fault_is_told_from_the_alert_to_the_gang_that_came_after(short_root):
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
    ]
    texts = [event.text for event in facts.events]
    assert texts[0] == "train of iteration 2: ended with 75 after 40 s: got 75 from `pod-3`"
    assert texts[1].startswith("gang of 4 pods, megatron tp 2, pp 1, dp 2: every pod must end")
    assert texts[3] == "machine-3: evict done: cordon machine-3 and evict pod-3"
    assert facts.alerts[0].action == "evict done: cordon machine-3 and evict pod-3"
    page = page_of(facts)
    (chart,) = page["recovery"]
    for text in (chart.svg, render_html(page), render_markdown(page)):
        assert "machine-3: evict done: cordon machine-3" in text
    assert all(f">{row}<" in chart.svg for row in (ATTEMPTS, GANGS, ALERTS, CORDONS))
