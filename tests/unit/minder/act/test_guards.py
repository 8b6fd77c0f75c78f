"""Every guard refuses alone, with its reason; together they let one machine go at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.minder.act.config import ActConfig
from planish.minder.act.guards import (
    Breaker,
    Ledger,
    Situation,
    Taken,
    cap,
    cap_is_used_up,
    refusals,
    spares,
)
from planish.minder.act.kube import names
from planish.minder.act.kube.objects import NodeInfo, PodInfo

NOW = 100_000.0
CONFIG = ActConfig()


def node(name, **changes):
    room = {"cpu": 8.0, "nvidia.com/gpu": 8.0, "pods": 10.0}
    return replace(NodeInfo(name, f"uid-{name}", "1", allocatable=room), **changes)


def pod(**changes):
    wanted = {"cpu": 4.0, "nvidia.com/gpu": 8.0, "pods": 1.0}
    base = PodInfo("p", "team", "u", "n0", "job", "Running", requests=wanted)
    return replace(base, **changes)


def situation(**changes):
    nodes = tuple(node(f"n{i}") for i in range(30))
    base = Situation(
        alert_id="a1",
        fired=NOW - 60,
        job="team/job",
        node=nodes[0],
        pods=(pod(),),
        nodes=nodes,
        used={},
        is_leader=True,
        now=NOW,
    )
    return replace(base, **changes)


def refused(given_situation=None, taken=(), breaker=None, config=CONFIG):
    ledger = Ledger([Taken(NOW - ago, job, name) for ago, job, name in taken])
    return refusals(given_situation or situation(), ledger, breaker or Breaker(config), config)


def test_nothing_refuses_when_all_is_well():
    assert refused() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_leader": False}, "not the leader"),
        ({"node": node("n0", labels={names.EXEMPT: "true"})}, "the node is exempt"),
        ({"pods": (pod(is_exempt=True),)}, "pods are exempt"),
        ({"node": node("n0", is_unschedulable=True)}, "cordoned by somebody else"),
        ({"node": node("n0", annotations={names.MANUAL_UNCORDON: "a1"})}, "a human made"),
        ({"nodes": (node("n0"),)}, "no other schedulable node"),
    ],
)
def test_each_guard_refuses_alone(changes, words):
    config = ActConfig(max_node_share=1.0)
    found = refused(situation(**changes), config=config)
    assert len(found) == 1
    assert words in found[0]


def test_an_open_breaker_and_an_alert_from_before_its_closing_are_refused():
    breaker = Breaker(CONFIG)
    breaker.open("cap", NOW - 100)
    assert refused(breaker=breaker) == ["the breaker is open: cap"]
    breaker.close(NOW - 10)
    assert refused(breaker=breaker) == []
    old = situation(fired=NOW - 1000)
    assert refused(old, breaker=breaker) == [
        "the alert is older than the closing of the breaker allows"
    ]


def test_an_exempt_label_that_says_false_exempts_nothing():
    assert refused(situation(node=node("n0", labels={names.EXEMPT: "false"}))) == []


def test_a_human_uncordon_counts_for_its_own_alert_only():
    other = node("n0", annotations={names.MANUAL_UNCORDON: "another"})
    assert refused(situation(node=other)) == []


@pytest.mark.parametrize(
    ("taken", "count"),
    [
        ([(1799, "team/job", "n5")], 1),
        ([(1800, "team/job", "n5")], 0),
        ([(599, "other", "n5")], 1),
        ([(600, "other", "n5")], 0),
        # Both the limit of the cluster and the cap, which say the same.
        ([(700, "a", "n5"), (1400, "b", "n6"), (3599, "c", "n7")], 1),
        ([(700, "a", "n5"), (1400, "b", "n6"), (3600, "c", "n7")], 0),
        # One node taken twice is one node.
        ([(700, "a", "n5"), (1400, "b", "n5"), (3500, "c", "n5")], 0),
    ],
)
def test_limits_of_job_and_cluster_slide(taken, count):
    assert len(refused(taken=taken)) == count


@pytest.mark.parametrize(("gpus", "expected"), [(0, 0), (1, 1), (10, 1), (11, 2), (30, 3), (99, 3)])
def test_the_cap_is_the_smaller_of_three_and_a_tenth_rounded_up(gpus, expected):
    nodes = [node(f"g{i}") for i in range(gpus)]
    nodes += [node(f"c{i}", allocatable={"cpu": 4.0}) for i in range(50)]
    assert cap(nodes, CONFIG) == expected


def test_without_a_resource_every_node_counts():
    nodes = [node(f"c{i}", allocatable={"cpu": 4.0}) for i in range(20)]
    assert cap(nodes, ActConfig(gpu_resource="")) == 2


def test_one_more_than_the_cap_opens_the_breaker():
    few = situation(nodes=tuple(node(f"n{i}") for i in range(10)))
    assert not cap_is_used_up(few, Ledger(), CONFIG)
    assert cap_is_used_up(few, Ledger([Taken(NOW - 3599, "j", "n3")]), CONFIG)
    assert not cap_is_used_up(few, Ledger([Taken(NOW - 3600, "j", "n3")]), CONFIG)


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        ({}, True),
        ({"is_ready": False}, False),
        ({"is_unschedulable": True}, False),
        ({"allocatable": {"cpu": 8.0, "nvidia.com/gpu": 7.0}}, False),
        ({"allocatable": {"cpu": 8.0, "nvidia.com/gpu": 8.0, "pods": 0.0}}, False),
        ({"taints": ({"key": "x", "effect": "NoSchedule"},)}, False),
        ({"taints": ({"key": "x", "effect": "PreferNoSchedule"},)}, True),
        ({"taints": ({"key": "gpu", "value": "1", "effect": "NoSchedule"},)}, True),
        ({"taints": ({"key": "gpu", "value": "2", "effect": "NoSchedule"},)}, False),
    ],
)
def test_a_spare_node_must_take_all_pods(other, fits):
    tolerations = ({"key": "gpu", "value": "1", "effect": "NoSchedule"},)
    here = situation(nodes=(node("n0"), node("n1", **other)), pods=(pod(tolerations=tolerations),))
    assert spares(here) == (["n1"] if fits else [])


def test_a_spare_node_has_the_labels_and_what_others_leave_of_it():
    wants = pod(selector={"zone": "a"}, requests={"cpu": 4.0})
    nodes = (node("n0"), node("n1"), node("n2", labels={"zone": "a"}))
    here = situation(nodes=nodes, pods=(wants,), used={"n2": {"cpu": 4.0}})
    assert spares(here) == ["n2"]
    assert spares(replace(here, used={"n2": {"cpu": 4.1}})) == []
    assert spares(replace(here, pods=(wants, wants), used={"n2": {"cpu": 1.0}})) == []


def test_without_a_spare_one_may_be_allowed_to_act():
    alone = situation(nodes=(node("n0"),))
    assert refused(alone, config=ActConfig(allow_without_spare=True)) == []


def test_a_lost_ledger_is_learnt_from_the_nodes():
    ours = {names.CORDONED_BY: "minder", names.SINCE: "2020-01-01T00:00:00Z", names.JOB: "t/j"}
    theirs = {**ours, names.CORDONED_BY: "someone"}
    ledger = Ledger()
    for _ in range(2):
        ledger.learn([node("a", annotations=ours), node("b", annotations=theirs)], "minder")
    assert ledger.entries == [Taken(1_577_836_800.0, "t/j", "a")]


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 20_000), st.sampled_from(["a", "b", "c"]), st.integers(0, 29)),
        max_size=60,
    )
)
def test_no_window_ever_holds_more_than_its_limit(wishes):
    ledger, breaker = Ledger(), Breaker(CONFIG)
    for second, job, number in sorted(wishes):
        here = replace(situation(), now=float(second), job=job, node=situation().nodes[number])
        if not refusals(here, ledger, breaker, CONFIG):
            ledger.add(Taken(float(second), job, here.node.name))
    times = [(entry.time, entry.job) for entry in ledger.entries]
    for time, job in times:
        assert sum(time <= other < time + 3600 for other, _ in times) <= 3
        assert sum(time <= other < time + 600 for other, _ in times) <= 1
        assert sum(time <= other < time + 1800 and job == whose for other, whose in times) <= 1
