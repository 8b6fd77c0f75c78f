"""Start the Alertmanager of Debian on a free port, and see what it has."""

import json
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.servers.program import Program, few_variables, free_port, require

PROGRAM = "prometheus-alertmanager"


def require_alertmanager() -> None:
    """Skip the test on a machine that lacks the program."""
    require(PROGRAM, remedy=f"apt-get install {PROGRAM}, or `make tools`")


@dataclass
class AlertmanagerServer:
    """A running server that knows nothing of others."""

    folder: Path
    config: str = "route: {receiver: none}\nreceivers: [{name: none}]\n"
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.program = Program(self.folder / "alertmanager.log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "alertmanager.yaml"
        config.write_text(self.config, "utf-8")
        self.program.start(
            [
                PROGRAM,
                f"--config.file={config}",
                f"--storage.path={self.folder / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--cluster.listen-address=",
            ],
            environment=few_variables(self.folder),
        )
        self.program.wait_for(f"{self.url}/-/ready")

    def alerts(self) -> list[dict]:
        """Return all alerts that have not ended."""
        return self.ask("/api/v2/alerts")

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
        return self.ask("/api/v2/silences", body)["silenceID"]

    def expire(self, silence: str) -> None:
        """End a silence now."""
        self.ask(f"/api/v2/silence/{silence}", method="DELETE")

    def ask(self, path: str, body: dict | list | None = None, *, method: str | None = None):
        """Get a page, or post to it, and return the answer; None where it is empty."""
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def stop(self) -> None:
        """End it as a crash would."""
        self.program.kill()
