"""What the machine can do at best: copies of memory, raw uploads and downloads by the ranks."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import torch

COPY_BYTES = 128 << 20
COPY_TURNS = 7


def copy_rate(rank: int) -> dict[str, Any]:
    """Seconds of copying `COPY_BYTES` between warm buffers, median of `COPY_TURNS`."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.ones(COPY_BYTES, dtype=torch.uint8)
    seconds = []
    for _ in range(COPY_TURNS):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return {"seconds": sorted(seconds)[COPY_TURNS // 2], "num_bytes": COPY_BYTES}


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)


def _request(link: http.client.HTTPConnection, method: str, url: str, body: Any = None) -> Any:
    parts = urlsplit(url)
    link.request(method, f"{parts.path}?{parts.query}", body=body)
    return link.getresponse()


def raw_put(rank: int, urls: list[list[str]], num_bytes: int) -> dict[str, Any]:
    """Seconds in which this rank uploads its objects, one request each, nothing hashed.

    Args:
        urls: per rank, presigned URLs.
        num_bytes: size of each object.
    """
    mine = urls[rank] if rank < len(urls) else []
    body = memoryview(bytearray(num_bytes))
    started = time.perf_counter()
    if mine:
        link = _connect(mine[0])
        for url in mine:
            response = _request(link, "PUT", url, body)
            response.read()
            if response.status != http.client.OK:
                raise OSError(f"raw PUT gave {response.status} {response.reason}")
        link.close()
    return {"seconds": time.perf_counter() - started, "num_bytes": num_bytes * len(mine)}


def raw_get(rank: int, urls: list[list[str]], num_bytes: int) -> dict[str, Any]:
    """Seconds in which this rank downloads its objects into one buffer."""
    mine = urls[rank] if rank < len(urls) else []
    buffer = memoryview(bytearray(num_bytes))
    started = time.perf_counter()
    if mine:
        link = _connect(mine[0])
        for url in mine:
            response = _request(link, "GET", url)
            done = 0
            while done < num_bytes:
                count = response.readinto(buffer[done:])
                if not count:
                    raise OSError(f"raw GET ended after {done} of {num_bytes} bytes")
                done += count
            response.read()
        link.close()
    return {"seconds": time.perf_counter() - started, "num_bytes": num_bytes * len(mine)}


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "copy": copy_rate,
    "put": raw_put,
    "get": raw_get,
}
