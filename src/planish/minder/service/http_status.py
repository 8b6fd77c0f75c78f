"""/healthz, /readyz and /metrics of the service."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from planish.base.errors import ConfigError
from planish.minder.service.own_metrics import OwnMetrics


class Health(Protocol):
    """What is asked of the service."""

    def is_healthy(self) -> bool:
        """Tell whether it works at all; if not, it should be restarted."""

    def is_ready(self) -> bool:
        """Tell whether it can do its work."""


class StatusServer:
    """Answers in threads of its own until it is closed."""

    def __init__(self, host: str, port: int, health: Health, metrics: OwnMetrics) -> None:
        """Listen and answer from now on.

        Args:
            host: address.
            port: 0 picks a free one, which `self.port` tells.
            health: of the service.
            metrics: of the service.

        Raises:
            ConfigError: the address can not be listened on.
        """

        class Handler(BaseHTTPRequestHandler):
            """Answers three paths."""

            timeout = 10

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, metrics.text(), "text/plain; version=0.0.4; charset=utf-8")
                elif path in ("/healthz", "/readyz"):
                    good = health.is_healthy() if path == "/healthz" else health.is_ready()
                    text = b"ok\n" if good else b"not ok\n"
                    self._answer(200 if good else 503, text, "text/plain; charset=utf-8")
                else:
                    self._answer(404, b"/healthz /readyz /metrics\n", "text/plain; charset=utf-8")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: probes come every few seconds."""

        class Server(ThreadingHTTPServer):
            """A client that goes away is nothing to tell."""

            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                """Say nothing."""

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"`server.host` and `server.port` must be free to listen on, got {host}:{port}: "
                f"{error}"
            ) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
