"""A small HTTP server that does what a real one can not be made to: errors, slow or cut bodies."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    """What came in."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    number: int
    """Of this server's requests, from 1."""

    @property
    def json(self):
        return json.loads(self.body)


@dataclass(frozen=True)
class Reply:
    """What goes out."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_seconds: float = 0.0
    """Before the first byte."""
    drip_seconds: float = 0.0
    """Between two bytes of the body."""
    drips_head: bool = False
    """The drip is a header that does not end."""
    endless_mib: int = 0
    """So many MiB of spaces follow the body, whose length is not told."""
    cut_bytes: int = -1
    """The connection ends after so many bytes of the body, which is told in full length."""

    @classmethod
    def of(cls, value, **options):
        """Return a reply of JSON."""
        return cls(body=json.dumps(value).encode(), **options)


@dataclass
class ScriptedServer:
    """Listens on a free port; `answer` says what each request gets. `requests` keeps them all."""

    answer: Callable[[Request], Reply] = lambda request: Reply()
    requests: list[Request] = field(default_factory=list)
    sent_mib: int = 0
    """Of endless bodies, until the client went away."""

    def __post_init__(self):
        outer = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                with lock:
                    request = Request(
                        *(self.command, self.path, dict(self.headers), body),
                        len(outer.requests) + 1,
                    )
                    outer.requests.append(request)
                outer._send(self, outer.answer(request))

            do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

            def log_message(self, format, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request, client_address):
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    def _send(self, handler, reply):
        time.sleep(reply.delay_seconds)
        handler.send_response(reply.status)
        handler.send_header("Content-Type", "application/json")
        if reply.endless_mib:
            handler.close_connection = True
        else:
            handler.send_header("Content-Length", str(len(reply.body)))
        if reply.drips_head:
            handler.flush_headers()
            for _ in range(2000):
                handler.wfile.write(b"x")
                time.sleep(reply.drip_seconds)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if reply.cut_bytes >= 0:
            handler.wfile.write(reply.body[: reply.cut_bytes])
            handler.close_connection = True
        elif reply.drip_seconds:
            for byte in reply.body:
                handler.wfile.write(bytes([byte]))
                handler.wfile.flush()
                time.sleep(reply.drip_seconds)
        else:
            handler.wfile.write(reply.body)
        for _ in range(reply.endless_mib):
            handler.wfile.write(b" " * (1 << 20))
            self.sent_mib += 1

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)
