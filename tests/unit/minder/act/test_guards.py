"""Every guard refuses alone, with its reason; together they let one machine go at a time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.minder.act.config import ActConfig
from planish.minder.act.guards import Taken, limit_refusals, standing_refusals
from planish.minder.act.kube import names
from planish.minder.act.kube.objects import NodeInfo, PodInfo

NOW = 100_000.0
CONFIG = ActConfig()
POD = PodInfo("p", "team", "u", "n0", "job", "Running")


def node(name, **changes):
    room = {"cpu": "8", "nvidia.com/gpu": "8"}
    return replace(NodeInfo(name, f"uid-{name}", "1", allocatable=room), **changes)


NODES = [node(f"n{i}") for i in range(30)]


@pytest.mark.parametrize(
    ("changes", "pod", "words"),
    [
        ({}, POD, None),
        ({"labels": {names.EXEMPT: "true"}}, POD, "the node is exempt"),
        ({"labels": {names.EXEMPT: "false"}}, POD, None),
        ({}, replace(POD, is_exempt=True), "pods are exempt"),
        ({"annotations": {names.MANUAL_UNCORDON: "a1"}}, POD, "a human made"),
        ({"annotations": {names.MANUAL_UNCORDON: "another"}}, POD, None),
    ],
)
def test_what_people_have_forbidden_is_refused_with_its_reason(changes, pod, words):
    found = standing_refusals("a1", node("n0", **changes), [pod])
    assert len(found) == (words is not None)
    assert (words or "") in "".join(found)


def refused(taken, config=CONFIG, nodes=NODES):
    return limit_refusals(
        "team/job", [Taken(NOW - ago, job, name) for ago, job, name in taken], nodes, NOW, config
    )


@pytest.mark.parametrize(
    ("taken", "count"),
    [
        ([], 0),
        ([(1799, "team/job", "n5")], 1),
        ([(1800, "team/job", "n5")], 0),
        ([(60, "other", "n5")], 0),
        ([(700, "a", "n5"), (1400, "b", "n6"), (3599, "c", "n7")], 1),
        ([(700, "a", "n5"), (1400, "b", "n6"), (3600, "c", "n7")], 0),
        # One node taken twice is one node.
        ([(700, "a", "n5"), (1400, "b", "n5"), (3500, "c", "n5")], 0),
    ],
)
def test_limits_of_job_and_cluster_slide(taken, count):
    assert len(refused(taken)) == count


@pytest.mark.parametrize(
    ("gpus", "limit"), [(0, 0), (1, 1), (10, 1), (11, 2), (20, 2), (30, 3), (99, 3)]
)
def test_the_cluster_loses_at_most_three_nodes_and_a_tenth_rounded_up(gpus, limit):
    nodes = [node(f"g{i}") for i in range(gpus)]
    nodes += [node(f"c{i}", allocatable={"cpu": "4"}) for i in range(50)]
    taken = [(100, "a", f"n{i}") for i in range(limit)]
    (reason,) = refused(taken, nodes=nodes)
    assert reason == f"{limit} of at most {limit} nodes of the cluster were taken in 3600 s"
    assert refused(taken[1:], nodes=nodes) == ([] if limit else [reason])


def test_without_a_resource_every_node_counts():
    nodes = [node(f"c{i}", allocatable={"cpu": "4"}) for i in range(20)]
    config = ActConfig(gpu_resource="")
    assert refused([(100, "a", "n1")], config, nodes) == []
    assert len(refused([(100, "a", "n1"), (100, "b", "n2")], config, nodes)) == 1


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 20_000), st.sampled_from(["a", "b", "c"]), st.integers(0, 29)),
        max_size=60,
    )
)
def test_no_window_ever_holds_more_than_its_limit(wishes):
    taken = []
    for second, job, number in sorted(wishes):
        if not limit_refusals(job, taken, NODES, float(second), CONFIG):
            taken.append(Taken(float(second), job, f"n{number}"))
    for first in taken:
        hour = {t.node for t in taken if first.time <= t.time < first.time + 3600}
        of_job = {
            t.node for t in taken if first.time <= t.time < first.time + 1800 and t.job == first.job
        }
        assert len(hour) <= 3
        assert len(of_job) <= 1
