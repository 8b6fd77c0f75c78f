"""One message to a chat or an alert manager when a run ends; never a reason to fail."""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Mapping
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 5.0
LIMIT_SECONDS = 20.0
"""Limit for the message and its answer together; `TIMEOUT_SECONDS` limits each read alone."""


class _NoRedirect(HTTPRedirectHandler):
    """Handler that refuses redirects, which would turn the POST into a GET elsewhere."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def post(url: str, message: Mapping[str, object]) -> bool:
    """Send `message` as JSON by one POST; return whether the server accepted it.

    With an empty URL nothing is sent. The URL is a credential: the log contains no part of it.
    """
    taken: list[bool] = []
    sending = Thread(target=lambda: taken.append(_post(url, message)), daemon=True)
    sending.start()
    sending.join(LIMIT_SECONDS)
    if sending.is_alive():
        logger.warning("webhook not sent error=TimeoutError")
    return taken == [True]


def _post(url: str, message: Mapping[str, object]) -> bool:
    if not url:
        return False
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            logger.warning("webhook not sent: its URL must be http(s)://host/...; mend the secret")
            return False
        data = json.dumps(message, sort_keys=True).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "planish"}
        request = Request(url, data=data, headers=headers, method="POST")
        with build_opener(_NoRedirect).open(request, timeout=TIMEOUT_SECONDS) as answer:
            logger.info("webhook sent status=%d", answer.status)
            return True
    except (OSError, ValueError, http.client.HTTPException) as error:
        logger.warning("webhook not sent error=%s", type(error).__name__)
        return False
