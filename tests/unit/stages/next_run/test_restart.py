"""A run that failed beside a faulty machine is started again, once, and not for ever."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planish import store
from planish.records import layout
from planish.run.avoid import AvoidedNode, avoid
from planish.run.kubeflow import restart_name
from planish.run.lock import Holder, acquire, current_holder
from planish.run.stage import PathArtifact
from planish.stages.next_run.restart import restart
from planish.stages.report.stage import run
from planish.store.documents import read_json, write_json
from tests.unit.stages.next_run.test_next_run import FACTS, SPEC, FakeRuns
from tests.unit.submit.kfp_server import Server


@pytest.fixture
def named(file_root, monkeypatch):
    """A root on which `node-3` was named in run `run-a`, which this process is the end of."""
    monkeypatch.setenv("RUN_ID", "run-a")
    avoid(file_root, AvoidedNode("node-3", "monitor_check", "run-a", 4))
    return file_root


def ask(root, runs, state="FAILED", max_restarts=2):
    return restart(root, state, max_restarts, lambda: runs)


def test_the_same_run_is_submitted_with_a_name_made_of_root_and_counter(named):
    runs = FakeRuns()
    found = ask(named, runs)
    name = restart_name(named, 1)
    assert found == f"restarted as run id-{name}"
    assert runs.created == [(name, FACTS)]
    record = read_json(layout.restart_file(named, 1))
    assert record == {"after": "run-a", "nodes": ["node-3"]}


def test_a_second_attempt_of_the_exit_task_adds_nothing(named):
    runs = FakeRuns()
    first, again = ask(named, runs), ask(named, runs)
    assert again == first.replace("restarted", "restarted before")
    assert len(runs.created) == 1
    assert len(store.list_uris(layout.restarts(named))) == 1


def test_an_attempt_that_died_before_it_submitted_is_made_up_for(named):
    write_json(layout.restart_file(named, 1), {"after": "run-a", "nodes": ["node-3"]})
    runs = FakeRuns()
    assert ask(named, runs).startswith("restarted as run")
    assert [name for name, _ in runs.created] == [restart_name(named, 1)]


def test_restarts_are_counted_over_the_runs_of_a_root(named, monkeypatch):
    runs = FakeRuns()
    for number, run_id in enumerate(("run-a", "run-b", "run-c"), start=1):
        monkeypatch.setenv("RUN_ID", run_id)
        avoid(named, AvoidedNode(f"node-{10 + number}", "monitor_check", run_id))
        found = ask(named, runs)
    assert found == "not restarted: 2 restarts are spent"
    assert [name for name, _ in runs.created] == [restart_name(named, n) for n in (1, 2)]


@pytest.mark.parametrize(
    "changes",
    [{"max_restarts": 0}, {"state": "SUCCEEDED"}, {"state": "CANCELLED"}],
)
def test_restarts_are_off_unless_asked_for_and_follow_failures_only(named, changes):
    runs = FakeRuns()
    assert ask(named, runs, **changes) == ""
    assert runs.created == []


def other_run(root, monkeypatch):
    monkeypatch.setenv("RUN_ID", "run-b")


def no_cluster(root, monkeypatch):
    monkeypatch.delenv("RUN_ID")


def stop_file(root, monkeypatch):
    store.write(layout.stop_file(root), b"{}")


def wrong_configuration(root, monkeypatch):
    write_json(layout.failed_file(root, "train", 4, 0), {"run_id": "run-a", "error": "x"})


def older_failure(root, monkeypatch):
    write_json(layout.failed_file(root, "train", 4, 0), {"run_id": "run-0", "error": "x"})


@pytest.mark.parametrize(
    ("change", "decision"),
    [
        (other_run, "not restarted: no machine was named in this run"),
        (no_cluster, "not restarted: not in a cluster"),
        (stop_file, "not restarted: stop file"),
        (wrong_configuration, "not restarted: a task failed for a reason that stays"),
        (older_failure, "restarted as run"),
    ],
)
def test_what_no_other_machine_mends_is_not_restarted(named, monkeypatch, change, decision):
    change(named, monkeypatch)
    assert ask(named, FakeRuns()).startswith(decision)


def test_a_run_that_a_person_ended_stays_ended(named):
    runs = FakeRuns(replace(FACTS, state="CANCELING"))
    assert ask(named, runs) == "not restarted: a person ended the run"
    assert runs.created == []
    assert store.list_uris(layout.restarts(named)) == []


def test_the_lock_is_free_for_the_restart_although_the_exit_task_still_works(named):
    acquire(named, current_holder())
    ask(named, FakeRuns())
    taken = acquire(named, Holder("cluster", run_id="run-b"), alive=lambda _: True)
    assert taken.generation == 2


def report(root, tmp_path, **changes):
    artifacts = {n: PathArtifact(str(tmp_path / "out" / n)) for n in ("report", "summary")}
    given = {"state": "FAILED", "max_restarts": 1, **changes}
    run(
        *(root, given["state"], "post-train", "x", given["max_restarts"]),
        **artifacts,
    )
    return [Path(artifact.path).read_text() for artifact in artifacts.values()]


@pytest.fixture
def server(monkeypatch):
    found = Server()
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", found.url)
    yield found
    found.close()


def test_the_report_submits_through_the_real_client_and_shows_it(
    server, file_root, tmp_path, monkeypatch
):
    present = server.add_run(
        display_name="by hand",
        experiment_id="e1",
        service_account="planish-runner",
        pipeline_spec=SPEC,
        runtime_config={"parameters": {"root": file_root, "chain": '{"index": -1}'}},
    )
    monkeypatch.setenv("RUN_ID", present["run_id"])
    avoid(file_root, AvoidedNode("node-3", "monitor_check", present["run_id"], 4, 1.76e9))
    html, markdown = report(file_root, tmp_path)
    (body,) = server.posted("runs")
    assert body["display_name"] == restart_name(file_root, 1)
    assert body["pipeline_spec"] == SPEC
    assert body["service_account"] == "planish-runner"
    assert body["runtime_config"]["parameters"] == {"root": file_root, "chain": '{"index": -1}'}
    facts = f"iteration 4 | {present['run_id']} | 2025-10-09 08:53:20 UTC |"
    assert f"| node-3 | `monitor_check` | {facts}" in markdown
    created = next(i for i in server.objects["runs"] if i != present["run_id"])
    assert f"This run was restarted as run {created}." in markdown
    assert f"This run was restarted as run {created}." in html
    assert "<td>node-3</td>" in html
    html, markdown = report(file_root, tmp_path)
    assert f"restarted before as run {created}" in markdown
    assert len(server.posted("runs")) == 1


def test_the_report_of_a_run_that_a_person_ended_says_so(server, file_root, tmp_path, monkeypatch):
    run = server.add_run(display_name="x", state="CANCELING", runtime_config={"parameters": {}})
    monkeypatch.setenv("RUN_ID", run["run_id"])
    for text in report(file_root, tmp_path, max_restarts=0):
        assert "Ended by a person" in text
        assert "The run was ended by a person in stage" in text
        assert "The run failed" not in text
    run["state"] = "FAILED"
    for text in report(file_root, tmp_path, max_restarts=0):
        assert "The run failed in stage" in text
    assert server.posted("runs") == []


def test_a_server_that_is_away_does_not_keep_the_report(named, tmp_path, monkeypatch, closed_port):
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", f"http://127.0.0.1:{closed_port}")
    _, markdown = report(named, tmp_path)
    assert "This run was not restarted: " in markdown
    assert "## Faulty machines" in markdown


def test_without_machines_the_report_says_nothing_of_them(file_root, tmp_path):
    html, markdown = report(file_root, tmp_path, max_restarts=0)
    assert "Faulty machines" not in html + markdown


def test_the_summary_of_a_named_machine_is_there_where_restarts_are_off(named, tmp_path):
    _, markdown = report(named, tmp_path, max_restarts=0)
    assert "| node-3 | `monitor_check` |" in markdown
    assert "This run was" not in markdown
    assert json.loads(store.read(layout.avoided_node(named, "node-3")))
