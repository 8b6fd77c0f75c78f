import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planish.engines.disagg.placement import Placement, ReplicaChooser, place


def zipf(num_experts, exponent, seed):
    """Return tokens of each expert: Zipf's law in random order."""
    loads = 1000.0 / np.arange(1, num_experts + 1) ** exponent
    return np.random.default_rng(seed).permutation(loads).tolist()


def costs(placement, loads):
    """Return the cost of each node: the sum of share times tokens over its experts."""
    return [
        sum(share * loads[expert] for expert, share in zip(experts, shares, strict=True))
        for experts, shares in zip(placement.experts, placement.shares, strict=True)
    ]


def check(placement, num_experts, num_nodes, slots_per_node):
    """Check what every placement must be."""
    assert len(placement.experts) == num_nodes
    for experts in placement.experts:
        assert len(experts) <= slots_per_node
        assert list(experts) == sorted(set(experts))
    total = np.zeros(num_experts)
    for experts, shares in zip(placement.experts, placement.shares, strict=True):
        assert min(shares, default=0.0) >= 0
        np.add.at(total, list(experts), shares)
    assert total == pytest.approx(np.ones(num_experts), abs=1e-9)
    for expert in range(num_experts):
        assert len(placement.replicas(expert)) >= 1
        assert all(placement.experts[n][i] == expert for n, i in placement.replicas(expert))


problems = st.integers(1, 20).flatmap(
    lambda e: st.tuples(
        st.lists(st.integers(0, 10**6), min_size=e, max_size=e),
        st.integers(1, 6),
        st.integers(0, 5),
    )
)


@given(problems)
def test_every_placement_is_one_and_redundancy_never_makes_it_worse(problem):
    loads, num_nodes, spare = problem
    slots = -(-len(loads) // num_nodes)
    less = max(costs(place(loads, num_nodes, slots), loads))
    placement = place(loads, num_nodes, slots + spare)
    check(placement, len(loads), num_nodes, slots + spare)
    assert placement == place(loads, num_nodes, slots + spare)
    more = max(costs(placement, loads))
    single = Placement(*without_replicas(loads, num_nodes, slots + spare))
    assert more <= max(costs(single, loads)) * (1 + 1e-9)
    assert more <= less * 1.34 + 1e-9


def without_replicas(loads, num_nodes, slots):
    """Longest first to the cheapest node with room."""
    nodes = [[] for _ in range(num_nodes)]
    cost = [0.0] * num_nodes
    for expert in sorted(range(len(loads)), key=lambda e: -loads[e]):
        free = [n for n in range(num_nodes) if len(nodes[n]) < slots]
        node = min(free, key=lambda n: cost[n])
        nodes[node].append(expert)
        cost[node] += loads[expert]
    return (
        tuple(tuple(sorted(node)) for node in nodes),
        tuple(tuple(1.0 for _ in node) for node in nodes),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("exponent", [0.5, 0.8, 1.0, 1.5])
@pytest.mark.parametrize(
    ("num_experts", "num_nodes", "slots"), [(8, 2, 5), (64, 8, 9), (128, 16, 9)]
)
def test_zipf_loads_come_near_the_bound(num_experts, num_nodes, slots, exponent, seed):
    """No placement is below the mean, nor below the hottest expert spread over all its replicas."""
    loads = zipf(num_experts, exponent, seed)
    placement = place(loads, num_nodes, slots)
    check(placement, num_experts, num_nodes, slots)
    replicas = min(num_nodes, num_nodes * slots - num_experts + 1)
    bound = max(sum(loads) / num_nodes, max(loads) / replicas)
    assert max(costs(placement, loads)) <= 4 / 3 * bound


def best(cost, num_nodes, slots):
    """Return the least largest cost over all placements and shares.

    For fixed replicas it is the largest, over sets of nodes, of the cost of the experts that are
    nowhere else, divided by the nodes: what a maximum flow is cut by.
    """
    subsets = range(1, 1 << num_nodes)
    held = np.array(list(itertools.product(subsets, repeat=len(cost))))
    for node in range(num_nodes):
        held = held[(held >> node & 1).sum(1) <= slots]
    worst = np.zeros(len(held))
    for nodes in subsets:
        inside = ((held & ~nodes) == 0) @ np.asarray(cost)
        worst = np.maximum(worst, inside / nodes.bit_count())
    return worst.min()


@pytest.mark.slow
def test_small_problems_are_within_15_percent_of_the_best():
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(60):
        num_experts, num_nodes = int(random.integers(1, 7)), int(random.integers(1, 4))
        slots = int(random.integers(-(-num_experts // num_nodes), num_experts + 2))
        loads = (100 * random.random(num_experts) ** random.choice([1, 3])).tolist()
        found = max(costs(place(loads, num_nodes, slots), loads))
        ratios.append(found / best(loads, num_nodes, slots))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.15, sorted(ratios)[-3:]


def test_a_hot_expert_is_shared_by_hand():
    """Loads 6, 1, 1 on two nodes of two: the hot one on both, each node costs 3 + 1."""
    placement = place([6.0, 1.0, 1.0], 2, 2)
    assert placement.experts == ((0, 1), (0, 2))
    assert costs(placement, [6.0, 1.0, 1.0]) == [4.0, 4.0]


def counted(chooser, layer, ids, num_slots):
    return torch.bincount(chooser.slots(layer, ids).flatten(), minlength=num_slots)


def test_rows_follow_the_shares():
    placement = Placement(((0, 1), (0, 2), (0, 3)), ((0.5, 1.0), (0.2, 1.0), (0.3, 1.0)))
    chooser = ReplicaChooser([placement], 1, torch.device("cpu"))
    counts = sum(counted(chooser, 0, torch.zeros(7, 1, dtype=torch.int64), 6) for _ in range(1000))
    assert counts.sum() == 7000
    assert (counts[[0, 2, 4]] - torch.tensor([3500, 1400, 2100])).abs().max() <= 8
    assert counts[[1, 3, 5]].sum() == 0


def test_the_choice_does_not_depend_on_how_rows_are_batched():
    placements = [place(zipf(8, 1.0, seed), 4, 3) for seed in range(2)]
    ids = torch.randint(0, 8, (60, 3), generator=torch.Generator().manual_seed(0))
    whole, parts = (ReplicaChooser(placements, 2, torch.device("cpu")) for _ in range(2))
    at_once = whole.slots(1, ids)
    in_parts = torch.cat([parts.slots(1, part) for part in ids.split([1, 0, 30, 29])])
    assert torch.equal(at_once, in_parts)
    assert not torch.equal(at_once, whole.slots(1, ids))
    assert torch.equal(whole.slots(0, ids), parts.slots(0, ids))
