"""The Kubernetes API server, as far as the monitor needs it.

Every request goes through `Cluster.call`, which counts it for the breaker and turns the errors of
the client into ours. Nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planish.base.errors import ClusterError, ConfigError
from planish.minder.act.config import Mode
from planish.minder.act.kube import names
from planish.minder.act.kube.config import KubernetesConfig
from planish.minder.act.kube.jobs import group_jobs
from planish.minder.act.kube.objects import JobInfo, NodeInfo, PodInfo
from planish.minder.act.kube.parse import ENDED, Raw, parse_node, parse_pod, requests_of, selector

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DRY_RUN_ALL = "All"
"""What the API server takes for: check it, and change nothing."""
LIVE = ",".join(f"status.phase!={phase}" for phase in ENDED)
"""Field selector: workflows leave many pods that have ended."""

Listener = Callable[[bool], None]
"""Called after every request with whether the API server did its part."""


def _client(config: KubernetesConfig) -> Any:
    """Return a configured client that sends merge patches."""
    from kubernetes import client
    from kubernetes.config import (
        ConfigException,
        load_incluster_config,
        load_kube_config,
    )

    class MergingClient(client.ApiClient):  # type: ignore[misc]
        """The client names the first type of patch that exists, which is one of lists of steps;
        workflows know no other that it offers.
        """

        def select_header_content_type(self, content_types: list[str]) -> Any:
            if "application/merge-patch+json" in content_types:
                return "application/merge-patch+json"
            return super().select_header_content_type(content_types)

    settings = client.Configuration()
    settings.retries = 1
    try:
        if config.kubeconfig:
            load_kube_config(config.kubeconfig, client_configuration=settings)
        else:
            load_incluster_config(client_configuration=settings)
    except (ConfigException, OSError) as error:
        raise ConfigError(
            f"the API server must be named by `kubernetes.kubeconfig` or by the service account of "
            f"this pod, got {config.kubeconfig!r} ({error})"
        ) from None
    return MergingClient(settings)


class Cluster:
    """One API server under one account."""

    def __init__(self, client: Any, config: KubernetesConfig) -> None:
        """Use a client of `kubernetes` that is already configured."""
        from kubernetes.client import CoordinationV1Api, CoreV1Api, CustomObjectsApi

        self.config = config
        self.core = CoreV1Api(client)
        self.coordination = CoordinationV1Api(client)
        self._custom = CustomObjectsApi(client)
        self.listener: Listener = lambda succeeded: None

    @classmethod
    def connect(cls, config: KubernetesConfig) -> Cluster:
        """Connect as the configuration says.

        Raises:
            ConfigError: no such kubeconfig, or no service account.
        """
        return cls(_client(config), config)

    @property
    def own_namespace(self) -> str:
        """Namespace of lease and state."""
        if self.config.own_namespace:
            return self.config.own_namespace
        return NAMESPACE_FILE.read_text("utf-8").strip() if NAMESPACE_FILE.exists() else "default"

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Do one request and return the JSON of the answer.

        Raises:
            ClusterError: refused or unanswered; `.status` tells which.
        """
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        timeout = self.config.request_timeout_seconds
        try:
            answer = function(
                *arguments, **options, _preload_content=False, _request_timeout=timeout
            )
            found = json.loads(answer.data)
        except ApiException as error:
            # Refusals are answers; only a server that fails counts against itself.
            self.listener(0 < (error.status or 0) < 500)
            raise _refused(function, error) from None
        except (HTTPError, OSError, ValueError) as error:
            self.listener(False)
            raise ClusterError(
                f"the API server must answer {function.__name__} within {timeout:g} s, got "
                f"{type(error).__name__}: {error}"
            ) from None
        self.listener(True)
        return found

    def _pages(
        self, function: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Iterator[Raw]:
        """Yield the items of a list, page by page."""
        options["limit"] = self.config.page_size
        while True:
            page = self.call(function, *arguments, **options)
            yield from page.get("items") or ()
            options["_continue"] = page.get("metadata", {}).get("continue")
            if not options["_continue"]:
                return

    def _live_pods(self, namespaces: Sequence[str] = (), label: str = "") -> Iterator[Raw]:
        """Yield the pods that have not ended, in some namespaces (none: in all), with a label."""
        options = {"field_selector": LIVE, **({"label_selector": label} if label else {})}
        if not namespaces:
            yield from self._pages(self.core.list_pod_for_all_namespaces, **options)
        for namespace in namespaces:
            yield from self._pages(self.core.list_namespaced_pod, namespace, **options)

    def pods(self, namespace: str = "") -> list[PodInfo]:
        """Return the pods of jobs that have not ended, of one namespace or of all that count.

        The server picks them by the labels that name jobs: most pods of a cluster are of none.
        """
        allowed = self.config.namespaces
        if namespace and allowed and namespace not in allowed:
            return []
        namespaces = (namespace,) if namespace else allowed
        found: dict[str, PodInfo] = {}
        for label in self.config.job_labels:
            for raw in self._live_pods(namespaces, selector(label)):
                pod = parse_pod(raw, self.config)
                if pod is not None:
                    found[pod.uid] = pod
        return list(found.values())

    def jobs(self) -> list[JobInfo]:
        """Return all jobs that run now, one for each role, by key."""
        return group_jobs(self.pods())

    def used(self) -> dict[str, dict[str, float]]:
        """Return what the pods of each node ask for together: node to resource to amount."""
        total: dict[str, dict[str, float]] = {}
        for raw in self._live_pods():
            node = raw.get("spec", {}).get("nodeName")
            if not node:
                continue
            of_node = total.setdefault(node, {})
            for name, amount in requests_of(raw["spec"]).items():
                of_node[name] = of_node.get(name, 0.0) + amount
        return total

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes, by name."""
        found = [parse_node(raw) for raw in self._pages(self.core.list_node)]
        return sorted(found, key=lambda node: node.name)

    def node(self, name: str) -> NodeInfo:
        """Return one node as it is now.

        Raises:
            ClusterError: 404 for a node that is no more.
        """
        return parse_node(self.call(self.core.read_node, name))

    def patch_node(self, node: NodeInfo, change: Raw, *, dry_run: bool = False) -> NodeInfo:
        """Merge a change into a node, if it is still the one that was read.

        Raises:
            ClusterError: 409 when somebody else was faster; 403 without the right.
        """
        metadata = {**change.get("metadata", {}), "resourceVersion": node.version}
        options = {"dry_run": DRY_RUN_ALL} if dry_run else {}
        body = {**change, "metadata": metadata}
        return parse_node(self.call(self.core.patch_node, node.name, body, **options))

    def opted_in(self, namespace: str) -> Mode:
        """Return the most that a namespace allows: `observe` where it says nothing we know."""
        found = self.call(self.core.read_namespace, namespace)
        value = (found["metadata"].get("labels") or {}).get(names.OPT_IN_LABEL, "observe")
        allowed: dict[str, Mode] = {"cordon": "cordon", "evict": "evict"}
        return allowed.get(value, "observe")

    def evict(self, pod: PodInfo, *, dry_run: bool = False) -> None:
        """Ask for the eviction of one pod; only the very pod that was seen.

        Raises:
            ClusterError: 429 when a disruption budget holds it back, 404 or 409 when it is gone.
        """
        body: dict[str, Any] = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        if dry_run:
            body["deleteOptions"]["dryRun"] = [DRY_RUN_ALL]
        options = {"dry_run": DRY_RUN_ALL} if dry_run else {}
        self.call(
            self.core.create_namespaced_pod_eviction, pod.name, pod.namespace, body, **options
        )

    def create_event(self, namespace: str, body: Raw) -> None:
        """Create an Event."""
        self.call(self.core.create_namespaced_event, namespace, body)

    def patch_event(self, namespace: str, name: str, body: Raw) -> None:
        """Change an Event."""
        self.call(self.core.patch_namespaced_event, name, namespace, body)

    def annotate_workflow(self, namespace: str, name: str, annotations: Mapping[str, str]) -> None:
        """Set annotations of a workflow of Argo, which is what a Kubeflow run is."""
        self.call(
            self._custom.patch_namespaced_custom_object,
            *("argoproj.io", "v1alpha1", namespace, "workflows", name),
            {"metadata": {"annotations": dict(annotations)}},
        )


def _refused(function: Callable[..., Any], error: Any) -> ClusterError:
    """Return an error of the client as ours, with the reason that the server gives."""
    reason = error.reason or "no answer"
    with contextlib.suppress(ValueError, TypeError, KeyError):
        reason = json.loads(error.body)["message"]
    after = str((error.headers or {}).get("Retry-After", ""))
    return ClusterError(
        f"the API server refused {function.__name__}: {error.status} {reason}",
        status=int(error.status or 0),
        retry_after=float(after) if after.isdecimal() else 0.0,
    )
