"""The tree along which control messages travel: few neighbours per rank at any size.

Source: ByteCheckpoint, arXiv 2407.20143, section 5.2 (tree-based hierarchical communication).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FAN_IN = 8
"""Largest group of one level above the machines."""


@dataclass(frozen=True)
class Tree:
    """Who talks to whom; rank 0 is the root.

    Example:
        >>> plan_tree([0, 0, 1, 1]).parents
        (-1, 0, 0, 2)
    """

    hosts: tuple[int, ...]
    """Number of the machine of each rank."""
    parents: tuple[int, ...]
    """Rank above each rank, -1 for rank 0."""
    children: tuple[tuple[int, ...], ...]
    """Ranks directly below each rank, ascending."""
    depth: int
    """Number of levels of edges; 0 for one rank."""

    def below(self, rank: int) -> set[int]:
        """Return the ranks of the part of the tree that hangs from `rank`, itself included."""
        found, waiting = {rank}, [rank]
        while waiting:
            children = self.children[waiting.pop()]
            found.update(children)
            waiting.extend(children)
        return found


def plan_tree(hosts: Sequence[int], fan_in: int = FAN_IN) -> Tree:
    """Join the ranks of a machine to its lowest rank, then groups of `fan_in` to theirs.

    Args:
        hosts: Number of the machine of each rank.
        fan_in: Largest group of one level above the machines, at least 2.

    Example:
        >>> plan_tree(range(9), fan_in=3).children[0]
        (1, 2, 3, 6)
    """
    parents = [-1] * len(hosts)
    roots: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        parents[rank] = roots.setdefault(host, rank)
    level = list(roots.values())
    depth = int(len(level) < len(hosts))
    while len(level) > 1:
        for first in range(0, len(level), fan_in):
            for rank in level[first : first + fan_in]:
                parents[rank] = level[first]
        level = level[::fan_in]
        depth += 1
    below: list[list[int]] = [[] for _ in hosts]
    for rank, parent in enumerate(parents):
        if rank:
            below[parent].append(rank)
    parents[0] = -1
    return Tree(tuple(hosts), tuple(parents), tuple(map(tuple, below)), depth)
