"""Placement of a layer's experts on expert ranks (nodes), with replicas of busy experts.

The cost of a node is the sum over its experts of share times tokens. A layer takes as long as its
most expensive node, so the placement makes the largest cost small. The choice of a replica never
changes the result of a token. This module moves no weights.

Source: MegaScale-Infer, arXiv 2504.02263, section 6 (expert load balance by redundancy).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PASSES = 20
"""Most passes that lower the largest cost; they end early once nothing changes."""
_TRIES = 8
"""Number of replica counts that are tried, in addition to no replicas."""
_GOLDEN = 2654435769
"""2**32 divided by the golden ratio."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """Placement of one layer's experts; expert ranks are its nodes, from 0."""

    experts: tuple[tuple[int, ...], ...]
    """Logical experts of each node in local order, ascending; no expert twice on a node."""
    shares: tuple[tuple[float, ...], ...]
    """Share of the expert's rows that goes to the node; an expert's shares over all nodes sum to
    1."""

    @property
    def num_experts(self) -> int:
        """Number of logical experts."""
        return 1 + max(expert for node in self.experts for expert in node)

    @property
    def num_local(self) -> int:
        """Largest number of experts on a node."""
        return max(len(node) for node in self.experts)

    def replicas(self, expert: int) -> tuple[tuple[int, int], ...]:
        """Return node and local number of each replica of an expert, by ascending node."""
        return tuple(
            (node, experts.index(expert))
            for node, experts in enumerate(self.experts)
            if expert in experts
        )


def place(loads: Sequence[float], num_nodes: int, slots_per_node: int) -> Placement:
    """Return a placement of experts with `loads` in tokens that makes the largest cost small.

    The algorithm is greedy. Spare slots go one by one to the expert with the highest cost per
    replica. Replicas, the most expensive first, go to the cheapest node without their expert. Then
    rows of experts with replicas move away from the most expensive node. Fewer replicas, and none,
    are tried too, so that redundancy never makes the result worse. The slots must suffice for all
    experts.
    """
    cost = np.asarray(loads, dtype=np.float64)
    num_experts, slots = len(cost), num_nodes * slots_per_node
    counts = np.ones(num_experts, dtype=np.int64)
    tried = [_spread(cost, counts, num_nodes, slots_per_node)]
    spare = min(slots, num_experts * num_nodes) - num_experts
    for number in range(1, spare + 1):
        counts[int(np.where(counts < num_nodes, cost / counts, -1.0).argmax())] += 1
        if (spare - number) % -(-spare // _TRIES) == 0:
            tried.append(_spread(cost, counts, num_nodes, slots_per_node))
    held, shares = min(tried, key=lambda one: float((one[1] * cost[:, None]).sum(0).max()))
    experts = [np.flatnonzero(column).tolist() for column in held.T]
    return Placement(
        tuple(tuple(node) for node in experts),
        tuple(tuple(shares[node, j].tolist()) for j, node in enumerate(experts)),
    )


def _spread(
    cost: Floats, counts: NDArray[np.int64], num_nodes: int, slots_per_node: int
) -> tuple[NDArray[np.bool_], Floats]:
    """Return (nodes with a replica, shares), both [E, nodes], for given numbers of replicas."""
    held = np.zeros((len(cost), num_nodes), dtype=bool)
    load = np.zeros(num_nodes)
    each = cost / counts
    for expert in np.argsort(-each, kind="stable").tolist():
        for _ in range(counts[expert]):
            is_full = held.sum(0) >= slots_per_node
            node = int(np.where(is_full | held[expert], np.inf, load).argmin())
            if is_full[node] or held[expert, node]:
                # Every node with room already has this expert, so a node without it swaps an
                # expert.
                giver = int(np.where(held[expert], np.inf, load).argmin())
                taker = int(np.where(is_full, np.inf, load).argmin())
                given = int(np.flatnonzero(held[:, giver] & ~held[:, taker])[0])
                held[given, [giver, taker]] = False, True
                load[giver] -= each[given]
                load[taker] += each[given]
                node = giver
            held[expert, node] = True
            load[node] += each[expert]
    return held, fill_shares(cost, held)


def fill_shares(cost: Floats, held: NDArray[np.bool_]) -> Floats:
    """Return shares for fixed replicas by water-filling, expert by expert.

    `cost` [E] float64 is the cost of all rows of an expert. `held` [E, nodes] bool is True where a
    node has a replica. The shares are [E, nodes] float64; each row sums to 1, and the largest cost
    of a node is small.
    """
    shares: Floats = held / held.sum(1, keepdims=True)
    load = shares.T @ cost
    replicated = [e for e in np.argsort(-cost, kind="stable") if held[e].sum() > 1 and cost[e] > 0]
    for _ in range(_PASSES):
        before = load.max()
        for expert in replicated:
            nodes = np.flatnonzero(held[expert])
            rest = load[nodes] - shares[expert, nodes] * cost[expert]
            rising = np.sort(rest)
            # Water levels over the lowest 1, 2, ... nodes.
            levels = (rising.cumsum() + cost[expert]) / np.arange(1, len(nodes) + 1)
            filled = np.maximum(levels[(levels > rising).sum() - 1] - rest, 0.0)
            shares[expert, nodes] = filled / filled.sum()
            load[nodes] = rest + shares[expert, nodes] * cost[expert]
        if load.max() >= before * (1 - 1e-9):
            break
    return shares


@dataclass(frozen=True)
class ExpertLayout:
    """Placements of all sparse layers; they change only between iterations."""

    version: int
    """Number that grows with each change; every frame carries this number."""
    layers: tuple[Placement, ...]

    @classmethod
    def of(
        cls,
        loads: Sequence[Sequence[float]],
        *,
        num_nodes: int,
        num_redundant: int,
        version: int = 0,
    ) -> ExpertLayout:
        """Return a layout for loads [layers][experts]; `num_nodes` divides the number of experts.

        Each node has `num_redundant` slots for replicas in addition to its share of the experts.
        """
        slots = len(loads[0]) // num_nodes + num_redundant
        return cls(version, tuple(place(layer, num_nodes, slots) for layer in loads))

    def held(self, node: int) -> list[tuple[int, ...]]:
        """Return the expert ids of a node, by layer."""
        return [placement.experts[node] for placement in self.layers]

    def plain(self) -> dict[str, Any]:
        """Return this in JSON form."""
        return asdict(self)

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> ExpertLayout:
        """Restore a layout from the result of `plain`."""
        layers = [
            Placement(*(tuple(map(tuple, layer[name])) for name in ("experts", "shares")))
            for layer in plain["layers"]
        ]
        return cls(int(plain["version"]), tuple(layers))


class ReplicaChooser:
    """Chooses the replica for each row, so that the rows of an expert follow its shares.

    Each source rank has a counter for each layer and expert, which steps through a low-discrepancy
    sequence: after n rows, a replica has its share of them to within about log n rows. The choice
    is deterministic, and different sources start at different places.
    """

    def __init__(
        self, placements: Sequence[Placement], source_rank: int, device: torch.device
    ) -> None:
        """Start all counters at zero; layers have equal numbers of experts and nodes."""
        self.num_local = max(placement.num_local for placement in placements)
        """Number of local experts of each node, by which slots are numbered."""
        num_experts = placements[0].num_experts
        table = [[p.replicas(e) for e in range(num_experts)] for p in placements]
        width = max(len(replicas) for layer in table for replicas in layer)
        slots = torch.zeros(len(table), num_experts, width, dtype=torch.int64)
        shares = torch.zeros(len(table), num_experts, width, dtype=torch.float64)
        for layer, placement in enumerate(placements):
            for expert, replicas in enumerate(table[layer]):
                for number, (node, local) in enumerate(replicas):
                    slots[layer, expert, number] = node * self.num_local + local
                    shares[layer, expert, number] = placement.shares[node][local]
        self._slots = slots.to(device)
        self._bounds = (shares.cumsum(2) / shares.sum(2, keepdim=True)).to(device)
        self._counters = torch.zeros(len(table), num_experts, dtype=torch.int64, device=device)
        self._start = source_rank * _GOLDEN // 3

    def slots(self, layer: int, expert_ids: Tensor) -> Tensor:
        """Return the slot of each row, and step the counters.

        `expert_ids` are [b, K] int64; the slots [b, K] are `node * num_local + local expert`.
        """
        experts = expert_ids.flatten()
        if self._slots.shape[2] == 1:
            return self._slots[layer, experts, 0].view(expert_ids.shape)
        ordered, order = torch.sort(experts, stable=True)
        bounds = torch.arange(self._counters.shape[1] + 1, device=order.device)
        starts = torch.searchsorted(ordered, bounds)
        number = torch.empty_like(order)
        number[order] = torch.arange(len(order), device=order.device) - starts[ordered]
        number += self._counters[layer, experts]
        self._counters[layer] += starts.diff()
        uniform = ((number * _GOLDEN + self._start) & 0xFFFFFFFF) * 2.0**-32
        replica = (uniform[:, None] >= self._bounds[layer, experts]).sum(1)
        return self._slots[layer, experts, replica].view(expert_ids.shape)
