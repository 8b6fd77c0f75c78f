"""The API server of Kubernetes: the one client of stages, gangs, commands and the monitor.

Answers are the server's JSON. A request is retried until it is answered or the caller's patience
ends, so that a restart of the API server costs no training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from planish.base.answers import bounded
from planish.base.errors import ClusterError, ConfigError

logger = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder of the account's files in every pod with a service account."""

REQUEST_SECONDS = 20.0
PATIENCE_SECONDS = 600.0
"""Seconds without an answer after which a request fails."""
STARTING_SECONDS = 30.0
"""Seconds after a silence in which an API server may wrongly forbid everything."""
MAX_PAUSE_SECONDS = 5.0
PAGE_ITEMS = 500


def in_pod() -> bool:
    """Tell whether this process runs in a pod with a service account."""
    return (SERVICE_ACCOUNT / "token").is_file()


def own_namespace() -> str:
    """Return the namespace of this pod; empty outside one."""
    file = SERVICE_ACCOUNT / "namespace"
    return file.read_text("utf-8").strip() if file.is_file() else ""


class Kube:
    """One API server under one account, and the namespace in which the caller works."""

    def __init__(
        self,
        settings: Any,
        namespace: str = "",
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        """Make a client from a `kubernetes.client.Configuration`; send nothing yet.

        A request is retried for `patience_seconds`; with 0 it is sent once. `namespace` is the
        namespace of the caller's objects.
        """
        from kubernetes import client

        class MergingClient(client.ApiClient):  # type: ignore[misc]
            """Client that sends merge patches where the package would prefer JSON patches."""

            def select_header_content_type(self, content_types: list[str]) -> Any:
                merge = "application/merge-patch+json"
                if merge in content_types:
                    return merge
                return super().select_header_content_type(content_types)

        self.client = MergingClient(settings)
        self.core = client.CoreV1Api(self.client)
        self.custom = client.CustomObjectsApi(self.client)
        self.namespace = namespace
        self.patience_seconds, self.request_seconds = patience_seconds, request_seconds
        self._silent_at = -math.inf

    @classmethod
    def connect(cls, kubeconfig: str = "", **options: Any) -> Self:
        """Connect by a kubeconfig, or by the service account and in the namespace of this pod."""
        from kubernetes import client
        from kubernetes.config import ConfigException, load_incluster_config, load_kube_config

        settings = client.Configuration()
        settings.retries = False
        try:
            if kubeconfig:
                load_kube_config(kubeconfig, client_configuration=settings)
            else:
                load_incluster_config(client_configuration=settings)
        except (ConfigException, OSError) as error:
            raise ConfigError(
                "the API server must be named by a kubeconfig or by the service account of this "
                f"pod, got {kubeconfig!r} ({error})"
            ) from None
        if not kubeconfig:
            options.setdefault("namespace", own_namespace())
        return cls(settings, **options)

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Send a request until it is answered; return the JSON of the answer, or its text.

        Raises:
            ClusterError: refused, or not answered within the patience (`.status` is then 0).
        """
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        request = request_name(function, arguments)
        deadline, pause = time.monotonic() + self.patience_seconds, 0.5
        while True:
            try:
                with bounded(self.request_seconds):
                    answer = function(
                        *arguments,
                        **options,
                        _preload_content=False,
                        _request_timeout=math.ceil(self.request_seconds),
                    )
                    text = answer.data.decode(errors="replace")
                is_json = answer.headers.get("Content-Type", "").startswith("application/json")
                return json.loads(text) if is_json else text
            except ApiException as error:
                status, reason = int(error.status or 0), f"{error.status} {error.reason}"
                # A server that has just started has not loaded its access rules, and forbids all.
                is_starting = time.monotonic() - self._silent_at < STARTING_SECONDS
                is_refusal = 0 < status < 500 and status != 429
                if self.patience_seconds == 0 or (
                    is_refusal and not (status == 403 and is_starting)
                ):
                    raise refusal(request, error) from None
            except (HTTPError, OSError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
                self._silent_at = time.monotonic()
            if time.monotonic() + pause > deadline:
                seconds = self.patience_seconds or self.request_seconds
                raise ClusterError(
                    f"the API server must answer `{request}` within {seconds:g} s, got "
                    f"{reason:.300}; run this again once it answers"
                )
            logger.warning("API server does not answer pause=%.1f error=%.200s", pause, reason)
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def find(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Do as `call`, but return None if the object does not exist."""
        try:
            return self.call(function, *arguments, **options)
        except ClusterError as error:
            if error.status != 404:
                raise
            return None

    def items(
        self, function: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the items of a list, page by page; none for a kind that is not installed."""
        options["limit"] = PAGE_ITEMS
        while (page := self.find(function, *arguments, **options)) is not None:
            yield from page.get("items") or ()
            options["_continue"] = page.get("metadata", {}).get("continue")
            if not options["_continue"]:
                return

    def workflows(self, run_id: str) -> Iterator[dict[str, Any]]:
        """Yield the workflows of a run, by label in Kubeflow and by name in plain Argo."""
        place = ("argoproj.io", "v1alpha1", self.namespace, "workflows")
        listing = self.custom.list_namespaced_custom_object
        yield from self.items(listing, *place, label_selector=f"pipeline/runid={run_id}")
        yield from self.items(listing, *place, field_selector=f"metadata.name={run_id}")


def request_name(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Return the name of a request for people: `read namespaced pod`, `create jobs.batch`."""
    words = function.__name__.replace("_", " ")
    if not words.endswith("custom object"):
        return words
    plural = arguments[3] if "namespaced" in words else arguments[2]
    return f"{words.partition(' ')[0]} {plural}.{arguments[0]}"


def refusal(request: str, error: Any) -> ClusterError:
    """Return the error for an `ApiException`."""
    message = str(error.body or error.reason or "no answer")[:300]
    with contextlib.suppress(ValueError, TypeError, KeyError):
        message = str(json.loads(error.body)["message"])
    pause = str((error.headers or {}).get("Retry-After", ""))
    return ClusterError(
        f"the API server refused to {request}: {error.status} {message}",
        status=int(error.status or 0),
        retry_after=float(pause) if pause.isdecimal() else 0.0,
    )
