"""HTTP requests with a deadline for the whole request, also for a body that arrives slowly."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from planish.base.config import Section
from planish.base.errors import BackendUnavailable, ConfigError
from planish.base.telemetry import redact

_BLOCK_BYTES = 1 << 18
MAX_BYTES = 256 << 20
"""Largest body of an answer; 600,000 samples have about 20 MiB."""


class AccessConfig(Section):
    """Address and credentials of a server."""

    url: str = ""
    """URL such as `http://prometheus:9090`, with its path prefix if any; empty: no server."""
    bearer_token_file: str = ""
    """File with a token for the header `Authorization`; every request reads it again."""
    ca_file: str = ""
    """File with the certificates of trusted authorities; empty: the system's certificates."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request, e.g. `X-Scope-OrgID` of the tenant."""


@dataclass(frozen=True)
class Deadline:
    """Time by which a piece of work must be done."""

    at: float
    """Seconds of `time.monotonic()`."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the program ends."""

    @classmethod
    def after(cls, seconds: float, stop: threading.Event | None = None) -> Deadline:
        """Return the deadline in `seconds` from now."""
        return cls(time.monotonic() + seconds, stop or threading.Event())

    def sooner(self, seconds: float) -> Deadline:
        """Return the deadline in `seconds` from now, or this deadline if it is earlier."""
        return Deadline(min(self.at, time.monotonic() + seconds), self.stop)

    def left(self) -> float:
        """Return the remaining seconds.

        Raises:
            BackendUnavailable: none remain, or the program ends.
        """
        left = self.at - time.monotonic()
        if self.stop.is_set():
            raise BackendUnavailable("the monitor is being stopped", code="stopped")
        if left <= 0:
            raise BackendUnavailable("the time for this call is used up", code="timeout")
        return left


class HttpClient:
    """Connections to one server; several threads may use them."""

    def __init__(self, access: AccessConfig, *, connections: int = 4) -> None:
        """Set the address.

        Raises:
            ConfigError: the address is no HTTP URL, or the file of certificates is missing.
        """
        import urllib3

        self._access = access
        shown = redact(access.url)
        if shown != access.url:
            raise ConfigError(
                f"`url` must hold no user and no token, got {shown!r}; give `bearer_token_file`"
            )
        if not access.url.startswith(("http://", "https://")):
            raise ConfigError(f"`url` must begin with http:// or https://, got {access.url!r}")
        if access.ca_file and not Path(access.ca_file).is_file():
            raise ConfigError(f"`ca_file` must be a file, got {access.ca_file!r}")
        self._pool = urllib3.PoolManager(
            num_pools=2, maxsize=connections, retries=False, ca_certs=access.ca_file or None
        )

    def request(
        self, method: str, path: str, *, deadline: Deadline, form: str = ""
    ) -> tuple[int, bytes]:
        """Return status and body of one request; redirects are not followed.

        `form` is the body, as encoded fields.

        Raises:
            BackendUnavailable: there is no connection, or no complete answer in time.
        """
        import urllib3

        from planish.base.answers import bounded

        headers = {"Accept": "application/json", **self._access.headers}
        if form:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        if self._access.bearer_token_file:
            try:
                token = Path(self._access.bearer_token_file).read_text("utf-8").strip()
            except (OSError, ValueError) as error:
                raise BackendUnavailable(
                    f"`bearer_token_file` must be readable, got {error}", code="401"
                ) from None
            headers["Authorization"] = f"Bearer {token}"
        wait = deadline.left()
        try:
            with bounded(wait, MAX_BYTES):
                response = self._pool.request(
                    method,
                    self._access.url.rstrip("/") + path,
                    body=form.encode() or None,
                    headers=headers,
                    timeout=urllib3.Timeout(connect=min(wait, 5.0), read=wait),
                    preload_content=False,
                    redirect=False,
                )
                try:
                    pieces: list[bytes] = []
                    while piece := response.read1(_BLOCK_BYTES):
                        pieces.append(piece)
                        deadline.left()
                    return int(response.status), b"".join(pieces)
                except BaseException:
                    # The rest of this answer must not be read as the next answer.
                    response.close()
                    raise
                finally:
                    response.release_conn()
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise BackendUnavailable(
                f"`{self._access.url}` must answer, got {type(error).__name__}: "
                f"{str(error)[:200]}; is the server up, and does this address reach it?",
                code=_failure_code(error),
            ) from None


def _failure_code(error: Exception) -> str:
    """Return the error code for an exception of the HTTP library."""
    from urllib3 import exceptions

    # The class for refused connections is a subclass of urllib3's time-outs.
    if isinstance(error, (exceptions.NewConnectionError, ConnectionError)):
        return "connection"
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return "timeout"
    if isinstance(error, exceptions.SSLError):
        return "tls"
    if isinstance(error, OSError) or "aborted" in str(error).lower():
        return "connection"
    return "invalid"
