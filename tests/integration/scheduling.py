"""A real scheduler and nodes that are objects alone: what placing pods needs, without a kubelet."""

import json
import subprocess
import time
from contextlib import contextmanager

from tests.servers.program import BIN, few_variables

PATIENCE_SECONDS = 60.0


@contextmanager
def running_scheduler(plane):
    """The scheduler of a control plane, for as long as the block lasts."""
    log = (plane.folder / "scheduler.log").open("ab")
    command = [BIN / "kubernetes", "kube-scheduler", f"--kubeconfig={plane.kubeconfig}"]
    process = subprocess.Popen(
        [*command, "--leader-elect=false", "--secure-port=0"],
        stdout=log,
        stderr=log,
        env=few_variables(plane.folder),
    )
    try:
        yield plane
    finally:
        process.kill()
        process.wait(timeout=30)
        log.close()


def apply(plane, *objects):
    path = plane.folder / "objects.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))
    plane.kubectl("apply", "--validate=strict", "-f", str(path))


def add_node(plane, name, *, cpu="4", pods="10"):
    labels = {"kubernetes.io/hostname": name}
    apply(plane, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    room = {"cpu": cpu, "memory": "8Gi", "pods": pods}
    status = {"capacity": room, "allocatable": room}
    patch = json.dumps({"status": status})
    plane.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)


def pod(name, *, requests=None, **spec):
    container = {"name": "main", "image": "none", "resources": {"requests": requests or {}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "containers": [container],
            # These nodes have no kubelet, so a controller marks them as not ready.
            "tolerations": [{"operator": "Exists"}],
            **spec,
        },
    }


def state_of(plane, name):
    return json.loads(plane.kubectl("get", "pod", name, "-o", "json").stdout)


def wait_until(plane, name, fact_of):
    """Return what `fact_of` reads from the pod as soon as that is something."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        fact = fact_of(state_of(plane, name))
        if fact:
            return fact
        time.sleep(0.2)
    raise AssertionError(plane.kubectl("get", "pod", name, "-o", "yaml").stdout)


def node_of(state):
    return state["spec"].get("nodeName")


def leaves_since(state):
    return state["metadata"].get("deletionTimestamp")


def why_pending(state):
    conditions = state["status"].get("conditions", [])
    return next((c["message"] for c in conditions if c.get("reason") == "Unschedulable"), None)
