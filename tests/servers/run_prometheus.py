"""Start the Prometheus of Debian on a free port, fill it with samples, ask it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers.run_minio import free_port

PROGRAMS = ("prometheus", "promtool")
REMEDY = "apt-get install prometheus, or `make tools`"


def is_installed() -> bool:
    """Tell whether this machine has the programs."""
    return all(shutil.which(program) for program in PROGRAMS)


@dataclass
class PrometheusServer:
    """A running server; its configuration can be anything that Prometheus takes."""

    folder: Path
    config: str = "global: {scrape_interval: 1s}\n"
    port: int = field(default_factory=free_port)
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def backfill(self, lines: Iterable[str]) -> None:
        """Put samples of the past into the store, before the start.

        Args:
            lines: in the OpenMetrics form, without the last line `# EOF`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "samples.txt"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.write("# EOF\n")
        command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet"]
        subprocess.run([*command, path, self.folder / "data"], check=True, capture_output=True)
        path.unlink()

    def start(self) -> None:
        """Start and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "prometheus.yaml"
        config.write_text(self.config, "utf-8")
        log = open(self.folder / "prometheus.log", "ab")  # noqa: SIM115  (the child keeps it)
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--web.enable-lifecycle",
            ],
            stdout=log,
            stderr=log,
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "GOMAXPROCS": "2"},
        )
        log.close()
        wait_ready(f"{self.url}/-/ready", self.process, self.folder / "prometheus.log")

    def query(self, promql: str) -> list:
        """Return the vector that a query gives now."""
        asked = urllib.parse.urlencode({"query": promql})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{asked}", timeout=10) as answer:
            return json.load(answer)["data"]["result"]

    def stop(self) -> None:
        """End it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=30)
            self.process = None


def wait_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    """Wait until a server answers, or say what it logged."""
    for _ in range(300):
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(log.read_text()[-2000:])
