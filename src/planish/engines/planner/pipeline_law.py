"""The law of the ping-pong pipeline: seconds of one decode iteration from the times of its stages.

A micro-batch walks attention, link, expert, link and on to the attention of the next layer. Stages
and links are serial: each serves one micro-batch at a time.

Source: MegaScale-Infer, arXiv 2504.02263, section on ping-pong pipeline parallelism, equations 4
and 5; the form below holds beyond their conditions and equals them where these are fulfilled.
"""

from __future__ import annotations

import math


def iteration_seconds(
    attention: float, experts: float, network: float, micro_batches: int, layers: int
) -> float:
    """Return the seconds from the first attention to the last reply of one iteration.

    The three times are of one micro-batch and layer, that of the network of one direction; there is
    at least one micro-batch, and one layer with experts.

    Example:
        >>> iteration_seconds(400, 300, 100, 3, 56), iteration_seconds(100, 120, 200, 3, 10)
        (67700, 6600)
    """
    round_trip = attention + experts + 2 * network
    slowest = max(attention, experts, network)
    return (
        max(micro_batches * slowest, round_trip) * (layers - 1)
        + round_trip
        + (micro_batches - 1) * slowest
    )


def min_micro_batches(network: float, slowest: float) -> int:
    """Return the fewest micro-batches that hide the network: m >= 2 (1 + T_c / T_f).

    Example:
        >>> [min_micro_batches(share, 1.0) for share in (0.0, 0.5, 0.75)]
        [2, 3, 4]
    """
    # 2 (1 + 0.3 / 0.6) may lie a rounding error above 3.
    return math.ceil(2 * (1 + network / slowest) - 1e-9)


def speedup(
    attention: float, experts: float, network: float, layers: int, *, fewer: int, more: int
) -> float:
    """Return tokens per second with `more` micro-batches over `fewer`, each of the same size."""
    rates = [
        count / iteration_seconds(attention, experts, network, count, layers)
        for count in (more, fewer)
    ]
    return rates[0] / rates[1]
