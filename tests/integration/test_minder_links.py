"""An alert reaches the run: its pods, its workflow, its root and the report of its exit task."""

import json

import pytest

from planish.minder.act.actor import Actor
from planish.minder.act.config import ActConfig
from planish.minder.act.kube import names
from planish.stages.report.gather import gather
from tests.integration.minder_cluster import Fleet, alert, install_workflows, result

pytestmark = pytest.mark.server

NOW = 2_000_000_000


@pytest.fixture(scope="module")
def workflows(control_plane):
    install_workflows(control_plane)


@pytest.fixture
def fleet(control_plane, workflows):
    fleet = Fleet(control_plane)
    fleet.add_nodes(4)
    yield fleet
    fleet.remove()


def start_run(fleet, root, name="run-a"):
    """Make a workflow with a pod on each of three machines."""
    fleet.add_workflow(name)
    labels = {
        names.WORKFLOW_LABEL: name,
        names.RUN_ID_LABEL: "1234",
        names.STAGE_LABEL: "train",
        names.ITERATION_LABEL: "7",
    }
    executor = json.dumps({"inputs": {"parameterValues": {"root": root}}})
    command = ["launch", "--executor_input", executor]
    for number in range(3):
        place = (f"{name}-{number}", fleet.name(number))
        fleet.add_pod(*place, job="", labels=labels, container={"command": command})
    return f"{fleet.namespace}/{name}/train"


def actor_of(fleet, roots, **settings):
    config = ActConfig(**{"mode": "evict", "dry_run": True, "max_node_share": 1.0, **settings})
    return Actor(fleet.cluster(run_roots=roots), config)


def test_an_alert_is_told_to_pods_workflow_and_root(fleet, tmp_path):
    root = f"file://{tmp_path}/run"
    job = start_run(fleet, root)
    actor = actor_of(fleet, (f"file://{tmp_path}",))
    about = alert(fleet, 1, job=job)
    actor.handle(about, result(about, NOW), NOW)
    actor.handle(about, result(about, NOW + 60), NOW + 60)
    assert fleet.events("run-a-1") == [("MachineAnomaly", 1)]
    assert fleet.events("run-a-0") == []
    told = fleet.anomaly("run-a")
    assert (told["run_id"], told["stage"], told["iteration"]) == ("1234", "train", 7)
    assert (told["machine"], told["metric"]) == (fleet.name(1), "cpu_usage")
    assert told["action"] == f"evict dry_run: cordon {fleet.name(1)} and evict run-a-1"
    (path,) = (tmp_path / "run/alerts").iterdir()
    assert path.name == f"19700101T001640Z-{fleet.name(1)}.json"
    stored = json.loads(path.read_text())
    history = stored.pop("history")
    assert [(one["second"], one["action"].split(":")[0]) for one in history] == [
        (NOW, "evict waiting"),
        (NOW + 60, "evict dry_run"),
    ]
    assert stored == told
    (shown,) = gather(root).alerts
    assert (shown.machine, shown.metric, shown.score) == (fleet.name(1), "cpu_usage", 2.5)
    assert (shown.first_second, shown.last_second) == (1000.0, 1300.0)
    assert (shown.stage, shown.iteration, shown.kind) == ("train", 7, "dissimilar")
    assert shown.action == told["action"]


def test_the_end_of_an_alert_is_told_in_the_same_object(fleet, tmp_path):
    root = f"file://{tmp_path}/run"
    job = start_run(fleet, root)
    actor = actor_of(fleet, (root,), mode="observe")
    about = alert(fleet, 1, job=job)
    actor.handle(about, result(about, NOW), NOW)
    ended = alert(fleet, 1, job=job, ended="over", seen=1500.0)
    actor.handle(ended, result(about, NOW + 900, confirms=False), NOW + 900)
    (path,) = (tmp_path / "run/alerts").iterdir()
    stored = json.loads(path.read_text())
    assert (stored["state"], stored["last_second"]) == ("resolved", 1500.0)
    assert fleet.anomaly("run-a")["state"] == "resolved"


def test_a_root_that_is_not_allowed_is_never_written_to(fleet, tmp_path):
    root = f"file://{tmp_path}/secret"
    job = start_run(fleet, root)
    actor = actor_of(fleet, (f"file://{tmp_path}/runs",))
    about = alert(fleet, 1, job=job)
    actor.handle(about, result(about, NOW), NOW)
    assert not (tmp_path / "secret").exists()
    assert fleet.anomaly("run-a")["machine"] == fleet.name(1)


def test_a_missing_workflow_and_a_broken_store_stop_nothing(fleet, tmp_path):
    (tmp_path / "blocked").write_text("a file where a folder must be")
    root = f"file://{tmp_path}/blocked/run"
    job = start_run(fleet, root)
    fleet.plane.kubectl("delete", "workflow", "run-a", "-n", fleet.namespace)
    actor = actor_of(fleet, (f"file://{tmp_path}",), dry_run=False)
    about = alert(fleet, 1, job=job)
    actor.handle(about, result(about, NOW), NOW)
    done = actor.handle(about, result(about, NOW + 60), NOW + 60)
    assert (done.action, done.result) == ("evict", "done")
    assert fleet.node(1).is_unschedulable
