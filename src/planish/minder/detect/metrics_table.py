"""The 21 monitored metrics: units, limits, and where Prometheus has them.

Source: Minder, arXiv 2411.01791, section 4.1 and appendix (which metrics are collected, and the
seven that detect); queries, scales and limits are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]
Transform = Literal["none", "log1p"]
Aggregation = Literal["mean", "min", "max", "spread", "sum"]

JOB_SELECTOR = "$job_selector"
"""Stands in a query for the label matchers of one job's machines."""


@dataclass(frozen=True)
class Metric:
    """One metric of a machine.

    Example:
        >>> METRICS["cpu_usage"].limits
        (0.0, 100.0)
    """

    name: str
    """Canonical name; key of every table."""
    unit: str
    """Of the values in a frame."""
    limits: tuple[float, float] | None
    """Values that become 0 and 1; None: fitted to the training frames."""
    series: str
    """PromQL of one value for each device or machine; holds `$job_selector`."""
    kind: Kind = "gauge"
    """A counter is read as its rate over 5 s."""
    scale: float = 1.0
    """Multiplies what the query gives."""
    offset: float = 0.0
    """Added afterwards."""
    agg: Aggregation = "mean"
    """From the devices of a machine to the machine; `spread` is the largest minus the smallest."""
    transform: Transform = "none"
    """Applied before the limits; `log1p` for heavy tails."""
    is_gpu: bool = False
    """Comes from the GPU exporter."""
    nonnegative: bool = True
    """A negative value is a broken sample."""


def _gpu(name: str, unit: str, limits: tuple[float, float] | None, field: str, scale: float = 1.0,
         *, kind: Kind = "gauge", series: str = "") -> Metric:  # fmt: skip
    query = series or f"DCGM_FI_{field}{{{JOB_SELECTOR}}}"
    return Metric(name, unit, limits, query, kind=kind, scale=scale, is_gpu=True)


_S = f"{{{JOB_SELECTOR}}}"
_SEL = f",{JOB_SELECTOR}"

_ROWS = (
    Metric("pfc_tx_packet_rate", "packet/s", None,
           f"node_ethtool_transmitted_prio3_pause{_S}", kind="counter", agg="sum",
           transform="log1p"),
    Metric("cpu_usage", "%", (0.0, 100.0), f'node_cpu_seconds_total{{mode="idle"{_SEL}}}',
           kind="counter", scale=-100.0, offset=100.0),
    _gpu("gpu_duty_cycle", "%", (0.0, 100.0), "DEV_GPU_UTIL"),
    _gpu("gpu_power_draw", "W", None, "DEV_POWER_USAGE"),
    _gpu("gpu_graphics_engine_activity", "1", (0.0, 1.0), "PROF_GR_ENGINE_ACTIVE"),
    _gpu("gpu_tensor_core_activity", "1", (0.0, 1.0), "PROF_PIPE_TENSOR_ACTIVE"),
    _gpu("gpu_nvlink_bandwidth", "GB/s", None, "", 1e-9,
         series=f"DCGM_FI_PROF_NVLINK_TX_BYTES{_S} + DCGM_FI_PROF_NVLINK_RX_BYTES{_S}"),
    Metric("memory_usage", "%", (0.0, 100.0),
           f"1 - node_memory_MemAvailable_bytes{_S} / node_memory_MemTotal_bytes{_S}",
           scale=100.0),
    Metric("disk_usage", "%", (0.0, 100.0),
           f"1 - node_filesystem_avail_bytes{_S} / node_filesystem_size_bytes{_S}",
           scale=100.0, agg="max"),
    Metric("tcp_throughput", "MB/s", None, f"node_network_transmit_bytes_total{_S}",
           kind="counter", scale=1e-6, agg="sum"),
    Metric("tcp_rdma_throughput", "Gbit/s", None,
           f"node_infiniband_port_data_transmitted_bytes_total{_S}", kind="counter",
           scale=8e-9, agg="sum"),
    _gpu("gpu_memory_used", "GiB", None, "DEV_FB_USED", 1 / 1024),
    _gpu("gpu_temperature", "degC", (0.0, 110.0), "DEV_GPU_TEMP"),
    _gpu("gpu_sm_activity", "1", (0.0, 1.0), "PROF_SM_ACTIVE"),
    _gpu("gpu_clocks", "MHz", None, "DEV_SM_CLOCK"),
    _gpu("gpu_fp_engine_activity", "1", (0.0, 1.0), "",
         series=f"DCGM_FI_PROF_PIPE_FP16_ACTIVE{_S} + DCGM_FI_PROF_PIPE_FP32_ACTIVE{_S}"
                f" + DCGM_FI_PROF_PIPE_FP64_ACTIVE{_S}"),
    _gpu("gpu_memory_bandwidth_utilization", "1", (0.0, 1.0), "PROF_DRAM_ACTIVE"),
    _gpu("pcie_bandwidth", "GB/s", None, "", 1e-9,
         series=f"DCGM_FI_PROF_PCIE_TX_BYTES{_S} + DCGM_FI_PROF_PCIE_RX_BYTES{_S}"),
    _gpu("pcie_usage", "%", (0.0, 100.0), "", 100 / 64e9,
         series=f"DCGM_FI_PROF_PCIE_TX_BYTES{_S} + DCGM_FI_PROF_PCIE_RX_BYTES{_S}"),
    Metric("ecn_packet_rate", "packet/s", None,
           f"node_infiniband_np_ecn_marked_roce_packets_received_total{_S}", kind="counter",
           agg="sum", transform="log1p"),
    Metric("cnp_packet_rate", "packet/s", None,
           f"node_infiniband_np_cnp_packets_sent_total{_S}", kind="counter", agg="sum",
           transform="log1p"),
)  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ROWS}
"""All metrics by canonical name, in the order of the published table."""

PUBLISHED_ORDER: tuple[str, ...] = (
    "pfc_tx_packet_rate",
    "cpu_usage",
    "gpu_duty_cycle",
    "gpu_power_draw",
    "gpu_graphics_engine_activity",
    "gpu_tensor_core_activity",
    "gpu_nvlink_bandwidth",
)
"""The seven metrics that detect, the most sensitive first (section 4.3 of the paper)."""
