"""What each metric does in each state of a job: levels, noise, and the range that matters."""

from dataclasses import dataclass, replace
from enum import IntEnum

from planish.minder.detect.metrics_table import METRICS


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
    noise: float = 0.0
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
    """What becomes 1 when it is normalised, see `scale_of`; not used where limits are fixed."""
    group: str = "gpu"
    """What shows a fault together: cpu, gpu, pfc, throughput, memory, disk, or tensor."""


_MARKED = Shape((10, 40), (0.5, 2.0, 0.5, 0.4, 0.3, 0.2, 0.15, 0.03, 0.1),
                heavy=0.7, spread=0.15, stage=0.1, scale=9.0, group="pfc")  # fmt: skip
_PCIE = Shape((3, 12), (0.6, 1, 0.3, 0.8, 0.4, 0.2, 0.02, 0.01, 0.5),
              noise=0.06, spread=0.02, stage=0.1, scale=20.0, group="tensor")  # fmt: skip

SHAPES: dict[str, Shape] = {
    "pfc_tx_packet_rate": Shape(
        (15, 60), (0.6, 2.0, 0.5, 0.4, 0.3, 0.2, 0.15, 0.03, 0.1),
        heavy=0.6, spread=0.15, stage=0.1, scale=9.0, group="pfc"),
    "cpu_usage": Shape(
        (12, 30), (1, 1.1, 0.95, 1.6, 0.9, 0.8, 0.95, 0.2, 1.4),
        noise=0.04, spread=0.02, group="cpu"),
    "gpu_duty_cycle": Shape(
        (97, 100), (0.98, 0.95, 0.75, 0.05, 0.95, 0.15, 1.0, 0.0, 0.03), noise=0.006),
    "gpu_power_draw": Shape(
        (200, 320), (1, 0.72, 0.55, 0.35, 0.85, 0.4, 0.5, 0.22, 0.25),
        noise=0.015, smooth=2, spread=0.008, stage=0.3, scale=420.0),
    "gpu_graphics_engine_activity": Shape(
        (0.94, 1.0), (0.97, 0.9, 0.65, 0.03, 0.92, 0.1, 1.0, 0.0, 0.02), noise=0.008, spread=0.003),
    "gpu_tensor_core_activity": Shape(
        (0.3, 0.6), (1, 0.1, 0.05, 0.01, 0.8, 0.03, 0.01, 0, 0),
        noise=0.03, spread=0.01, stage=1.0, group="tensor"),
    "gpu_nvlink_bandwidth": Shape(
        (100, 220), (1, 0.8, 0.2, 0.02, 0.7, 0.05, 0.02, 0, 0),
        noise=0.04, spread=0.01, stage=0.3, scale=240.0, group="tensor"),
    "memory_usage": Shape(
        (40, 50), (1, 1, 1, 1.03, 1, 1, 1, 0.6, 0.8),
        noise=0.001, smooth=5, spread=0.015, stage=0.1, group="memory"),
    "disk_usage": Shape((30, 60), (1,) * 9, noise=0.0001, spread=0.2, group="disk"),
    "tcp_throughput": Shape(
        (5, 40), (1, 1.2, 0.9, 8, 0.6, 1.5, 0.3, 0.05, 3),
        noise=0.1, heavy=0.25, spread=0.05, scale=400.0, group="throughput"),
    "tcp_rdma_throughput": Shape(
        (20, 80), (0.15, 1, 0.1, 0.05, 0.1, 0.05, 0.02, 0, 0),
        noise=0.05, spread=0.01, stage=0.1, scale=100.0, group="throughput"),
    "gpu_memory_used": Shape(
        (50, 75), (1, 1, 1, 1, 0.98, 1, 1, 0.03, 0.3),
        noise=0.001, smooth=2, spread=0.002, stage=0.2, scale=80.0),
    "gpu_temperature": Shape(
        (50, 68), (1, 0.96, 0.9, 0.8, 0.97, 0.85, 0.85, 0.6, 0.65),
        noise=0.005, smooth=40, spread=0.06, stage=0.1),
    "gpu_sm_activity": Shape(
        (0.75, 0.9), (1, 0.5, 0.2, 0.02, 0.9, 0.08, 0.6, 0, 0.01),
        noise=0.015, spread=0.004, stage=0.3),
    "gpu_clocks": Shape(
        (1350, 1410), (1, 1, 1, 0.99, 1, 1, 1, 0.4, 0.6), noise=0.004, spread=0.002, scale=1500.0),
    "gpu_fp_engine_activity": Shape(
        (0.1, 0.25), (1, 0.2, 0.05, 0.01, 0.8, 0.03, 0.02, 0, 0),
        noise=0.04, spread=0.01, stage=1.0, group="tensor"),
    "gpu_memory_bandwidth_utilization": Shape(
        (0.3, 0.5), (1, 0.4, 0.2, 0.05, 0.8, 0.05, 0.02, 0, 0.02),
        noise=0.03, spread=0.01, stage=0.5, group="tensor"),
    "pcie_bandwidth": _PCIE,
    "pcie_usage": replace(_PCIE, level=(5, 19)),
    "ecn_packet_rate": _MARKED,
    "cnp_packet_rate": _MARKED,
}  # fmt: skip
"""By metric; their order is that in which levels are drawn."""


def scale_of(metric: str) -> float:
    """Return what becomes 1 when the metric is normalised, in its unit (for rates: of log1p)."""
    limits = METRICS[metric].limits
    return SHAPES[metric].scale if limits is None else limits[1]


def upper_bound(metric: str) -> float:
    """Return the largest value that a sensor of the metric gives."""
    if SHAPES[metric].group == "pfc":
        return 1e5
    return scale_of(metric) * (2 if METRICS[metric].limits is None else 1)
