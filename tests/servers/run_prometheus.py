"""Start the Prometheus of Debian on a free port, fill it with samples, ask it."""

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers.program import Program, few_variables, free_port, require


def require_prometheus() -> None:
    """Skip the test on a machine that lacks the programs."""
    require("prometheus", "promtool", remedy="apt-get install prometheus, or `make tools`")


@dataclass
class PrometheusServer:
    """A running server; its configuration can be anything that Prometheus takes."""

    folder: Path
    config: str = "global: {scrape_interval: 1s}\n"
    port: int = field(default_factory=free_port)
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.program = Program(self.folder / "prometheus.log")

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
        self.program.start(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--web.enable-lifecycle",
                *self.flags,
            ],
            environment=few_variables(self.folder),
        )
        self.program.wait_for(f"{self.url}/-/ready")

    def query(self, promql: str) -> list:
        """Return the vector that a query gives now."""
        asked = urllib.parse.urlencode({"query": promql})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{asked}", timeout=10) as answer:
            return json.load(answer)["data"]["result"]

    def stop(self) -> None:
        """End it as a crash would."""
        self.program.kill()
