"""What each metric does in each state of a job: levels, noise, and the range that matters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from planish.minder.metrics_table import METRICS


class State(IntEnum):
    """What a machine is doing in a second; columns of `Shape.states`."""

    COMPUTE = 0
    EXCHANGE = 1
    BUBBLE = 2
    CHECKPOINT = 3
    EVALUATION = 4
    STALL = 5
    SPIN = 6
    """Waits in a collective for a machine that will not come."""
    IDLE = 7
    """The job has stopped."""
    STARTUP = 8


@dataclass(frozen=True)
class Shape:
    """One metric.

    Example:
        >>> len(SHAPES["cpu_usage"].states), set(SHAPES) == set(METRICS)
        (9, True)
    """

    level: tuple[float, float]
    """The job's level is drawn between these, in the unit of the metric."""
    states: tuple[float, ...]
    """Share of the level in each `State`."""
    noise: float
    """Standard deviation from second to second, as a share of the value."""
    heavy: float = 0.0
    """Standard deviation of the logarithm, for rates with a heavy tail."""
    smooth: int = 1
    """Seconds over which the sensor averages."""
    spread: float = 0.0
    """Standard deviation of the machines' levels, as a share."""
    stage: float = 0.0
    """How much of the imbalance of stages it shows."""
    scale: float = 1.0
    """What one unit of the normalised metric is, in its unit (for rates: of log1p)."""
    group: str = "gpu"
    """What shows a fault together: cpu, gpu, pfc, throughput, memory, disk, or tensor."""


SHAPES: dict[str, Shape] = {
    "pfc_tx_packet_rate": Shape(
        (15, 60), (0.6, 2.0, 0.5, 0.4, 0.3, 0.2, 0.15, 0.03, 0.1), 0.0, 0.6, 1, 0.15, 0.1, 9.0,
        "pfc"),
    "cpu_usage": Shape(
        (12, 30), (1, 1.1, 0.95, 1.6, 0.9, 0.8, 0.95, 0.2, 1.4), 0.04, 0, 1, 0.02, 0.0, 100.0,
        "cpu"),
    "gpu_duty_cycle": Shape(
        (97, 100), (0.98, 0.95, 0.75, 0.05, 0.95, 0.15, 1.0, 0.0, 0.03), 0.006, 0, 1, 0.0, 0.0,
        100.0),
    "gpu_power_draw": Shape(
        (200, 320), (1, 0.72, 0.55, 0.35, 0.85, 0.4, 0.5, 0.22, 0.25), 0.015, 0, 2, 0.008, 0.3,
        420.0),
    "gpu_graphics_engine_activity": Shape(
        (0.94, 1.0), (0.97, 0.9, 0.65, 0.03, 0.92, 0.1, 1.0, 0.0, 0.02), 0.008, 0, 1, 0.003, 0.0,
        1.0),
    "gpu_tensor_core_activity": Shape(
        (0.3, 0.6), (1, 0.1, 0.05, 0.01, 0.8, 0.03, 0.01, 0, 0), 0.03, 0, 1, 0.01, 1.0, 1.0,
        "tensor"),
    "gpu_nvlink_bandwidth": Shape(
        (100, 220), (1, 0.8, 0.2, 0.02, 0.7, 0.05, 0.02, 0, 0), 0.04, 0, 1, 0.01, 0.3, 240.0,
        "tensor"),
    "memory_usage": Shape(
        (40, 50), (1, 1, 1, 1.03, 1, 1, 1, 0.6, 0.8), 0.001, 0, 5, 0.015, 0.1, 100.0, "memory"),
    "disk_usage": Shape(
        (30, 60), (1, 1, 1, 1, 1, 1, 1, 1, 1), 0.0001, 0, 1, 0.2, 0.0, 100.0, "disk"),
    "tcp_throughput": Shape(
        (5, 40), (1, 1.2, 0.9, 8, 0.6, 1.5, 0.3, 0.05, 3), 0.1, 0.25, 1, 0.05, 0.0, 400.0,
        "throughput"),
    "tcp_rdma_throughput": Shape(
        (20, 80), (0.15, 1, 0.1, 0.05, 0.1, 0.05, 0.02, 0, 0), 0.05, 0, 1, 0.01, 0.1, 100.0,
        "throughput"),
    "gpu_memory_used": Shape(
        (50, 75), (1, 1, 1, 1, 0.98, 1, 1, 0.03, 0.3), 0.001, 0, 2, 0.002, 0.2, 80.0),
    "gpu_temperature": Shape(
        (50, 68), (1, 0.96, 0.9, 0.8, 0.97, 0.85, 0.85, 0.6, 0.65), 0.005, 0, 40, 0.06, 0.1, 110.0),
    "gpu_sm_activity": Shape(
        (0.75, 0.9), (1, 0.5, 0.2, 0.02, 0.9, 0.08, 0.6, 0, 0.01), 0.015, 0, 1, 0.004, 0.3, 1.0),
    "gpu_clocks": Shape(
        (1350, 1410), (1, 1, 1, 0.99, 1, 1, 1, 0.4, 0.6), 0.004, 0, 1, 0.002, 0.0, 1500.0),
    "gpu_fp_engine_activity": Shape(
        (0.1, 0.25), (1, 0.2, 0.05, 0.01, 0.8, 0.03, 0.02, 0, 0), 0.04, 0, 1, 0.01, 1.0, 1.0,
        "tensor"),
    "gpu_memory_bandwidth_utilization": Shape(
        (0.3, 0.5), (1, 0.4, 0.2, 0.05, 0.8, 0.05, 0.02, 0, 0.02), 0.03, 0, 1, 0.01, 0.5, 1.0,
        "tensor"),
    "pcie_bandwidth": Shape(
        (3, 12), (0.6, 1, 0.3, 0.8, 0.4, 0.2, 0.02, 0.01, 0.5), 0.06, 0, 1, 0.02, 0.1, 20.0,
        "tensor"),
    "pcie_usage": Shape(
        (5, 19), (0.6, 1, 0.3, 0.8, 0.4, 0.2, 0.02, 0.01, 0.5), 0.06, 0, 1, 0.02, 0.1, 100.0,
        "tensor"),
    "ecn_packet_rate": Shape(
        (10, 40), (0.5, 2.0, 0.5, 0.4, 0.3, 0.2, 0.15, 0.03, 0.1), 0.0, 0.7, 1, 0.15, 0.1, 9.0,
        "pfc"),
    "cnp_packet_rate": Shape(
        (10, 40), (0.5, 2.0, 0.5, 0.4, 0.3, 0.2, 0.15, 0.03, 0.1), 0.0, 0.7, 1, 0.15, 0.1, 9.0,
        "pfc"),
}  # fmt: skip

GROUPS = ("cpu", "gpu", "pfc", "throughput", "memory", "disk", "tensor")


def upper_bound(metric: str) -> float:
    """Return the largest value that a sensor of the metric gives."""
    limits = METRICS[metric].limits
    if limits is not None:
        return limits[1]
    shape = SHAPES[metric]
    return 1e5 if shape.group == "pfc" else 2 * shape.scale
