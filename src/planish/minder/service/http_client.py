"""HTTP requests that end in time, whatever the other side does.

Every request has a deadline for the whole of it: a body that trickles in byte by byte is given up
as well. Nothing is repeated here; callers know when that makes sense.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from planish.base.config import Section
from planish.base.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    import urllib3

_BLOCK_BYTES = 1 << 18


class AccessConfig(Section):
    """How a server is reached."""

    url: str = ""
    """As `http://prometheus:9090`, with the prefix if it has one; empty: there is none."""
    bearer_token_file: str = ""
    """File with a token for the header `Authorization`; read anew for every request."""
    ca_file: str = ""
    """Certificates that the server's must be signed by; empty for those of the system."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request, for instance `X-Scope-OrgID` of the tenant."""


@dataclass(frozen=True)
class Deadline:
    """When a piece of work must be done.

    Example:
        >>> 59 < Deadline.after(60.0).left() <= 60
        True
    """

    at: float
    """By `time.monotonic()`."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the program ends."""

    @classmethod
    def after(cls, seconds: float, stop: threading.Event | None = None) -> Deadline:
        """Return the deadline in `seconds` from now."""
        return cls(time.monotonic() + seconds, stop or threading.Event())

    def sooner(self, seconds: float) -> Deadline:
        """Return the deadline in `seconds` from now, or this one if that is earlier."""
        return Deadline(min(self.at, time.monotonic() + seconds), self.stop)

    def left(self) -> float:
        """Return the seconds that are left, more than 0.

        Raises:
            BackendUnavailable: none are, or the program ends.
        """
        if self.stop.is_set():
            raise BackendUnavailable("the monitor is being stopped", code="stopped")
        left = self.at - time.monotonic()
        if left <= 0:
            raise BackendUnavailable("the time for this call is used up", code="timeout")
        return left


class HttpClient:
    """Connections to one server; may be used by several threads."""

    def __init__(
        self, access: AccessConfig, *, connections: int = 4, max_body_bytes: int = 1 << 30
    ) -> None:
        """Take the address; connects at the first request.

        Raises:
            ConfigError: the address is no HTTP URL, or the file of certificates is not readable.
        """
        import urllib3

        self._access = access
        self._max_body_bytes = max_body_bytes
        if not access.url.startswith(("http://", "https://")):
            raise ConfigError(f"`url` must begin with http:// or https://, got {access.url!r}")
        if access.ca_file and not Path(access.ca_file).is_file():
            raise ConfigError(f"`ca_file` must be a file, got {access.ca_file!r}")
        self._pool = urllib3.PoolManager(
            num_pools=2,
            maxsize=connections,
            retries=False,
            ca_certs=access.ca_file or None,
        )

    def request(
        self,
        method: str,
        path: str,
        *,
        deadline: Deadline,
        body: bytes | None = None,
        content_type: str = "",
    ) -> tuple[int, bytes]:
        """Return status and body of one request; redirects are not followed.

        Raises:
            BackendUnavailable: no connection, no whole answer in time, or one that is too large.
        """
        import urllib3
        from urllib3.exceptions import HTTPError

        url = self._access.url.rstrip("/") + path
        wait = deadline.left()
        try:
            response = self._pool.request(
                method,
                url,
                body=body,
                headers=self._headers(content_type),
                timeout=urllib3.Timeout(connect=min(wait, 5.0), read=wait),
                preload_content=False,
                redirect=False,
            )
            try:
                return int(response.status), self._read(response, deadline)
            except BaseException:
                # What is left of the answer must not be taken for the next one.
                response.close()
                raise
            finally:
                response.release_conn()
        except (HTTPError, OSError, ValueError) as error:
            code = _code(error)
            raise BackendUnavailable(
                f"`{self._access.url}` must answer, got {type(error).__name__}: "
                f"{str(error)[:200]}; is the server up, and does this address reach it?",
                code=code,
            ) from None

    def _read(self, response: urllib3.BaseHTTPResponse, deadline: Deadline) -> bytes:
        pieces: list[bytes] = []
        total = 0
        while piece := response.read1(_BLOCK_BYTES):
            pieces.append(piece)
            total += len(piece)
            if total > self._max_body_bytes:
                raise BackendUnavailable(
                    f"`{self._access.url}` must answer with at most {self._max_body_bytes} bytes; "
                    "look at fewer machines or a shorter window",
                    code="too_large",
                )
            deadline.left()
        expected = response.headers.get("Content-Length", "")
        if expected.isdigit() and total < int(expected):
            raise BackendUnavailable(
                f"`{self._access.url}` must send {expected} bytes, got {total}", code="invalid"
            )
        return b"".join(pieces)

    def _headers(self, content_type: str) -> Mapping[str, str]:
        found = {"Accept": "application/json", **self._access.headers}
        if content_type:
            found["Content-Type"] = content_type
        if self._access.bearer_token_file:
            try:
                token = Path(self._access.bearer_token_file).read_text("utf-8").strip()
            except (OSError, ValueError) as error:
                raise BackendUnavailable(
                    f"`bearer_token_file` must be readable, got {error}", code="401"
                ) from None
            found["Authorization"] = f"Bearer {token}"
        return found


def _code(error: Exception) -> str:
    """Return what kind of failure an exception of the HTTP library is."""
    from urllib3 import exceptions

    # A refused connection is a kind of timeout to the library.
    if isinstance(error, (exceptions.NewConnectionError, ConnectionError)):
        return "connection"
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return "timeout"
    if isinstance(error, exceptions.SSLError):
        return "tls"
    if isinstance(error, OSError) or "aborted" in str(error).lower():
        return "connection"
    return "invalid"
