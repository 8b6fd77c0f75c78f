"""Start a MinIO server of our own on a free port, for tests and for `make demo ROOT=s3://...`."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BINARY = REPOSITORY / ".cache" / "bin" / "minio"


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Minio:
    """A running server; `environment` is what `s3://` URIs need."""

    data: Path
    port: int = field(default_factory=free_port)
    access_key: str = field(default_factory=lambda: f"key{secrets.token_hex(8)}")
    secret_key: str = field(default_factory=lambda: secrets.token_hex(20))
    settings: dict[str, str] = field(default_factory=dict)
    """Further variables of the server's environment."""
    process: subprocess.Popen | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "MINIO_ENDPOINT": self.endpoint,
            "MINIO_ACCESS_KEY": self.access_key,
            "MINIO_SECRET_KEY": self.secret_key,
            "MINIO_SECURE": "0",
        }

    def start(self) -> None:
        """Start (again) on the same data and port, and wait until it answers."""
        self.data.mkdir(parents=True, exist_ok=True)
        log = open(self.data.parent / "minio.log", "ab")  # noqa: SIM115  (the child keeps it)
        self.process = subprocess.Popen(
            [BINARY, "server", "--address", self.endpoint, self.data],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.data.parent),
                "MINIO_ROOT_USER": self.access_key,
                "MINIO_ROOT_PASSWORD": self.secret_key,
                "MINIO_BROWSER": "off",
                "MINIO_UPDATE": "off",
                "MINIO_PROMETHEUS_AUTH_TYPE": "public",
                "GOMAXPROCS": "2",
                **self.settings,
            },
            stdout=log,
            stderr=log,
        )
        log.close()
        self._wait()

    def _wait(self) -> None:
        url = f"http://{self.endpoint}/minio/health/ready"
        for _ in range(300):
            assert self.process is not None
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError((self.data.parent / "minio.log").read_text()[-2000:])

    def kill(self) -> None:
        """Kill the server as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=30)
            self.process = None

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        from minio import Minio as Client

        Client(
            self.endpoint, self.access_key, self.secret_key, secure=False, region="us-east-1"
        ).make_bucket(name)
