"""Roles that no label names, e.g. machines that sample beside machines that train.

The paper has no roles. Two such halves of a job differ in most metrics for most of the time, and
each half is compared with itself. Machines that differ in turn, as their longest responses end,
never split twice in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planish.minder.detect.config import DetectConfig
from planish.minder.detect.distances import fewest_of_group, floor_of, median_of_known
from planish.minder.detect.frame import F32, Mask
from planish.minder.detect.preprocess import Prepared
from planish.minder.detect.two_modes import BLOCK_SECONDS, block_medians

ROLE_SECONDS = 300
"""Length of the stretches in which roles are looked for. Two consecutive stretches must show the
same roles."""
_APART = 2.0
"""Mean distance of two roles over blocks and metrics, in units of the metric's floor."""
_OWN_SHARE = 0.6
"""Largest distance of a machine from its own role, as a share of its distance from the other
role."""
_FARTHEST = 5.0
"""Largest difference that counts, in floors, so that one metric does not decide alone."""
_FEWEST_METRICS = 3
"""Fewest metrics in which two roles differ; a difference in fewer may be a fault, e.g. of a
switch."""
_ROUNDS = 8


def find_roles(prepared: Prepared, config: DetectConfig) -> dict[str, str]:
    """Return the role of each machine in the last `ROLE_SECONDS`; empty if there are no two roles.

    The name of a role is the first machine that has it.
    """
    frame, fewest = prepared.frame, fewest_of_group(config)
    if frame.num_seconds < ROLE_SECONDS or frame.num_machines < 2 * fewest:
        return {}
    blocks = _blocks(prepared, config)
    sides = _two_sides(blocks, fewest) if blocks.size else None
    if sides is None:
        return {}
    names = np.array(frame.machines)
    firsts = {bool(side): str(names[sides == side][0]) for side in (False, True)}
    return {name: firsts[side] for name, side in zip(frame.machines, sides.tolist(), strict=True)}


def differ(old: Mapping[str, str], new: Mapping[str, str]) -> int:
    """Return how many machines changed sides, whatever the roles' names; all of them if `old` is
    empty.
    """
    if not old:
        return len(new)
    first = min(new)
    moved = sum((old[name] == old[first]) != (new[name] == new[first]) for name in new)
    return min(moved, len(new) - moved)


def _blocks(prepared: Prepared, config: DetectConfig) -> F32:
    """Return [N, M, B]: machine, metric, block; the distance above the median machine in floors."""
    count = ROLE_SECONDS // BLOCK_SECONDS
    first = prepared.frame.num_seconds - count * BLOCK_SECONDS
    found: list[F32] = []
    for name, values in prepared.values.items():
        if name in config.metrics:
            medians = block_medians(values, prepared.masked[name], first, count)
            median = np.nan_to_num(median_of_known(medians, np.isfinite(medians)))
            found.append((medians - median[:, None]) / max(floor_of(name, config), 1e-3))
    away: F32 = np.nan_to_num(np.stack(found)) if found else np.zeros((0, 0, 0), np.float32)
    return np.clip(away, -_FARTHEST, _FARTHEST).transpose(2, 0, 1)


def _two_sides(blocks: F32, fewest: int) -> Mask | None:
    """Return [N], True for machines on the second of two sides; None if there are no two sides.

    `blocks` are those of `_blocks`; a side has at least `fewest` machines.
    """

    def away(centre: F32) -> F32:
        distance: F32 = np.abs(blocks - centre).mean(axis=(1, 2))
        return distance

    first = blocks[away(np.median(blocks, axis=0)).argmax()]
    second = blocks[away(first).argmax()]
    for _ in range(_ROUNDS):
        sides = away(second) < away(first)
        if not fewest <= sides.sum() <= len(sides) - fewest:
            return None
        first, second = np.median(blocks[~sides], axis=0), np.median(blocks[sides], axis=0)
    to_first, to_second = away(first), away(second)
    own, other = np.minimum(to_first, to_second), np.maximum(to_first, to_second)
    is_clear = (own <= _OWN_SHARE * other).all()
    by_metric = np.abs(first - second).mean(axis=1)
    are_apart = by_metric.mean() >= _APART and (by_metric >= 1.0).sum() >= _FEWEST_METRICS
    return np.asarray(to_second < to_first) if is_clear and are_apart else None
