"""A real scheduler keeps pods away from the nodes that a run avoids."""

import pytest

from planish.run.avoid import node_affinity
from tests.integration.scheduling import add_node, apply, node_of, pod, wait_until, why_pending

pytestmark = pytest.mark.server


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
