"""The 21 metrics of the monitor: units, limits, and queries to Prometheus.

Source: Minder, arXiv 2411.01791, section 4.1 and appendix (names of the metrics, and the seven that
the detector uses). Queries, scales and limits are ours.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["gauge", "counter"]
Transform = Literal["none", "log1p"]
Aggregation = Literal["mean", "min", "max", "spread", "sum", "count"]

WORST = "_worst"
"""Suffix of a column with the worst GPU of each machine; the column without it has the mean."""
BUSY = ("gpu_duty_cycle", "gpu_graphics_engine_activity")
"""Metrics that show whether GPUs work."""
WORK = "gpu_tensor_core_activity"
"""Metric that falls in every phase of an iteration in which GPUs do less."""
DEVICES = "gpu_count"
"""Column with the number of GPUs of each machine that send samples."""
JOB_SELECTOR = "$job_selector"
"""Placeholder in a query for the label matchers of one job's machines."""
_SELECTOR = re.compile(r"[a-zA-Z_:][\w:]*\{[^{}]*" + re.escape(JOB_SELECTOR) + r"[^{}]*\}")


@dataclass(frozen=True)
class Metric:
    """One metric of a machine."""

    name: str
    unit: str
    """Unit of the values in a frame."""
    limits: tuple[float, float] | None
    """Values that scale to 0 and 1; None: `minder train` fits them to the training frames."""
    series: str
    """PromQL with one value for each device or machine; it contains `$job_selector`."""
    kind: Kind = "gauge"
    """Kind of the series; a counter is read as its rate over 5 s."""
    scale: float = 1.0
    """Factor of the query's values."""
    offset: float = 0.0
    """Number that is added after scaling."""
    agg: Aggregation = "mean"
    """Aggregation from the devices of a machine to the machine; `spread` is the largest minus the
    smallest value."""
    transform: Transform = "none"
    """Function that is applied before the limits; `log1p` for heavy tails."""
    is_gpu: bool = False
    """True if the GPU exporter sends it."""
    nonnegative: bool = True
    """True if a negative value is a broken sample."""
    node_label: str = "node"
    """Label of the series that names the machine. The label that the GPU exporter sets itself
    (`Hostname`) may name the exporter's pod, so the scrape configuration sets `node`."""
    node_regex: str = ""
    """Regular expression whose first group is the machine, e.g. `([^:]+).*` to drop a port; empty:
    the label is the machine."""
    required: bool = False
    """True if a call without this metric has failed."""

    @property
    def selector(self) -> str:
        """First series of the query with the job's matchers; the timestamps of its samples date the
        values.
        """
        match = _SELECTOR.search(self.series)
        return match.group() if match else ""

    def machine_of(self, label: str) -> str:
        """Return the machine that a label's value names; empty if it names none."""
        if not self.node_regex:
            return label
        match = re.fullmatch(self.node_regex, label)
        return match.group(1) if match and match.groups() else ""


_SELECTED = f"{{{JOB_SELECTOR}}}"
_PCIE = ("PROF_PCIE_TX_BYTES", "PROF_PCIE_RX_BYTES")


def _gpu(
    name: str, unit: str, limits: tuple[float, float] | None, *fields: str, scale: float = 1.0
) -> Metric:
    """Return a gauge of the GPU exporter: the sum of some of its fields."""
    series = " + ".join(f"DCGM_FI_{field}{_SELECTED}" for field in fields)
    return Metric(name, unit, limits, series, scale=scale, is_gpu=True)


def _rate(
    name: str, unit: str, series: str, *, scale: float = 1.0, transform: Transform = "none"
) -> Metric:
    """Return a counter that is summed over the devices of a machine."""
    series += _SELECTED
    return Metric(name, unit, None, series, "counter", scale, agg="sum", transform=transform)


_ROWS = (
    _rate(
        "pfc_tx_packet_rate",
        "packet/s",
        "node_ethtool_transmitted_prio3_pause",
        transform="log1p",
    ),
    Metric(
        "cpu_usage",
        "%",
        (0.0, 100.0),
        f'node_cpu_seconds_total{{mode="idle",{JOB_SELECTOR}}}',
        kind="counter",
        scale=-100.0,
        offset=100.0,
    ),
    _gpu("gpu_duty_cycle", "%", (0.0, 100.0), "DEV_GPU_UTIL"),
    _gpu("gpu_power_draw", "W", None, "DEV_POWER_USAGE"),
    _gpu("gpu_graphics_engine_activity", "1", (0.0, 1.0), "PROF_GR_ENGINE_ACTIVE"),
    _gpu("gpu_tensor_core_activity", "1", (0.0, 1.0), "PROF_PIPE_TENSOR_ACTIVE"),
    _gpu(
        "gpu_nvlink_bandwidth",
        "GB/s",
        None,
        "PROF_NVLINK_TX_BYTES",
        "PROF_NVLINK_RX_BYTES",
        scale=1e-9,
    ),
    Metric(
        "memory_usage",
        "%",
        (0.0, 100.0),
        f"1 - node_memory_MemAvailable_bytes{_SELECTED} / node_memory_MemTotal_bytes{_SELECTED}",
        scale=100.0,
    ),
    Metric(
        "disk_usage",
        "%",
        (0.0, 100.0),
        f"1 - node_filesystem_avail_bytes{_SELECTED} / node_filesystem_size_bytes{_SELECTED}",
        scale=100.0,
        agg="max",
    ),
    _rate("tcp_throughput", "MB/s", "node_network_transmit_bytes_total", scale=1e-6),
    _rate(
        "tcp_rdma_throughput",
        "Gbit/s",
        "node_infiniband_port_data_transmitted_bytes_total",
        scale=8e-9,
    ),
    _gpu("gpu_memory_used", "GiB", None, "DEV_FB_USED", scale=1 / 1024),
    _gpu("gpu_temperature", "degC", (0.0, 110.0), "DEV_GPU_TEMP"),
    _gpu("gpu_sm_activity", "1", (0.0, 1.0), "PROF_SM_ACTIVE"),
    _gpu("gpu_clocks", "MHz", None, "DEV_SM_CLOCK"),
    _gpu(
        "gpu_fp_engine_activity",
        "1",
        (0.0, 1.0),
        "PROF_PIPE_FP16_ACTIVE",
        "PROF_PIPE_FP32_ACTIVE",
        "PROF_PIPE_FP64_ACTIVE",
    ),
    _gpu("gpu_memory_bandwidth_utilization", "1", (0.0, 1.0), "PROF_DRAM_ACTIVE"),
    _gpu("pcie_bandwidth", "GB/s", None, *_PCIE, scale=1e-9),
    _gpu("pcie_usage", "%", (0.0, 100.0), *_PCIE, scale=100 / 64e9),
    _rate(
        "ecn_packet_rate",
        "packet/s",
        "node_infiniband_np_ecn_marked_roce_packets_received_total",
        transform="log1p",
    ),
    _rate(
        "cnp_packet_rate",
        "packet/s",
        "node_infiniband_np_cnp_packets_sent_total",
        transform="log1p",
    ),
)


class _Metrics(dict[str, Metric]):
    """Metric by name; the column of worst GPUs has the entry of its metric."""

    def __missing__(self, name: str) -> Metric:
        if not name.endswith(WORST):
            raise KeyError(name)
        return self[name.removesuffix(WORST)]


METRICS: dict[str, Metric] = _Metrics({metric.name: metric for metric in _ROWS})
"""All metrics by name, in the order of the published table."""
_WORST_IS_HIGHEST = ("gpu_temperature",)


def device_columns(source: Metric, *, with_count: bool) -> list[Metric]:
    """Return the columns that show single GPUs of a machine; none for a metric without GPUs.

    The mean over eight GPUs hides one bad GPU. With `with_count` the number of GPUs is a column.
    """
    if not source.is_gpu or source.agg != "mean":
        return []
    worst: Aggregation = "max" if source.name in _WORST_IS_HIGHEST else "min"
    columns = [replace(source, name=source.name + WORST, agg=worst)]
    if with_count:
        columns.append(replace(source, name=DEVICES, agg="count", unit="1", scale=1.0, offset=0.0))
    return columns


def is_column(name: str) -> bool:
    """Return whether a column of a frame may have this name."""
    return name == DEVICES or name.removesuffix(WORST) in METRICS


def columns_of(metrics: Iterable[str], names: Container[str]) -> list[str]:
    """Return the metrics, each followed by the column of its worst GPUs if it is in `names`."""
    pairs = ((name, name + WORST) for name in metrics)
    return [one for name, worst in pairs for one in (name, worst) if one == name or one in names]


PUBLISHED_ORDER: tuple[str, ...] = (
    "pfc_tx_packet_rate",
    "cpu_usage",
    "gpu_duty_cycle",
    "gpu_power_draw",
    "gpu_graphics_engine_activity",
    "gpu_tensor_core_activity",
    "gpu_nvlink_bandwidth",
)
"""The seven metrics that the detector uses, the most sensitive first (section 4.3 of the paper)."""
