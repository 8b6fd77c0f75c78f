"""A real scheduler keeps pods away from the nodes that a run avoids."""

from __future__ import annotations

import json
import subprocess
import time

import pytest

from planish.run.avoid import node_affinity
from tests.servers.program import BIN, few_variables

pytestmark = pytest.mark.server

PATIENCE_SECONDS = 60.0


@pytest.fixture
def scheduler(control_plane):
    """The scheduler of the control plane, for as long as the test lasts."""
    log = (control_plane.folder / "scheduler.log").open("ab")
    command = [BIN / "kubernetes", "kube-scheduler", f"--kubeconfig={control_plane.kubeconfig}"]
    process = subprocess.Popen(
        [*command, "--leader-elect=false", "--secure-port=0"],
        stdout=log,
        stderr=log,
        env=few_variables(control_plane.folder),
    )
    yield control_plane
    process.kill()
    process.wait(timeout=30)
    log.close()


def apply(plane, *objects):
    path = plane.folder / "objects.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))
    plane.kubectl("apply", "--validate=strict", "-f", str(path))


def add_node(plane, name):
    labels = {"kubernetes.io/hostname": name}
    apply(plane, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    room = {"cpu": "4", "memory": "8Gi", "pods": "10"}
    status = {"capacity": room, "allocatable": room}
    patch = json.dumps({"status": status})
    plane.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)


def pod(name, affinity):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "affinity": {"nodeAffinity": affinity} if affinity else {},
            "containers": [{"name": "main", "image": "none"}],
            # These nodes have no kubelet, so a controller marks them as not ready.
            "tolerations": [{"operator": "Exists"}],
        },
    }


def wait_until(plane, name, told):
    """Return what `told` finds in the pod as soon as it finds something."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        found = told(json.loads(plane.kubectl("get", "pod", name, "-o", "json").stdout))
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(plane.kubectl("get", "pod", name, "-o", "yaml").stdout)


def node_of(found):
    return found["spec"].get("nodeName")


def why_pending(found):
    conditions = found["status"].get("conditions", [])
    return next((c["message"] for c in conditions if c.get("reason") == "Unschedulable"), None)


def test_a_pod_waits_rather_than_run_on_a_node_that_is_avoided(scheduler):
    plane = scheduler
    try:
        add_node(plane, "node-3")
        apply(plane, pod("anywhere", node_affinity([])), pod("away", node_affinity(["node-3"])))
        assert wait_until(plane, "anywhere", node_of) == "node-3"
        assert "didn't match Pod's node affinity" in wait_until(plane, "away", why_pending)
        add_node(plane, "node-4")
        assert wait_until(plane, "away", node_of) == "node-4"
    finally:
        plane.kubectl("delete", "pod", "anywhere", "away", "--force", check=False)
        plane.kubectl("delete", "node", "node-3", "node-4", check=False)
