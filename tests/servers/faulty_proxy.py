"""A TCP proxy that breaks connections on purpose, between a client and a real server."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable


class FaultyProxy:
    """Forward connections to a server; `fault(number)` tells what connection `number` suffers.

    Faults: "" (none), "reset" (closed at once), "cut" (closed after `cut_bytes` of the answer),
    "lost" (the request arrives, its answer is swallowed), "silent" (nothing is forwarded),
    or a whole HTTP answer that is sent in place of the server's.
    """

    def __init__(self, server: str, fault: Callable[[int], str], *, cut_bytes: int = 0):
        host, _, port = server.partition(":")
        self.server = (host, int(port))
        self.fault = fault
        self.cut_bytes = cut_bytes
        self.connections = 0
        self.answered_bytes = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = "127.0.0.1:" + str(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            fault = self.fault(self.connections)
            threading.Thread(target=self._serve, args=(client, fault), daemon=True).start()

    def _serve(self, client: socket.socket, fault: str) -> None:
        if fault == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            return
        if fault.startswith("HTTP/"):
            client.recv(65536)
            client.sendall(fault.encode())
            client.close()
            return
        with contextlib.suppress(OSError), socket.create_connection(self.server) as server:
            up = threading.Thread(target=self._pump, args=(client, server, -1), daemon=True)
            if fault != "silent":
                up.start()
            self._answer(server, client, fault)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
        client.close()

    def _answer(self, server: socket.socket, client: socket.socket, fault: str) -> None:
        if fault == "silent":
            client.recv(1)
            threading.Event().wait(30)
        elif fault == "lost":
            server.recv(65536)
        else:
            self._pump(server, client, self.cut_bytes if fault == "cut" else -1)

    def _pump(self, source: socket.socket, target: socket.socket, limit: int) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source.getpeername() == self.server:
                    with self._lock:
                        self.answered_bytes += len(data)
                if 0 <= limit < sent + len(data):
                    target.sendall(data[: limit - sent])
                    return
                target.sendall(data)
                sent += len(data)


def http_answer(status: str, code: str) -> str:
    """Return an S3 error as a whole HTTP answer."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>"
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        f"Date: Sat, 01 Jan 2000 00:00:00 GMT\r\nConnection: close\r\n\r\n{body}"
    )
