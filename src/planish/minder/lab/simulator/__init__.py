"""Traces of simulated jobs, healthy or with a fault, for training and evaluation.

Source: Minder, arXiv 2411.01791: shares of faults and which metrics show them; the shapes of the
traces are ours.
"""

from __future__ import annotations

from planish.minder.lab.simulator.case import DETECTABLE_SECONDS, Case, Truth
from planish.minder.lab.simulator.faults import FAULTS
from planish.minder.lab.simulator.job import SIMULATED, simulate

__all__ = ["DETECTABLE_SECONDS", "FAULTS", "SIMULATED", "Case", "Truth", "simulate"]
