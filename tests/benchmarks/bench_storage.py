"""The store's own HTTP code against urllib3 with the SDK's signer, on a MinIO server on loopback.

Both send the same parts and ask for the same ranges, with a time limit on every MiB, and take turns
within a round; the median of the ratios of the rounds counts, since a busy machine disturbs both.
Server and client share the cores. Run: `python -m tests.benchmarks.bench_storage [--data FOLDER]
[--save]`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import statistics
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import google_crc32c
import numpy as np
import urllib3
from minio.credentials import Credentials
from minio.signer import sign_v4_s3

from planish.store import PART_BYTES, Store, open_store
from tests.benchmarks.facts import write_result
from tests.servers.run_minio import Minio

MODULE = "tests.benchmarks.bench_storage"
MIB = 1 << 20
SMALL_BYTES = 4096
_BUCKET = "bench"


class Urllib3Client:
    """Requests to one bucket by urllib3, signed by the SDK's function; no retries."""

    def __init__(self, server: Minio):
        self._host = server.endpoint
        self._keys = Credentials(server.access_key, server.secret_key)
        timeout = urllib3.Timeout(connect=5, read=60)
        self._pool = urllib3.PoolManager(retries=False, timeout=timeout, maxsize=64)

    def send(
        self,
        method: str,
        key: str,
        query: str = "",
        headers: dict[str, str] | None = None,
        body: memoryview | bytes | None = None,
        *,
        preload: bool = True,
    ) -> Any:
        """Send a request; a body goes out in slices, so that each has the time limit."""
        url = f"http://{self._host}/{_BUCKET}/{key}" + (f"?{query}" if query else "")
        now = datetime.now(UTC)
        signed = {
            "Host": self._host,
            "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
            "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ"),
            **(headers or {}),
        }
        content: Any = body
        if body is not None:
            signed["Content-Length"] = str(len(body))
        if body is not None and len(body) > MIB:
            content = (body[start : start + MIB] for start in range(0, len(body), MIB))
        signed = sign_v4_s3(
            method=method,
            url=urlsplit(url),
            region="us-east-1",
            headers=signed,
            credentials=self._keys,
            content_sha256="UNSIGNED-PAYLOAD",
            date=now,
        )
        answer = self._pool.urlopen(
            method, url, headers=signed, body=content, preload_content=preload, redirect=False
        )
        assert answer.status < 300, answer.data
        return answer

    def put(self, key: str, data: memoryview) -> None:
        """Write a small object."""
        self.send("PUT", key, headers=checksum(data), body=data)

    def put_parts(self, key: str, data: memoryview, threads: int) -> None:
        """Write an object in parts from several threads."""
        page = self.send("POST", key, "uploads=", {"x-amz-checksum-algorithm": "CRC32C"}, b"")
        upload_id = ElementTree.fromstring(page.data).findtext("{*}UploadId")
        rows: dict[int, str] = {}

        def write(number: int) -> None:
            part = data[(number - 1) * PART_BYTES : number * PART_BYTES]
            crc = checksum(part)
            query = f"partNumber={number}&uploadId={upload_id}"
            etag = self.send("PUT", key, query, crc, part).headers["ETag"]
            rows[number] = (
                f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag>"
                f"<ChecksumCRC32C>{''.join(crc.values())}</ChecksumCRC32C></Part>"
            )

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, range(1, -(-data.nbytes // PART_BYTES) + 1)))
        parts = "".join(row for _, row in sorted(rows.items()))
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        self.send("POST", key, f"uploadId={upload_id}", body=body)

    def get_into(self, key: str, start: int, target: memoryview) -> None:
        """Fill `target` from a range; each read returns what has come, within the time limit."""
        wanted = {"Range": f"bytes={start}-{start + len(target) - 1}"}
        answer = self.send("GET", key, headers=wanted, preload=False)
        done = 0
        while done < len(target):
            block = answer.read1(MIB)
            target[done : done + len(block)] = block
            done += len(block)
        answer.release_conn()

    def get_ranges(self, key: str, target: memoryview, threads: int) -> None:
        """Read an object in ranges of a part each from several threads."""
        with ThreadPoolExecutor(threads) as pool:
            list(
                pool.map(
                    lambda start: self.get_into(key, start, target[start : start + PART_BYTES]),
                    range(0, target.nbytes, PART_BYTES),
                )
            )


def checksum(data: memoryview) -> dict[str, str]:
    """Return the header with the CRC-32C of a body."""
    crc = google_crc32c.extend(0, np.frombuffer(data, np.uint8))
    return {"x-amz-checksum-crc32c": base64.b64encode(crc.to_bytes(4, "big")).decode()}


def put_parts(store: Store, key: str, data: memoryview, threads: int) -> None:
    """Write an object in parts from several threads."""
    parts = store.open_multipart(key, data.nbytes)
    size = parts.part_bytes
    with ThreadPoolExecutor(threads) as pool:
        list(
            pool.map(
                lambda number: parts.write(number, data[(number - 1) * size : number * size]),
                range(1, -(-data.nbytes // size) + 1),
            )
        )
    parts.complete()


def get_ranges(store: Store, key: str, target: memoryview, threads: int) -> None:
    """Read an object in ranges of a part each from several threads."""
    with ThreadPoolExecutor(threads) as pool:
        list(
            pool.map(
                lambda start: store.get_into(key, start, target[start : start + PART_BYTES]),
                range(0, target.nbytes, PART_BYTES),
            )
        )


Act = Callable[[], object]


def pairs(store: Store, other: Urllib3Client, size: int, count: int) -> dict[str, tuple[Act, Act]]:
    """Return each move by name, done by the store and by urllib3."""
    data = memoryview(np.random.default_rng(0).bytes(size))
    target = memoryview(bytearray(size))
    target[::4096] = bytes(len(target[::4096]))  # pages exist before the clock runs
    small = memoryview(bytearray(SMALL_BYTES))
    acts: dict[str, tuple[Act, Act]] = {}
    for threads in (1, 4):
        acts[f"parts, {threads} threads"] = (
            lambda t=threads: put_parts(store, "x", data, t),  # type: ignore[misc]
            lambda t=threads: other.put_parts("y", data, t),  # type: ignore[misc]
        )
        acts[f"ranges, {threads} threads"] = (
            lambda t=threads: get_ranges(store, "x", target, t),  # type: ignore[misc]
            lambda t=threads: other.get_ranges("y", target, t),  # type: ignore[misc]
        )
    acts["small writes"] = (
        lambda: [store.put(f"small/{n}", small) for n in range(count)],
        lambda: [other.put(f"small/{n}", small) for n in range(count)],
    )
    acts["small reads"] = (
        lambda: [store.get_into(f"small/{n}", 0, small) for n in range(count)],
        lambda: [other.get_into(f"small/{n}", 0, small) for n in range(count)],
    )
    return acts


def timed(act: Act) -> tuple[float, float]:
    """Return the seconds of the clock and of the processors of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - wall, time.process_time() - cpu


@contextlib.contextmanager
def server(data: str | None) -> Iterator[Minio]:
    """A server with its data below a folder."""
    with tempfile.TemporaryDirectory(dir=data) as folder:
        found = Minio(Path(folder) / "data")
        found.start()
        try:
            os.environ.update(found.environment)
            found.make_bucket(_BUCKET)
            yield found
        finally:
            found.kill()


def main() -> None:
    """Measure and print; with `--save` write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder for the server's files, e.g. /dev/shm")
    parser.add_argument("--mib", type=int, default=256, help="size of the large object")
    parser.add_argument("--count", type=int, default=200, help="number of small objects")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {"large_bytes": options.mib * MIB, "small_bytes": SMALL_BYTES}
    result["rounds"], result["moves"] = options.rounds, {}
    with server(options.data) as found:
        acts = pairs(
            open_store(f"s3://{_BUCKET}")[0],
            Urllib3Client(found),
            options.mib * MIB,
            options.count,
        )
        for name, (ours, theirs) in acts.items():
            rounds = [(timed(ours), timed(theirs)) for _ in range(options.rounds + 1)][1:]
            ratios = {
                kind: round(statistics.median(b[at] / a[at] for a, b in rounds), 3)
                for at, kind in enumerate(("seconds", "processor_seconds"))
            }
            result["moves"][name] = {
                "urllib3_over_ours": ratios,
                "seconds_ours": [round(a[0], 4) for a, _ in rounds],
                "seconds_urllib3": [round(b[0], 4) for _, b in rounds],
            }
            print(f"{name:18} urllib3 / ours: {ratios}")
    if options.save:
        print(write_result("bench_storage", "measured-cpu", result, MODULE))


if __name__ == "__main__":
    main()
