"""A fleet of machines in one process, which Prometheus scrapes one by one.

Each machine has a page of its own in the form of node_exporter and dcgm-exporter.
"""

import math
import time
import zlib
from pathlib import Path

import yaml

from tests.servers.scripted_http import Reply, Request, ScriptedServer

GPUS = 2
SCRAPING = Path(__file__).resolve().parents[2] / "monitoring" / "prometheus.yaml"


class Fleet:
    """Machines whose metrics follow one wave, as those of one training job do."""

    def __init__(self, machines: tuple[str, ...]):
        self.machines = machines
        self.shifts: dict[tuple[str, str], float] = {}
        """Machine and metric to how far its values lie away."""
        self.gone: set[str] = set()
        """Machines that do not answer any more."""
        self._busy: dict[str, tuple[float, float]] = {}
        """Machine to (time of the last page, seconds of idle time until then)."""
        self.server = ScriptedServer(self._answer)

    @property
    def address(self) -> str:
        return self.server.url.removeprefix("http://")

    def scrape_config(self) -> str:
        """Return a whole configuration of Prometheus that scrapes all machines.

        What Kubernetes tells of their pods is given; the labels come from that by the rules of
        `monitoring/prometheus.yaml`.
        """
        config = yaml.safe_load(SCRAPING.read_text("utf-8"))
        (dcgm,) = (one for one in config["scrape_configs"] if one["job_name"] == "dcgm")
        # The chart of the exporter and the GPU operator label its pods differently.
        names = ("app_kubernetes_io_name", "dcgm-exporter"), ("app", "nvidia-dcgm-exporter")
        pods = [
            {
                "__metrics_path__": f"/machines/{machine}",
                f"__meta_kubernetes_pod_label_{names[i % 2][0]}": names[i % 2][1],
                "__meta_kubernetes_pod_container_port_name": "metrics",
                "__meta_kubernetes_pod_node_name": machine,
            }
            for i, machine in enumerate(self.machines)
        ]
        job = {
            "job_name": "fleet",
            "static_configs": [{"targets": [self.address], "labels": pod} for pod in pods],
            "relabel_configs": dcgm["relabel_configs"],
        }
        times = {"scrape_interval": "1s", "scrape_timeout": "1s"}
        return yaml.safe_dump({"global": times, "scrape_configs": [job]})

    def page(self, machine: str, now: float) -> str:
        """Return what an exporter of the machine says."""
        wave = math.sin(now / 4)

        def value(metric: str, base: float, swing: float) -> float:
            noise = (zlib.crc32(f"{machine} {metric} {now:.1f}".encode()) % 1000 / 500 - 1) * 0.5
            shift = self.shifts.get((machine, metric), 0.0)
            return base + swing * wave + noise * swing / 10 + shift

        # A counter must grow by what the load was in each second since the last page.
        last, idle = self._busy.get(machine, (now - 1.0, 1000.0))
        load = min(1.0, max(0.0, value("cpu_usage", 25.0, 5.0) / 100))
        idle += (now - last) * (1 - load)
        self._busy[machine] = (now, idle)
        lines = [
            "# TYPE node_cpu_seconds_total counter",
            f'node_cpu_seconds_total{{cpu="0",mode="idle"}} {idle:.6f}',
        ]
        series = {
            "gpu_duty_cycle": ("DCGM_FI_DEV_GPU_UTIL", 90.0, 6.0),
            "gpu_graphics_engine_activity": ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0.85, 0.08),
            "gpu_tensor_core_activity": ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 0.45, 0.2),
        }
        for metric, (name, base, swing) in series.items():
            lines.append(f"# TYPE {name} gauge")
            for gpu in range(GPUS):
                # Without NODE_NAME in its environment the exporter calls its pod the host.
                labels = f'{{gpu="{gpu}",Hostname="dcgm-exporter-{zlib.crc32(machine.encode())}"}}'
                lines.append(f"{name}{labels} {value(metric, base, swing):.6f}")
        return "\n".join(lines) + "\n"

    def _answer(self, request: Request) -> Reply:
        self.server.requests.clear()
        machine = request.path.removeprefix("/machines/")
        if machine in self.gone:
            return Reply(status=500)
        page = self.page(machine, time.time())
        return Reply(body=page.encode())

    def close(self) -> None:
        self.server.close()
