"""A node of the tests that runs pods of a real control plane, and the first day of a user on it."""

import json
import sys

import pytest

from tests.images.containers import Here
from tests.images.node import Node
from tests.images.rehearsal import rehearse, wait_for_end
from tests.integration.scheduling import running_scheduler
from tests.servers.run_minio import require_minio

pytestmark = [pytest.mark.server, pytest.mark.slow]
IMAGE = "planish/core:0.1.0"


def pod(name, code, *, image=IMAGE, **container):
    """A pod that runs a line of Python."""
    main = {"name": "main", "image": image, "command": [sys.executable, "-c", code], **container}
    spec = {"restartPolicy": "Never", "containers": [main]}
    return {"metadata": {"name": name, "labels": {"pipeline/runid": "r1"}}, "spec": spec}


@pytest.fixture
def node(control_plane, tmp_path):
    with running_scheduler(control_plane), Node(control_plane, Here(), tmp_path) as node:
        yield node


def test_a_pod_runs_with_what_its_spec_names_and_tells_how_it_ended(control_plane, node):
    control_plane.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "keys", "namespace": "default"},
            "stringData": {"a": "secret"},
        }
    )

    def key(name, **more):
        return {"valueFrom": {"secretKeyRef": {"name": "keys", "key": name, **more}}}

    def of_pod(path):
        return {"valueFrom": {"fieldRef": {"fieldPath": path}}}

    variables = [
        {"name": "PLAIN", "value": "x y"},
        {"name": "KEY", **key("a")},
        {"name": "NONE", **key("b", optional=True)},
        {"name": "RUN", **of_pod("metadata.labels['pipeline/runid']")},
        {"name": "NODE", **of_pod("spec.nodeName")},
    ]
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    for manifest in (
        pod("good", code, env=variables),
        pod("bad", "raise SystemExit(3)"),
        pod("no-key", "", env=[{"name": "KEY", **key("b")}]),
        pod("no-image", "", image="elsewhere/core:1"),
    ):
        node.core.create_namespaced_pod("default", manifest)
    assert wait_for_end(node, "good", "default") == "Succeeded"
    seen = json.loads(node.log("good"))
    assert {name: seen.get(name) for name in ("PLAIN", "KEY", "NONE", "RUN", "NODE")} == {
        "PLAIN": "x y",
        "KEY": "secret",
        "NONE": None,
        "RUN": "r1",
        "NODE": node.name,
    }
    assert wait_for_end(node, "bad", "default") == "Failed"
    ended = node.core.read_namespaced_pod("bad", "default").status.container_statuses[0]
    assert ended.state.terminated.exit_code == 3
    assert "no b in keys" in wait_for_end(node, "no-key", "default")
    assert "ErrImageNeverPull" in wait_for_end(node, "no-image", "default")


@pytest.mark.filterwarnings("ignore:Task '.*have no effect:UserWarning")
def test_pods_of_the_compiled_pipeline_train_and_export_a_model(tmp_path):
    require_minio()
    rehearse(Here(), tmp_path)
