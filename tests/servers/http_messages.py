"""Reading HTTP/1.1 messages off sockets and sending them on, with or without damage."""

import contextlib
import socket
import time
from dataclasses import dataclass
from email.utils import formatdate

_BLOCK_BYTES = 1 << 18


@dataclass
class Head:
    """The head of a request or an answer.

    Example:
        >>> head = Head(b"GET /a HTTP/1.1\\r\\nContent-Length: 5\\r\\n\\r\\n")
        >>> head.method, head.target, head.length
        ('GET', '/a', 5)
    """

    raw: bytes
    """As it is sent on: without `Expect`."""
    answers: str = ""
    """Method of the request that this answers; empty in a request."""
    expects: bool = False

    @property
    def method(self) -> str:
        return self.raw.split(b" ", 1)[0].decode("latin-1")

    @property
    def target(self) -> str:
        return self.raw.split(b" ", 2)[1].decode("latin-1")

    @property
    def length(self) -> int:
        """Bytes of the body; -1 when it comes in chunks."""
        if self.answers:
            status = self.target
            if self.answers == "HEAD" or status in {"204", "304"} or status.startswith("1"):
                return 0
        if b"chunked" in self.header("transfer-encoding").encode():
            return -1
        return int(self.header("content-length") or 0)

    def header(self, name: str) -> str:
        """Return a header's value, in lower case; empty if there is none."""
        for line in self.raw.split(b"\r\n")[1:]:
            found, _, value = line.partition(b":")
            if found.decode("latin-1").strip().lower() == name:
                return value.decode("latin-1").strip().lower()
        return ""


class Stream:
    """A socket with what has been read ahead of it."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.sock.settimeout(120)
        # Heads and bodies leave one after the other: the second must not wait for the other side.
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ahead = bytearray()

    def head(self, answers: str = "") -> Head | None:
        """Return the next head, None at the end of the connection; `100 Continue` is skipped."""
        while True:
            end = self._ahead.find(b"\r\n\r\n")
            if end < 0:
                block = self.sock.recv(_BLOCK_BYTES)
                if not block:
                    return None
                self._ahead += block
                continue
            raw = bytes(self._ahead[: end + 4])
            del self._ahead[: end + 4]
            head = Head(raw, answers)
            if answers and head.target.startswith("1"):
                continue
            if not answers and head.header("expect"):
                lines = [x for x in raw.split(b"\r\n") if not x.lower().startswith(b"expect:")]
                return Head(b"\r\n".join(lines), expects=True)
            return head

    def take(self, limit: int) -> bytes:
        """Return up to `limit` bytes, at least one.

        Raises:
            ConnectionError: the connection has ended.
        """
        if self._ahead:
            block = bytes(self._ahead[:limit])
            del self._ahead[:limit]
            return block
        block = self.sock.recv(min(limit, _BLOCK_BYTES))
        if not block:
            raise ConnectionError("ended in the middle of a message")
        return block

    def line(self) -> bytes:
        """Return a line with its end."""
        line = bytearray()
        while not line.endswith(b"\r\n"):
            line += self.take(1)
        return bytes(line)

    def skip(self, head: Head) -> None:
        """Read a body away."""
        for _ in blocks(self, head):
            pass

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.sock.sendall(data)

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self.sock.close()


def blocks(source: Stream, head: Head):
    """Yield the body as it is on the wire: (block, bytes of the body that came before it)."""
    if head.length >= 0:
        done = 0
        while done < head.length:
            block = source.take(head.length - done)
            yield block, done
            done += len(block)
        return
    while True:
        line = source.line()
        yield line, 0
        left = int(line.split(b";")[0], 16) + 2
        while left:
            block = source.take(left)
            yield block, 0
            left -= len(block)
        if int(line.split(b";")[0], 16) == 0:
            return


def relay(source: Stream, target: Stream, head: Head, fault: str) -> bool:
    """Send a body on; return whether both connections can go on.

    `fault` acts on a body of known length: `truncate` and `reset middle` end it half-way,
    `corrupt` flips a bit in its middle, `slow` sends a byte per second.
    """
    fault = fault.removesuffix(" request")
    middle = head.length // 2
    for block, done in blocks(source, head):
        data = block
        if fault in {"truncate", "reset middle"} and done + len(data) > middle:
            target.send(data[: max(0, middle - done)])
            return False
        if fault == "corrupt" and done <= middle < done + len(data):
            changed = bytearray(data)
            changed[middle - done] ^= 1
            data = bytes(changed)
        if fault == "slow":
            for value in data:
                target.send(bytes([value]))
                time.sleep(1.0)
        else:
            target.send(data)
    return True


def short_answer(status: str, body: bytes, content_type: str) -> bytes:
    """Return a whole answer."""
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"Date: {formatdate(usegmt=True)}\r\n\r\n"
    ).encode() + body
