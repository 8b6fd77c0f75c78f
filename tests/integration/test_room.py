"""Room for the store and for runs, decided by a real scheduler."""

import pytest
import yaml

from planish.run.avoid import node_affinity
from tests.contract.test_install import services, tasks
from tests.integration.scheduling import (
    add_node,
    apply,
    leaves_since,
    node_of,
    pod,
    state_of,
    wait_until,
    why_pending,
)
from tests.servers.program import REPOSITORY

pytestmark = pytest.mark.server

PRIORITIES = REPOSITORY / "manifests" / "base" / "priorities.yaml"
NODE = "two-cores"


@pytest.fixture
def node(scheduler):
    """A cluster of one node with two cores, and the priority classes of `manifests/base`."""
    scheduler.kubectl("apply", "-f", str(PRIORITIES))
    add_node(scheduler, NODE, cpu="2", pods="110")
    yield scheduler
    scheduler.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", check=False)
    scheduler.kubectl("delete", "node", NODE, check=False)
    scheduler.kubectl("delete", "priorityclass", "evicting", check=False)


def store(plane):
    """Return a pod as the Deployment of MinIO makes it, but for its claim, which nobody fills."""
    overlay = REPOSITORY / "manifests" / "overlays" / "local"
    built = yaml.safe_load_all(plane.kubectl("kustomize", str(overlay)).stdout)
    (template,) = (
        o["spec"]["template"]["spec"]
        for o in built
        if (o["kind"], o["metadata"]["name"]) == ("Deployment", "minio")
    )
    requests = template["containers"][0]["resources"]["requests"]
    return pod("minio", requests=requests, priorityClassName=template["priorityClassName"])


def evicting():
    """A class of the value of runs that evicts, as an installation may give to all of its pods."""
    (runs,) = (
        item
        for item in yaml.safe_load_all(PRIORITIES.read_text())
        if item["metadata"]["name"] == "planish-training"
    )
    return runs | {"metadata": {"name": "evicting"}, "preemptionPolicy": "PreemptLowerPriority"}


def test_a_run_evicts_a_pod_without_a_class_but_never_the_store(node):
    apply(node, evicting(), store(node), pod("other", requests={"cpu": "1"}))
    assert wait_until(node, "minio", node_of) == wait_until(node, "other", node_of) == NODE
    apply(node, pod("run", requests={"cpu": "1"}, priorityClassName="evicting"))
    assert wait_until(node, "other", leaves_since)
    node.kubectl("delete", "pod", "other", "--force", "--grace-period=0")
    assert wait_until(node, "run", node_of) == NODE
    apply(node, pod("wide", requests={"cpu": "1950m"}, priorityClassName="evicting"))
    assert "Insufficient cpu" in wait_until(node, "wide", why_pending)
    assert not leaves_since(state_of(node, "minio"))


def test_neither_store_nor_run_evicts_anybody(node):
    apply(node, pod("other", requests={"cpu": "2"}))
    wait_until(node, "other", node_of)
    ours = {"requests": {"cpu": "1"}, "priorityClassName": "planish-training"}
    apply(node, store(node), pod("run", **ours))
    for name in ("minio", "run"):
        assert "preemptionPolicy=Never" in wait_until(node, name, why_pending)
    assert not leaves_since(state_of(node, "other"))


def test_the_tasks_of_one_moment_find_room_on_two_cores_beside_all_services(node):
    wanted = dict(services())
    wanted |= {f"rollout-{number}": task for number, task in enumerate(tasks())}
    apply(
        node,
        *(
            pod(name, requests={"cpu": f"{round(cpu * 1000)}m", "memory": str(int(memory))})
            for name, (cpu, memory) in wanted.items()
        ),
    )
    for name in wanted:
        assert wait_until(node, name, node_of) == NODE


def away_from(nodes):
    return {"affinity": {"nodeAffinity": node_affinity(nodes)}} if nodes else {}


def test_a_pod_waits_rather_than_run_on_a_node_that_is_avoided(scheduler):
    plane = scheduler
    try:
        add_node(plane, "node-3")
        apply(plane, pod("anywhere"), pod("away", **away_from(["node-3"])))
        assert wait_until(plane, "anywhere", node_of) == "node-3"
        assert "didn't match Pod's node affinity" in wait_until(plane, "away", why_pending)
        add_node(plane, "node-4")
        assert wait_until(plane, "away", node_of) == "node-4"
    finally:
        plane.kubectl("delete", "pod", "anywhere", "away", "--force", check=False)
        plane.kubectl("delete", "node", "node-3", "node-4", check=False)
