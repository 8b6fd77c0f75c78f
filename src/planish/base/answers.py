"""Limits on time and size of servers' answers, for all requests in a block.

A socket's timeout starts again with every byte. In a block of `bounded`, head and body of an answer
must arrive before one deadline. The limits hold for every package that uses urllib3: those of the
store, Kubernetes, Kubeflow, Prometheus and MLflow. They do not hold outside the block.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from urllib3.connection import HTTPConnection

DOCUMENT_BYTES = 100_000_000
"""Size limit of an answer that is read as one document."""

_bounds: ContextVar[tuple[float, float] | None] = ContextVar("bounds", default=None)


@contextlib.contextmanager
def bounded(seconds: float, max_bytes: float = DOCUMENT_BYTES) -> Iterator[None]:
    """Limit answers in the block; beyond a limit urllib3 raises as for a broken connection.

    Args:
        seconds: time from now to the last byte of an answer.
        max_bytes: size of an answer with its head.
    """
    token = _bounds.set((time.monotonic() + seconds, max_bytes))
    try:
        yield
    finally:
        _bounds.reset(token)


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: Any, *words: Any, **options: Any) -> None:
        super().__init__(sock, *words, **options)
        if not (bounds := _bounds.get()):
            return
        deadline, left = bounds
        raw: Any = self.fp.raw
        wait = sock.gettimeout()
        read = raw.readinto

        def read_in_bounds(buffer: Any) -> Any:
            nonlocal left
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError
            sock.settimeout(min(seconds, wait or seconds))
            count = read(buffer)
            left -= count
            if left < 0:
                raise OSError("the answer is too long")
            return count

        raw.readinto = read_in_bounds


HTTPConnection.response_class = _Answer
