"""The following run of a chain, and a restart beside a faulty machine: each submitted once."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from planish import store
from planish.base.config import config_sha256
from planish.records import layout
from planish.run.avoid import AvoidedNode, avoid
from planish.run.kube import Kube
from planish.run.kubeflow import KfpRuns, KubeflowRun, api_url, restart_name, run_name
from planish.run.lock import Holder, acquire, current_holder
from planish.run.stage import PathArtifact
from planish.stages.next_run import stage
from planish.stages.next_run.restart import restart
from planish.stages.next_run.stage import submit_next
from planish.stages.report.stage import run
from planish.store.documents import read_json, write_json
from tests.unit.submit.kfp_server import Server

SPEC = {"pipeline_spec": {"pipelineInfo": {"name": "post-train"}}}


FACTS = KubeflowRun("exp", {"root": "s3://b/r", "seed": 1}, "account", "", {"x": "y"}, "RUNNING")


class FakeRuns:
    """Meets `Runs`."""

    def __init__(self, facts=FACTS):
        self.told = facts
        self.created = []

    def facts(self, run_id):
        return self.told

    def find(self, name, experiment_id):
        assert experiment_id == "exp"
        return next((f"id-{name}" for known, _ in self.created if known == name), "")

    def create(self, name, facts):
        self.created.append((name, facts))
        return f"id-{name}"


@pytest.fixture
def ask(file_root, monkeypatch):
    """Submits the run after the one of a place, as its last task does."""

    def ask(runs, *, run_id="now", chain_index=0, max_runs=3):
        monkeypatch.setenv("RUN_ID", run_id)
        return submit_next(file_root, chain_index, max_runs, lambda: runs)

    return ask


def test_the_following_run_has_the_same_parameters_and_the_next_place(ask, file_root):
    runs = FakeRuns()
    assert [ask(runs, chain_index=1) for _ in range(2)] == ["submitted", "exists"]
    ((name, facts),) = runs.created
    assert name == run_name(file_root, 2)
    assert facts.parameters == {"root": "s3://b/r", "seed": 1, "chain": '{"index": 2}'}
    assert (facts.service_account, facts.pipeline) == ("account", {"x": "y"})


@pytest.mark.parametrize(
    ("changes", "decision"),
    [
        ({"max_runs": 1}, "last run"),
        ({"chain_index": 2}, "last run"),
        ({"run_id": ""}, "not in a cluster"),
    ],
)
def test_a_chain_that_has_ended_submits_nothing(ask, changes, decision):
    runs = FakeRuns()
    assert ask(runs, **changes) == decision
    assert runs.created == []


def test_names_tell_roots_and_places_apart():
    names = {run_name(root, index) for root in ("s3://b/r", "s3://b/s") for index in range(3)}
    assert len(names) == 6
    assert run_name("s3://b/r", 7, "dapo-tiny").startswith("r dapo-tiny #7 ")
    assert restart_name("s3://b/r", 7, "dapo-tiny").startswith("r dapo-tiny restart 7 ")


@pytest.fixture
def server(monkeypatch):
    found = Server()
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", found.url)
    yield found
    found.close()


def test_a_run_from_a_file_is_submitted_again_through_the_real_client(server, ask, file_root):
    present = server.add_run(
        display_name="by hand",
        experiment_id="e1",
        service_account="planish-runner",
        pipeline_spec=SPEC,
        runtime_config={"parameters": {"root": "s3://b/r", "chain": '{"runs": 3}'}},
    )
    runs = KfpRuns(server.url)
    for decision in ("submitted", "exists"):
        assert ask(runs, run_id=present["run_id"]) == decision
    (body,) = server.posted("runs")
    assert body["display_name"] == run_name(file_root, 1)
    assert body["experiment_id"] == "e1"
    assert body["service_account"] == "planish-runner"
    assert "s3://b/r/report/report.html" in body["description"]
    assert body["pipeline_spec"] == SPEC
    chain = '{"index": 1, "runs": 3}'
    assert body["runtime_config"]["parameters"] == {"root": "s3://b/r", "chain": chain}


def test_a_run_of_an_uploaded_pipeline_keeps_its_version(server, ask):
    reference = {"pipeline_id": "p", "pipeline_version_id": "v"}
    present = server.add_run(
        display_name="scheduled",
        pipeline_version_reference=reference,
        runtime_config={"parameters": {}, "pipeline_root": "s3://b/kfp"},
    )
    ask(KfpRuns(server.url), run_id=present["run_id"])
    (body,) = server.posted("runs")
    assert body["pipeline_version_reference"] == reference
    assert "pipeline_spec" not in body
    assert body["runtime_config"] == {
        "parameters": {"chain": '{"index": 1}'},
        "pipeline_root": "s3://b/kfp",
    }


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, "http://ml-pipeline.kubeflow.svc.cluster.local:8888"),
        ({"ML_PIPELINE_SERVICE_HOST": "10.0.0.7"}, "http://10.0.0.7:8888"),
        (
            {"ML_PIPELINE_SERVICE_HOST": "10.0.0.7", "KF_PIPELINES_ENDPOINT": "http://kfp:80"},
            "http://kfp:80",
        ),
    ],
)
def test_a_pod_finds_the_api_that_it_belongs_to(environment, url, monkeypatch):
    for name in ("ML_PIPELINE_SERVICE_HOST", "KF_PIPELINES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert api_url() == url


def test_the_token_of_an_installation_for_several_users_is_sent(server, tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("a-token\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(token))
    KfpRuns(server.url).find("x", "e1")
    assert server.headers["authorization"] == "Bearer a-token"


def run_stage(root, **changes):
    config = {"run": {"seed": 0}}
    document = {"config": config, "initial": {"policy": "", "state": ""}}
    store.write(layout.run_file(root), json.dumps(document).encode())
    facts = {"chain_index": 0, "chain": '{"runs": 2}', **changes}
    stage.run(root=root, config_sha256=config_sha256(config), **facts)
    return read_json(layout.stage_log(root, "next", 0, 0))["metrics"]


def test_in_a_cluster_the_stage_submits_once(server, file_root, monkeypatch):
    present = server.add_run(
        display_name="x", pipeline_spec=SPEC, runtime_config={"parameters": {}}
    )
    monkeypatch.setenv("RUN_ID", present["run_id"])
    acquire(file_root, Holder("cluster", run_id=present["run_id"]))
    # What the log keeps is the attempt that did it.
    assert [run_stage(file_root)["submitted"] for _ in range(2)] == [1.0, 1.0]
    assert len(server.posted("runs")) == 1
    # The following run may begin before the exit task of this one has ended.
    following = Holder("cluster", run_id="following")
    assert acquire(file_root, following, alive=lambda _: True).generation == 2


def test_the_stop_file_ends_a_chain(server, file_root, monkeypatch):
    monkeypatch.setenv("RUN_ID", "now")
    store.write(layout.stop_file(file_root), b"{}")
    assert run_stage(file_root)["submitted"] == 0.0
    assert server.requests == []


@pytest.fixture
def named(file_root, monkeypatch):
    """A root on which `node-3` was named in run `run-a`, which this process is the end of."""
    monkeypatch.setenv("RUN_ID", "run-a")
    avoid(file_root, AvoidedNode("node-3", "monitor_check", "run-a", 4))
    return file_root


def ask_restart(root, runs, state="FAILED", max_restarts=2):
    return restart(root, state, max_restarts, lambda: runs)


def test_the_same_run_is_submitted_once_with_a_name_made_of_root_and_counter(named):
    runs = FakeRuns()
    found = ask_restart(named, runs)
    name = restart_name(named, 1)
    assert found == f"restarted as run id-{name}"
    assert runs.created == [(name, FACTS)]
    record = read_json(layout.restart_file(named, 1))
    assert record == {"after": "run-a", "nodes": ["node-3"]}
    # A second attempt of the exit task adds nothing.
    assert ask_restart(named, runs) == found.replace("restarted", "restarted before")
    assert len(runs.created) == len(store.list_uris(layout.restarts(named))) == 1


def test_an_attempt_that_died_before_it_submitted_is_made_up_for(named):
    write_json(layout.restart_file(named, 1), {"after": "run-a", "nodes": ["node-3"]})
    runs = FakeRuns()
    assert ask_restart(named, runs).startswith("restarted as run")
    assert [name for name, _ in runs.created] == [restart_name(named, 1)]


def test_restarts_are_counted_over_the_runs_of_a_root(named, monkeypatch):
    runs = FakeRuns()
    for number, run_id in enumerate(("run-a", "run-b", "run-c"), start=1):
        monkeypatch.setenv("RUN_ID", run_id)
        avoid(named, AvoidedNode(f"node-{10 + number}", "monitor_check", run_id))
        found = ask_restart(named, runs)
    assert found == "not restarted: 2 restarts are spent"
    assert [name for name, _ in runs.created] == [restart_name(named, n) for n in (1, 2)]


@pytest.mark.parametrize(
    "changes", [{"max_restarts": 0}, {"state": "SUCCEEDED"}, {"state": "CANCELLED"}]
)
def test_restarts_are_off_unless_asked_for_and_follow_failures_only(named, changes):
    runs = FakeRuns()
    assert ask_restart(named, runs, **changes) == ""
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
    write_json(layout.failed_file(root, "train", 5, 0), {"of": "another release"})


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
    assert ask_restart(named, FakeRuns()).startswith(decision)


def test_a_run_that_a_person_ended_stays_ended(named):
    runs = FakeRuns(replace(FACTS, state="CANCELING"))
    assert ask_restart(named, runs) == "not restarted: a person ended the run"
    assert runs.created == []
    assert store.list_uris(layout.restarts(named)) == []


@pytest.mark.parametrize(
    ("spec", "state"),
    [
        ({"entrypoint": "e", "activeDeadlineSeconds": 0}, "CANCELED"),
        ({"entrypoint": "e", "shutdown": "Terminate"}, "CANCELED"),
        ({"entrypoint": "e", "shutdown": "Stop"}, "CANCELED"),
        ({"entrypoint": "e", "activeDeadlineSeconds": 86400}, "FAILED"),
        ({"entrypoint": "e"}, "FAILED"),
    ],
)
def test_who_ended_a_run_is_read_from_its_workflow(spec, state, named, server, monkeypatch):
    """Kubeflow's API tells FAILED of a run that a person has terminated."""
    run = server.add_run(display_name="x", state="FAILED", runtime_config={"parameters": {}})
    monkeypatch.setenv("RUN_ID", run["run_id"])
    avoid(named, AvoidedNode("node-4", "monitor_check", run["run_id"]))

    def list_namespaced_custom_object(group, version, namespace, plural, **options):
        assert (group, namespace, plural) == ("argoproj.io", "ns", "workflows")
        is_asked = options.get("label_selector") == f"pipeline/runid={run['run_id']}"
        data = json.dumps({"items": [{"spec": spec}] * is_asked}).encode()
        return SimpleNamespace(data=data, headers={"Content-Type": "application/json"})

    def connect(**options):
        kube = Kube(None, "ns", **options)
        kube.custom = SimpleNamespace(list_namespaced_custom_object=list_namespaced_custom_object)
        return kube

    monkeypatch.setattr("planish.run.kubeflow.in_pod", lambda: True)
    monkeypatch.setattr(Kube, "connect", connect)
    assert KfpRuns().facts(run["run_id"]).state == state
    decision = restart(named, "FAILED", 1)
    assert decision.startswith("restarted" if state == "FAILED" else "not restarted: a person")
    assert len(server.posted("runs")) == (state == "FAILED")


def test_the_lock_is_free_for_the_restart_although_the_exit_task_still_works(named):
    acquire(named, current_holder())
    ask_restart(named, FakeRuns())
    taken = acquire(named, Holder("cluster", run_id="run-b"), alive=lambda _: True)
    assert taken.generation == 2


def report(root, tmp_path, **changes):
    artifacts = {n: PathArtifact(str(tmp_path / "out" / n)) for n in ("report", "summary")}
    given = {"state": "FAILED", "max_restarts": 1, **changes}
    run(*(root, given["state"], "post-train", "x", given["max_restarts"]), **artifacts)
    return [Path(artifact.path).read_text() for artifact in artifacts.values()]


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


def test_the_summary_of_a_named_machine_is_there_where_restarts_are_off(named, tmp_path):
    _, markdown = report(named, tmp_path, max_restarts=0)
    assert "| node-3 | `monitor_check` |" in markdown
    assert "This run was" not in markdown
    assert json.loads(store.read(layout.avoided_node(named, "node-3")))
