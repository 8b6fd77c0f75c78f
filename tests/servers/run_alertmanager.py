"""Start the Alertmanager of Debian on a free port, and see what it has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.servers.run_minio import free_port
from tests.servers.run_prometheus import wait_ready

PROGRAM = "prometheus-alertmanager"
REMEDY = "apt-get install prometheus-alertmanager, or `make tools`"


def is_installed() -> bool:
    """Tell whether this machine has the program."""
    return shutil.which(PROGRAM) is not None


@dataclass
class AlertmanagerServer:
    """A running server that knows nothing of others."""

    folder: Path
    config: str = "route: {receiver: none}\nreceivers: [{name: none}]\n"
    port: int = field(default_factory=free_port)
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "alertmanager.yaml"
        config.write_text(self.config, "utf-8")
        log = open(self.folder / "alertmanager.log", "ab")  # noqa: SIM115  (the child keeps it)
        self.process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={config}",
                f"--storage.path={self.folder / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--cluster.listen-address=",
            ],
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"], "GOMAXPROCS": "2"},
        )
        log.close()
        wait_ready(f"{self.url}/-/ready", self.process, self.folder / "alertmanager.log")

    def alerts(self) -> list[dict]:
        """Return all alerts that have not ended."""
        return self._ask("/api/v2/alerts")

    def silence(self, matchers: list[dict], *, seconds: float = 600.0) -> str:
        """Silence alerts from now on, and return the silence's id."""
        now = datetime.now(UTC)
        body = {
            "matchers": matchers,
            "startsAt": now.isoformat(),
            "endsAt": (now + timedelta(seconds=seconds)).isoformat(),
            "createdBy": "test",
            "comment": "test",
        }
        return self._ask("/api/v2/silences", body)["silenceID"]

    def _ask(self, path: str, body: dict | None = None):
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def stop(self) -> None:
        """End it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=30)
            self.process = None
