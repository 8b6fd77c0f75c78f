"""Sources of access keys: our own variables, or those of AWS.

This module checks the answers of a key service, and retries its transient failures like the
store's.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import urllib3
from minio.credentials.credentials import Credentials
from minio.credentials.providers import (
    AWSConfigProvider,
    ChainedProvider,
    EnvAWSProvider,
    IamAwsProvider,
    Provider,
    StaticProvider,
)

from planish.base.errors import AccessRefused, StoreUnavailable
from planish.store.retry import Transient, describe, passes

ANSWER_SECONDS = 10.0
"""Longest wait for the next bytes of a key service."""
_AWS = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE"),
)
"""Variables of which each selects AWS's own sources of keys."""


def has_aws_keys() -> bool:
    """Return whether the environment names keys by AWS's variables."""
    return any(os.environ.get(name) for name in _AWS)


def keys_of(access_key: str, secret_key: str, session_token: str) -> Provider:
    """Return the provider of keys; an empty `access_key` takes AWS's sources.

    Its `retrieve` raises AccessRefused, or Transient if a key service may answer later.
    """
    if access_key:
        return StaticProvider(access_key, secret_key, session_token or None)
    return _AwsKeys()


class _AwsKeys(Provider):
    def __init__(self) -> None:
        self._service = service = _Service()
        last = IamAwsProvider(http_client=service)
        self._chain = ChainedProvider([EnvAWSProvider(), AWSConfigProvider(), last])

    def retrieve(self) -> Credentials:
        self._service.asked = ""
        try:
            return self._chain.retrieve()
        except (AccessRefused, Transient):
            raise
        except Exception as error:
            # The SDK does not check what it reads: a malformed answer raises almost any error.
            reason = f"{type(error).__name__}: {str(error)[:200]}"
        if self._service.asked:
            raise self._service.hiccup("an answer without keys")
        raise AccessRefused(
            "`MINIO_ACCESS_KEY` and `MINIO_SECRET_KEY` must be set, or what AWS takes in their "
            f"place must lead to keys, got {reason}"
        )


class _Service(urllib3.PoolManager):
    """Pool that sends a request to a key service once; the store's tries repeat it."""

    asked = ""
    """Address of the last request without its query, which may contain a token."""

    def urlopen(self, method: str, url: str, **options: Any) -> urllib3.BaseHTTPResponse:  # type: ignore[override]
        self.asked = urlsplit(url)._replace(query="").geturl()
        try:
            answer = super().urlopen(
                method, url, **options, redirect=False, retries=False, timeout=ANSWER_SECONDS
            )
        except urllib3.exceptions.HTTPError as error:
            raise self.hiccup(describe(error)) from None
        if answer.status < 300:
            return answer
        if answer.status == 429 or passes(answer.status, ""):
            raise self.hiccup(f"HTTP {answer.status}")
        raise AccessRefused(
            f"the service of keys at {self.asked!r} must give keys, got HTTP {answer.status}; "
            "check the role of this pod or machine"
        )

    def hiccup(self, reason: str) -> Transient:
        """Return the failure of a request that may succeed later."""
        last = StoreUnavailable(
            f"the service of keys at {self.asked!r} must give keys, got {reason}; try again later"
        )
        return Transient("keys", f"service of keys: {reason}", sent=False, last=last)
