"""Traces of simulated jobs, healthy or with a fault, for training and evaluation.

Source: Minder, arXiv 2411.01791: shares of faults and which metrics show them; the shapes of the
traces are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from planish.minder.metrics_table import PUBLISHED_ORDER
from planish.minder.simulator.case import DETECTABLE_SECONDS, Case, Truth

SIMULATED = (*PUBLISHED_ORDER, "memory_usage", "tcp_throughput")
"""Metrics of a case where none are named."""


def simulate(
    seed: int,
    *,
    machines: int | None = None,
    minutes: float | None = None,
    fault: str | None = None,
    metrics: Sequence[str] = SIMULATED,
    keep_samples: bool = False,
) -> Case:
    """Return one job; equal arguments give equal cases.

    Args:
        seed: of everything that is random.
        machines: how many; drawn from 4 .. 64 when not given.
        minutes: length of the trace; drawn from 20 .. 60 when not given.
        fault: key of `FAULTS`, `any` for one drawn by its published share, None for none.
        metrics: that are wanted.
        keep_samples: also return what the machines sent, unaligned.
    """
    raise NotImplementedError


__all__ = ["DETECTABLE_SECONDS", "SIMULATED", "Case", "Truth", "simulate"]
