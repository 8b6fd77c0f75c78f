"""An HTTP proxy on loopback that counts the requests to a real S3 server and breaks chosen ones.

In a test: `with HttpProxy(minio.endpoint, [Rule("lost", kind="complete")]) as proxy:`, and then
`MINIO_ENDPOINT` is `proxy.endpoint`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from tests.servers.http_messages import Head, Stream, relay, short_answer

FAULTS = {
    "503": "answer SlowDown instead of asking the server",
    "500": "answer InternalError instead of asking the server",
    "500 after": "answer InternalError although the server has done it",
    "507": "answer that the disk is full",
    "403": "answer that the key is unknown",
    "reset": "reset the connection when the head of the request has come",
    "reset middle": "send half of the request's body on, then reset",
    "lost": "let the server do it, then reset instead of answering",
    "truncate": "end the connection after half of the answer's body",
    "corrupt": "flip one bit in the middle of the answer's body",
    "corrupt request": "flip one bit in the middle of the request's body",
    "silent": "neither send on nor answer, for `seconds`",
    "slow": "answer one byte of the body per second",
    "slow request": "send one byte of the body per second on",
    "delay": "wait for `seconds` first",
    "act": "call `act` first",
    "kill": "kill the process `pid` instead of sending on",
    "kill after": "let the server do it, then kill the process `pid` instead of answering",
    "stop": "stop the process `pid` (SIGSTOP), then go on",
}
_ON_REQUESTS = {"corrupt request", "slow request", "reset middle"}


@dataclass
class Rule:
    """Which requests suffer what.

    Example:
        >>> rule = Rule("503", kind="part", at=2, times=3)
        >>> [rule.counts_in("part", "PUT", "/b/k") for _ in range(5)]
        [False, True, True, True, False]
    """

    fault: str
    """Key of `FAULTS`, or a whole HTTP answer that is sent in place of the server's."""
    at: int = 1
    """The first of the matching requests that suffers."""
    times: int = 1
    """How many suffer from there; 0 for all."""
    kind: str = ""
    """put, part, create, complete, abort, get, head, list, delete; empty for all."""
    method: str = ""
    path: str = ""
    """Regular expression that is searched in the unescaped path."""
    pid: int = 0
    """Process for `kill` and `stop`; 0 takes the proxy's `victim`."""
    seconds: float = 30.0
    act: Callable[[], None] | None = None
    after: str = ""
    """`stop` waits, at most `seconds`, until a path was asked for in which this expression is."""
    seen: int = 0
    """Matching requests so far."""

    def counts_in(self, kind: str, method: str, path: str) -> bool:
        """Count a request if it matches, and return whether it suffers."""
        if self.kind not in {"", kind} or self.method not in {"", method}:
            return False
        if not re.search(self.path, path):
            return False
        self.seen += 1
        return self.seen >= self.at and (not self.times or self.seen < self.at + self.times)


def kind_of(method: str, target: str) -> str:
    """Return what a request to S3 does.

    Example:
        >>> kind_of("PUT", "/b/k?partNumber=1&uploadId=x"), kind_of("POST", "/b?delete=")
        ('part', 'delete')
    """
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    is_bucket = "/" not in parts.path.strip("/")
    if method == "GET":
        return "list" if is_bucket else "get"
    if method == "POST":
        return "create" if "uploads" in query else "complete" if "uploadId" in query else "delete"
    if method == "PUT":
        return "part" if "uploadId" in query else "put"
    if method == "DELETE":
        return "abort" if "uploadId" in query else "delete"
    return method.lower()


@dataclass
class _Seen:
    number: int
    kind: str
    method: str
    path: str
    fault: str = ""
    rule: Rule | None = field(default=None, repr=False)


class HttpProxy:
    """A proxy in threads of this process."""

    def __init__(self, server: str, rules: Iterable[Rule] = (), *, victim: int = 0):
        host, _, port = server.partition(":")
        self.server = (host, int(port))
        self.rules = list(rules)
        self.victim = victim
        self.counts: Counter[str] = Counter()
        """Requests by kind."""
        self.answered_bytes = 0
        """Bytes of the bodies of the server's answers."""
        self.log: list[_Seen] = []
        self.is_closed = False
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> HttpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and break every connection."""
        self.is_closed = True
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            open_sockets = list(self._sockets)
        for sock in open_sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=10)

    def total(self) -> int:
        """Return the number of requests so far."""
        return sum(self.counts.values())

    def suffered(self) -> list[str]:
        """Return the faults that have happened, in order."""
        return [seen.fault for seen in self.log if seen.fault]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        upstream: Stream | None = None
        with self._lock:
            self._sockets.add(client)
        stream = Stream(client)
        try:
            while not self.is_closed:
                head = stream.head()
                if head is None:
                    return
                if upstream is None:
                    upstream = Stream(socket.create_connection(self.server, timeout=120))
                if not self._one(stream, upstream, head):
                    return
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._sockets.discard(client)
            for found in (stream, upstream):
                if found is not None:
                    found.close()

    def _judge(self, head: Head) -> _Seen:
        path = unquote(urlsplit(head.target).path)
        kind = kind_of(head.method, head.target)
        with self._lock:
            self.counts[kind] += 1
            seen = _Seen(len(self.log) + 1, kind, head.method, path)
            self.log.append(seen)
            for rule in self.rules:
                if rule.counts_in(kind, head.method, path) and not seen.fault:
                    seen.fault, seen.rule = rule.fault, rule
        if seen.rule and seen.rule.act:
            seen.rule.act()
        return seen

    def _one(self, client: Stream, server: Stream, head: Head) -> bool:
        """Serve one request; return whether the connection can go on."""
        seen = self._judge(head)
        fault, rule = seen.fault, seen.rule or Rule("")
        if fault == "delay":
            self._ended.wait(rule.seconds)
        if fault == "silent":
            self._ended.wait(rule.seconds)
            return False
        if fault == "reset":
            return _reset(client)
        if fault.startswith("HTTP/"):
            client.skip(head)
            client.send(fault.encode())
            return False
        if fault == "stop" and rule.after:
            self._wait_for(rule.after, rule.seconds)
        if fault in {"kill", "stop"}:
            os.kill(rule.pid or self.victim, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            if fault == "kill":
                return _reset(client)
        if fault in {"500", "503", "507", "403"}:
            client.skip(head)
            client.send(error_answer(fault))
            return True
        if head.expects:
            client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        server.send(head.raw)
        if not relay(client, server, head, fault if fault in _ON_REQUESTS else ""):
            return _reset(client)
        answer = server.head(answers=head.method)
        if answer is None:
            return False
        return self._answer(client, server, answer, fault, rule)

    def _wait_for(self, path: str, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not any(re.search(path, seen.path) for seen in list(self.log)):
            if time.monotonic() > limit or self._ended.wait(0.005):
                return

    def _answer(self, client: Stream, server: Stream, answer: Head, fault: str, rule: Rule) -> bool:
        if fault in {"lost", "kill after", "500 after"}:
            server.skip(answer)
            if fault == "500 after":
                client.send(error_answer("500"))
                return True
            if fault == "kill after":
                os.kill(rule.pid or self.victim, signal.SIGKILL)
            return _reset(client)
        with self._lock:
            self.answered_bytes += max(0, answer.length)
        client.send(answer.raw)
        return relay(server, client, answer, "" if fault in _ON_REQUESTS else fault)


def error_answer(status: str) -> bytes:
    """Return an S3 error as a whole HTTP answer."""
    code, name = {
        "500": ("InternalError", "500 Internal Server Error"),
        "503": ("SlowDown", "503 Service Unavailable"),
        "507": ("XMinioStorageFull", "507 Insufficient Store"),
        "403": ("InvalidAccessKeyId", "403 Forbidden"),
    }[status]
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>proxy</Message></Error>"
    return short_answer(name, body.encode(), "application/xml")


def _reset(client: Stream) -> bool:
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False
