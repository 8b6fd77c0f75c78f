"""Where checkpoints go: a folder and a MinIO server of our own beside it, on tmpfs or on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import urllib.request
from collections import Counter
from datetime import timedelta
from pathlib import Path

from minio import Minio as Client
from minio.deleteobjects import DeleteObject

from tests.benchmarks.checkpoint.systems import FILE_SYSTEMS, REGION
from tests.servers.run_minio import Minio

ROOTS = {"tmpfs": "/dev/shm", "disk": os.environ.get("BENCH_DISK", tempfile.gettempdir())}
BUCKET = "bench"


class Place:
    """A folder with a server; both hold nothing when the place is closed."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.root = Path(tempfile.mkdtemp(prefix="ckpt-bench-", dir=ROOTS[kind]))
        (self.root / "files").mkdir()
        (self.root / "scratch").mkdir()
        self.server = Minio(self.root / "minio" / "data")
        self.server.start()
        self.server.make_bucket(BUCKET)
        keys = self.server.access_key, self.server.secret_key
        self.client = Client(self.server.endpoint, *keys, secure=False, region=REGION)

    @property
    def environment(self) -> dict[str, str]:
        """What ranks need to use this place."""
        return {
            **self.server.environment,
            "AWS_ENDPOINT_URL": f"http://{self.server.endpoint}",
            "AWS_ACCESS_KEY_ID": self.server.access_key,
            "AWS_SECRET_ACCESS_KEY": self.server.secret_key,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "BENCH_SCRATCH": str(self.root / "scratch"),
        }

    def path(self, system: str, name: str) -> str:
        """Return where a system writes the checkpoint `name`."""
        if system in FILE_SYSTEMS:
            return str(self.root / "files" / system / name)
        return f"s3://{BUCKET}/{system}/{name}"

    def objects(self, path: str) -> dict[str, int]:
        """Return sizes in bytes by name of all that lies below a path."""
        if path.startswith("s3://"):
            prefix = path.removeprefix(f"s3://{BUCKET}/")
            found = self.client.list_objects(BUCKET, prefix, recursive=True)
            return {str(o.object_name): int(o.size or 0) for o in found}
        files = (p for p in Path(path).rglob("*") if p.is_file())
        return {str(p): p.stat().st_size for p in files}

    def remove(self, path: str) -> None:
        """Delete a checkpoint."""
        if path.startswith("s3://"):
            names = [DeleteObject(name) for name in self.objects(path)]
            for error in self.client.remove_objects(BUCKET, names):
                raise OSError(f"could not delete: {error}")
            # The server keeps what was deleted for five minutes: on tmpfs that fills the memory.
            for trash in (self.server.data / ".minio.sys/tmp/.trash").iterdir():
                shutil.rmtree(trash, ignore_errors=True)
        else:
            shutil.rmtree(path, ignore_errors=True)

    def requests(self) -> Counter[str]:
        """Return the server's own counts: S3 requests by kind, `bytes_in` and `bytes_out`."""
        url = f"http://{self.server.endpoint}/minio/metrics/v3/api/requests"
        with urllib.request.urlopen(url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        found: Counter[str] = Counter()
        for line in lines:
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            if name == "minio_api_requests_total":
                found[labels.partition('name="')[2].partition('"')[0]] += int(float(value))
            elif name == "minio_api_requests_traffic_received_bytes":
                found["bytes_in"] += int(float(value))
            elif name == "minio_api_requests_traffic_sent_bytes":
                found["bytes_out"] += int(float(value))
        return found

    def cpu_seconds(self) -> float:
        """Return the processor seconds of the server."""
        process = self.server.program.process
        assert process is not None
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        fields = stat.rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def urls(self, method: str, ranks: int, each: int) -> list[list[str]]:
        """Return presigned URLs of `each` objects for each of `ranks` ranks."""
        return [
            [
                self.client.get_presigned_url(
                    method, BUCKET, f"raw/{rank}-{number}", expires=timedelta(hours=1)
                )
                for number in range(each)
            ]
            for rank in range(ranks)
        ]

    def close(self) -> None:
        """Stop the server and delete everything."""
        self.server.kill()
        shutil.rmtree(self.root, ignore_errors=True)
