"""Traces of simulated jobs, healthy or with a fault, for training and evaluation.

Source: Minder, arXiv 2411.01791: shares of faults and which metrics show them; the shapes of the
traces are ours.
"""

from tests.minder_lab.simulator.faults import FAULTS
from tests.minder_lab.simulator.job import SIMULATED, simulate
from tests.minder_lab.simulator.rl import simulate_rl

__all__ = ["FAULTS", "SIMULATED", "simulate", "simulate_rl"]
