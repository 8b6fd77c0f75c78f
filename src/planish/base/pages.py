"""A small HTTP server in a thread beside the program: health, readiness and metrics.

Pages are read-only and need no password: everybody who reaches the port may read them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs


class StatusPage(NamedTuple):
    """Answer to a request."""

    status: int
    """HTTP status: 200, or 503 if a probe must fail."""
    body: bytes
    kind: str = "text/plain; charset=utf-8"


class PageServer:
    """Serves pages from threads of its own until it is closed."""

    def __init__(
        self, host: str, port: int, pages: Mapping[str, Callable[[Mapping[str, str]], StatusPage]]
    ) -> None:
        """Start to listen; port 0 picks a free one, see `self.port`.

        `pages` maps a path to a function that makes the page from the query.

        Raises:
            OSError: the server cannot listen on the address.
        """

        class Handler(BaseHTTPRequestHandler):
            timeout = 5

            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                words = {name: values[-1] for name, values in parse_qs(query).items()}
                known = f"{' '.join(pages)}\n".encode()
                page = pages[path](words) if path in pages else StatusPage(404, known)
                self.send_response(page.status)
                self.send_header("Content-Type", page.kind)
                self.send_header("Content-Length", str(len(page.body)))
                self.end_headers()
                self.wfile.write(page.body)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: probes come every few seconds."""

        class Server(ThreadingHTTPServer):
            # The server ends only after its open answers are complete.
            daemon_threads = False

            def handle_error(self, request: object, client_address: object) -> None:
                """Log nothing: a client may close its connection at any time."""

        self._server = Server((host, port), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
