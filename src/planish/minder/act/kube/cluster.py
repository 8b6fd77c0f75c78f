"""The Kubernetes API server, as far as the monitor needs it.

Every request goes through `Cluster.call`, which counts it for the breaker and turns the errors of
the client library into `ClusterError`. Nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planish.base.errors import ClusterError, ConfigError
from planish.minder.act.config import KubernetesConfig, Mode
from planish.minder.act.kube import names
from planish.minder.act.kube.objects import (
    ENDED,
    JobInfo,
    NodeInfo,
    PodInfo,
    Raw,
    group_jobs,
    job_selector,
    parse_node,
    parse_pod,
    requests_of,
)

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LIVE = ",".join(f"status.phase!={phase}" for phase in ENDED)
"""Field selector: workflows leave many pods that have ended."""


class Cluster:
    """One API server under one account."""

    def __init__(self, client: Any, config: KubernetesConfig) -> None:
        """Use a client of `kubernetes` that is already configured."""
        from kubernetes.client import CoordinationV1Api, CoreV1Api, CustomObjectsApi

        self.config = config
        self.core = CoreV1Api(client)
        self.coordination = CoordinationV1Api(client)
        self._custom = CustomObjectsApi(client)
        self.listener: Callable[[bool], None] = lambda succeeded: None
        """Called after every request with whether the API server did its part."""

    @classmethod
    def connect(cls, config: KubernetesConfig) -> Cluster:
        """Connect by the kubeconfig, or by the service account of this pod.

        Raises:
            ConfigError: no such kubeconfig, or no service account.
        """
        from kubernetes import client
        from kubernetes.config import ConfigException, load_incluster_config, load_kube_config

        class MergingClient(client.ApiClient):  # type: ignore[misc]
            """Sends merge patches. The library would send lists of steps, which it names first."""

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
                "the API server must be named by `kubernetes.kubeconfig` or by the service account "
                f"of this pod, got {config.kubeconfig!r} ({error})"
            ) from None
        return cls(MergingClient(settings), config)

    @property
    def own_namespace(self) -> str:
        """Namespace of lease and state."""
        if self.config.own_namespace:
            return self.config.own_namespace
        return NAMESPACE_FILE.read_text("utf-8").strip() if NAMESPACE_FILE.exists() else "default"

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Send one request and return the JSON of the answer.

        Raises:
            ClusterError: refused or unanswered; `.status` is 0 without an answer.
        """
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        timeout = self.config.request_timeout_seconds
        try:
            answer = function(
                *arguments, **options, _preload_content=False, _request_timeout=timeout
            )
            content = json.loads(answer.data)
        except ApiException as error:
            # A refusal is an answer; only failures of the server itself count for the breaker.
            self.listener(0 < (error.status or 0) < 500)
            reason = error.reason or "no answer"
            with contextlib.suppress(ValueError, TypeError, KeyError):
                reason = json.loads(error.body)["message"]
            pause = str((error.headers or {}).get("Retry-After", ""))
            raise ClusterError(
                f"the API server refused {function.__name__}: {error.status} {reason}",
                status=int(error.status or 0),
                retry_after=float(pause) if pause.isdecimal() else 0.0,
            ) from None
        except (HTTPError, OSError, ValueError) as error:
            self.listener(False)
            raise ClusterError(
                f"the API server must answer {function.__name__} within {timeout:g} s, got "
                f"{type(error).__name__}: {error}"
            ) from None
        self.listener(True)
        return content

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

        The server selects them by the labels that name jobs: most pods belong to no job.
        """
        allowed = self.config.namespaces
        if namespace and allowed and namespace not in allowed:
            return []
        namespaces = (namespace,) if namespace else allowed
        pods: dict[str, PodInfo] = {}
        for label in self.config.job_labels:
            for raw in self._live_pods(namespaces, job_selector(label)):
                pod = parse_pod(raw, self.config)
                if pod is not None:
                    pods[pod.uid] = pod
        return list(pods.values())

    def jobs(self) -> list[JobInfo]:
        """Return all jobs that run now, one for each role, by key."""
        return group_jobs(self.pods())

    def used(self) -> dict[str, dict[str, float]]:
        """Return what the pods of each node request together: node to resource to amount."""
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
        nodes = [parse_node(raw) for raw in self._pages(self.core.list_node)]
        return sorted(nodes, key=lambda node: node.name)

    def node(self, name: str) -> NodeInfo:
        """Return one node as it is now.

        Raises:
            ClusterError: 404 for a node that does not exist any more.
        """
        return parse_node(self.call(self.core.read_node, name))

    def patch_node(self, node: NodeInfo, change: Raw) -> NodeInfo:
        """Merge a change into a node, if it is still the version that was read.

        Raises:
            ClusterError: 409 when somebody else changed it first; 403 without the right.
        """
        metadata = {**change.get("metadata", {}), "resourceVersion": node.version}
        body = {**change, "metadata": metadata}
        return parse_node(self.call(self.core.patch_node, node.name, body))

    def opted_in(self, namespace: str) -> Mode:
        """Return the strongest action that a namespace allows; `observe` without a valid label."""
        content = self.call(self.core.read_namespace, namespace)
        value = (content["metadata"].get("labels") or {}).get(names.OPT_IN_LABEL, "observe")
        allowed: dict[str, Mode] = {"cordon": "cordon", "evict": "evict"}
        return allowed.get(value, "observe")

    def evict(self, pod: PodInfo) -> None:
        """Request the eviction of the very pod that was seen, not of a new one of its name.

        Raises:
            ClusterError: 429 when a disruption budget holds it back, 404 or 409 when it is gone.
        """
        body: dict[str, Any] = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        create = self.core.create_namespaced_pod_eviction
        self.call(create, pod.name, pod.namespace, body)

    def annotate_workflow(self, namespace: str, name: str, annotations: Mapping[str, str]) -> None:
        """Set annotations of a workflow of Argo, which is what a Kubeflow run is."""
        body = {"metadata": {"annotations": dict(annotations)}}
        patch = self._custom.patch_namespaced_custom_object
        self.call(patch, "argoproj.io", "v1alpha1", namespace, "workflows", name, body)

    def read_config_map(self, name: str) -> dict[str, str]:
        """Return the data of a ConfigMap in the monitor's own namespace.

        Raises:
            ClusterError: 404 when it does not exist.
        """
        namespace = self.own_namespace
        try:
            content = self.call(self.core.read_namespaced_config_map, name, namespace)
        except ClusterError as error:
            if error.status != 404:
                raise
            raise ClusterError(
                f"the ConfigMap {namespace}/{name} must exist, but does not; apply "
                "manifests/base/minder",
                status=404,
            ) from None
        return content.get("data") or {}

    def patch_config_map(self, name: str, data: Mapping[str, str | None]) -> None:
        """Change keys of a ConfigMap in the monitor's own namespace; None removes a key."""
        patch = self.core.patch_namespaced_config_map
        self.call(patch, name, self.own_namespace, {"data": dict(data)})
