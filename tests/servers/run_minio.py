"""Start a MinIO server of our own on a free port, for tests and for `make demo ROOT=s3://...`."""

import contextlib
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from minio import MinioAdmin
from minio.credentials import StaticProvider

from tests.servers.program import BIN, Program, few_variables, free_port, require

BINARY = BIN / "minio"
ACTIONS = (
    *("ListBucket", "ListBucketMultipartUploads", "GetObject", "PutObject", "DeleteObject"),
    "AbortMultipartUpload",
)


def require_minio() -> None:
    """Skip the test on a machine that lacks the program."""
    require(BINARY, remedy="build it with `make servers`")


@dataclass
class Minio:
    """A running server; `environment` is what `s3://` URIs need."""

    data: Path
    port: int = field(default_factory=free_port)
    access_key: str = field(default_factory=lambda: f"key{secrets.token_hex(8)}")
    secret_key: str = field(default_factory=lambda: secrets.token_hex(20))
    settings: dict[str, str] = field(default_factory=dict)
    """Further variables of the server's environment."""

    def __post_init__(self) -> None:
        self.program = Program(self.data.parent / "minio.log")

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
            "MINIO_RETRY_SECONDS": "10",
        }

    @property
    def admin(self) -> MinioAdmin:
        """What the owner of the server may do."""
        keys = StaticProvider(self.access_key, self.secret_key)
        return MinioAdmin(endpoint=self.endpoint, credentials=keys, secure=False)

    def user_without(self, *actions: str) -> dict[str, str]:
        """Make a user who may do all that the setup of a cluster allows but these actions.

        Returns:
            The environment of the user.
        """
        name = f"user{secrets.token_hex(6)}"
        allowed = [f"s3:{action}" for action in ACTIONS if action not in actions]
        statement = {"Effect": "Allow", "Action": allowed, "Resource": ["arn:aws:s3:::*"]}
        self.admin.user_add(name, self.secret_key)
        policy = {"Version": "2012-10-17", "Statement": [statement]}
        self.admin.policy_add(name, policy=policy)
        self.admin.policy_set(name, user=name)
        return {**self.environment, "MINIO_ACCESS_KEY": name}

    def start(self) -> None:
        """Start (again) on the same data and port, and wait until it answers."""
        self.begin()
        # Also `ready` is there before keys are taken.
        self.program.wait_for(f"http://{self.endpoint}/minio/health/cluster")

    def begin(self) -> None:
        """Start it and do not wait."""
        self.data.mkdir(parents=True, exist_ok=True)
        self.program.start(
            [BINARY, "server", "--address", self.endpoint, self.data],
            environment={
                **few_variables(self.data.parent),
                "MINIO_ROOT_USER": self.access_key,
                "MINIO_ROOT_PASSWORD": self.secret_key,
                "MINIO_BROWSER": "off",
                "MINIO_UPDATE": "off",
                "MINIO_PROMETHEUS_AUTH_TYPE": "public",
                **self.settings,
            },
        )

    def kill(self) -> None:
        """Kill the server as a crash would."""
        self.program.kill()

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        from minio import Minio as Client

        Client(
            self.endpoint, self.access_key, self.secret_key, secure=False, region="us-east-1"
        ).make_bucket(name)


@contextlib.contextmanager
def server_of_few_mib(folder: Path, mib: int) -> Iterator[Minio]:
    """Start a server on a disk of its own; skips the test where that may not be mounted."""
    import pytest

    require_minio()
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", disk]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    server = Minio(disk / "data")
    try:
        server.start()
        yield server
    finally:
        server.kill()
        for _ in range(50):
            if not subprocess.run(["umount", disk], capture_output=True, check=False).returncode:
                break
            time.sleep(0.1)
