"""Throughput of the S3 back end of checkpoints against the SDK's, on a MinIO server on loopback.

Server and client share the cores. Each system moves the same bytes, in turn, a few times; the
median counts. Run: `python -m tests.benchmarks.bench_storage [--data FOLDER] [--save]`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import minio
import numpy as np

from planish.store import PART_BYTES, Store, open_store
from tests.benchmarks.facts import write_result
from tests.servers.run_minio import Minio

MODULE = "tests.benchmarks.bench_storage"
MIB = 1 << 20
SMALL_BYTES = 4096
_BUCKET = "bench"


def put_parts(storage: Store, key: str, data: memoryview, threads: int) -> None:
    """Write an object in parts from several threads."""
    parts = storage.open_multipart(key, data.nbytes)
    size = parts.part_bytes

    def write(number: int) -> None:
        parts.write(number, data[(number - 1) * size : number * size])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(1, -(-data.nbytes // size) + 1)))
    parts.complete()


def get_ranges(storage: Store, key: str, target: memoryview, threads: int) -> None:
    """Read an object in ranges of a part each from several threads."""

    def read(start: int) -> None:
        storage.get_into(key, start, target[start : start + PART_BYTES])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(0, target.nbytes, PART_BYTES)))


def sdk_get(client: Any, key: str, target: memoryview, threads: int) -> None:
    """Read ranges by the SDK and copy them in place."""

    def read(start: int) -> None:
        size = min(PART_BYTES, target.nbytes - start)
        answer = client.get_object(_BUCKET, key, offset=start, length=size)
        try:
            target[start : start + size] = answer.read()
        finally:
            answer.close()
            answer.release_conn()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(0, target.nbytes, PART_BYTES)))


def large(storage: Store, client: Any, size: int) -> dict[str, Callable[[], None]]:
    """Return the moves of one large object by name."""
    data = memoryview(np.random.default_rng(0).bytes(size))
    target = memoryview(bytearray(size))
    target[::4096] = bytes(len(target[::4096]))  # pages exist before the clock runs
    acts: dict[str, Callable[[], None]] = {}
    for threads in (1, 2, 4):
        acts[f"put ours {threads}"] = lambda t=threads: put_parts(storage, "x", data, t)  # type: ignore[misc]
        acts[f"put sdk {threads}"] = lambda t=threads: client.put_object(  # type: ignore[misc]
            *(_BUCKET, "y", io.BytesIO(data), size),
            part_size=PART_BYTES,
            num_parallel_uploads=t,
        )
        acts[f"get ours {threads}"] = lambda t=threads: get_ranges(storage, "x", target, t)  # type: ignore[misc]
        acts[f"get sdk {threads}"] = lambda t=threads: sdk_get(client, "y", target, t)  # type: ignore[misc]
    return acts


def small(storage: Store, client: Any, count: int) -> dict[str, Callable[[], None]]:
    """Return the moves of many small objects, one after another, by name."""
    data = bytes(SMALL_BYTES)
    target = memoryview(bytearray(SMALL_BYTES))

    def sdk_read(number: int) -> None:
        answer = client.get_object(_BUCKET, f"small/{number}")
        answer.read()
        answer.close()
        answer.release_conn()

    return {
        "small put ours": lambda: each(lambda n: storage.put(f"small/{n}", data), count),
        "small put sdk": lambda: each(
            lambda n: client.put_object(_BUCKET, f"small/{n}", io.BytesIO(data), SMALL_BYTES), count
        ),
        "small get ours": lambda: each(lambda n: storage.get_into(f"small/{n}", 0, target), count),
        "small get sdk": lambda: each(sdk_read, count),
    }


def each(act: Callable[[int], Any], count: int) -> None:
    """Call `act` with 0, 1, ..."""
    for number in range(count):
        act(number)


def measure(acts: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each act, the systems taken in turn; the first round is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(repeats + 1):
        for name, act in acts.items():
            start = time.perf_counter()
            act()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with server(options.data) as found:
        storage, _ = open_store(f"s3://{_BUCKET}")
        client = minio.Minio(
            found.endpoint, found.access_key, found.secret_key, secure=False, region="us-east-1"
        )
        size = options.mib * MIB
        seconds = measure(large(storage, client, size), options.repeats)
        seconds |= measure(small(storage, client, options.count), options.repeats)
    result: dict[str, Any] = {"large_bytes": size, "small_bytes": SMALL_BYTES, "systems": {}}
    for name, found_seconds in seconds.items():
        middle = statistics.median(found_seconds)
        row: dict[str, Any] = {"seconds": [round(value, 4) for value in found_seconds]}
        if name.startswith("small"):
            row["median_milliseconds_per_object"] = round(1e3 * middle / options.count, 3)
        else:
            row["median_megabytes_per_second"] = round(size / middle / 1e6, 1)
        result["systems"][name] = row
        print(f"{name:16} {list(row.items())[1]}")
    if options.save:
        print(write_result("bench_storage", "measured-cpu", result, MODULE))


if __name__ == "__main__":
    main()
