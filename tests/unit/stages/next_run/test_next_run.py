"""The following run of a chain: submitted once, and only when it is due."""

import json

import pytest

from planish import store
from planish.base.config import config_sha256
from planish.records import layout
from planish.run.kubeflow import KfpRuns, KubeflowRun, api_url, restart_name, run_name
from planish.run.lock import Holder, acquire
from planish.stages.next_run import stage
from planish.stages.next_run.stage import submit_next
from planish.store.documents import read_json
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
def server():
    found = Server()
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
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
    acquire(file_root, Holder("cluster", run_id=present["run_id"]))
    # What the log keeps is the attempt that did it.
    assert [run_stage(file_root)["submitted"] for _ in range(2)] == [1.0, 1.0]
    assert len(server.posted("runs")) == 1
    # The following run may begin before the exit task of this one has ended.
    following = Holder("cluster", run_id="following")
    assert acquire(file_root, following, alive=lambda _: True).generation == 2


def test_the_stop_file_ends_a_chain(server, file_root, monkeypatch):
    monkeypatch.setenv("RUN_ID", "now")
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
    store.write(layout.stop_file(file_root), b"{}")
    assert run_stage(file_root)["submitted"] == 0.0
    assert server.requests == []
