"""What the monitor reads from Kubernetes and changes there. Nothing here decides anything."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

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
)
from planish.run.kube import Kube, own_namespace

LIVE = ",".join(f"status.phase!={phase}" for phase in ENDED)
"""Field selector: workflows leave many pods that have ended."""
_REQUEST_SECONDS = 10.0


class Cluster:
    """One API server under one account. A failed request is not repeated: the next call is."""

    def __init__(self, kube: Kube, config: KubernetesConfig) -> None:
        """Use a client whose namespace is that of lease and state."""
        self.kube, self.config = kube, config
        self.core, self.call = kube.core, kube.call

    @classmethod
    def connect(cls, config: KubernetesConfig) -> Cluster:
        """Connect by the kubeconfig, or by the service account of this pod."""
        kube = Kube.connect(
            config.kubeconfig,
            namespace=config.own_namespace or own_namespace() or "default",
            patience_seconds=0.0,
            request_seconds=_REQUEST_SECONDS,
        )
        return cls(kube, config)

    def pods(self, namespace: str = "") -> list[PodInfo]:
        """Return the pods of jobs that have not ended, of one namespace or of all that count.

        The server selects them by the labels that name jobs: most pods belong to no job.
        """
        allowed = self.config.namespaces
        if namespace and allowed and namespace not in allowed:
            return []
        wanted = (namespace,) if namespace else allowed
        pods: dict[str, PodInfo] = {}
        for label in self.config.job_labels:
            options = {"field_selector": LIVE, "label_selector": job_selector(label)}
            if wanted:
                pages = [
                    self.kube.items(self.core.list_namespaced_pod, n, **options) for n in wanted
                ]
            else:
                pages = [self.kube.items(self.core.list_pod_for_all_namespaces, **options)]
            for raw in itertools.chain(*pages):
                pod = parse_pod(raw, self.config)
                if pod is not None:
                    pods[pod.uid] = pod
        return list(pods.values())

    def jobs(self) -> list[JobInfo]:
        """Return all jobs that run now, one for each role, by key."""
        return group_jobs(self.pods())

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes, by name."""
        nodes = [parse_node(raw) for raw in self.kube.items(self.core.list_node)]
        return sorted(nodes, key=lambda node: node.name)

    def nodes_down(self) -> set[str]:
        """Return the names of the nodes that are not ready, or of which nothing is heard."""
        return {node.name for node in self.nodes() if not node.is_ready}

    def node(self, name: str) -> NodeInfo:
        """Return one node as it is now."""
        return parse_node(self.call(self.core.read_node, name))

    def patch_node(self, node: NodeInfo, change: Raw) -> None:
        """Merge a change into a node, if it is still the version that was read; 409 otherwise."""
        metadata = {**change.get("metadata", {}), "resourceVersion": node.version}
        patch = self.core.patch_node_status if "status" in change else self.core.patch_node
        self.call(patch, node.name, {**change, "metadata": metadata})

    def opted_in(self, namespace: str) -> Mode:
        """Return the strongest action that a namespace allows; `observe` without a valid label."""
        content = self.call(self.core.read_namespace, namespace)
        value = (content["metadata"].get("labels") or {}).get(names.OPT_IN_LABEL)
        allowed: dict[str | None, Mode] = {"mark": "mark", "cordon": "cordon", "evict": "evict"}
        return allowed.get(value, "observe")

    def evict(self, pod: PodInfo) -> None:
        """Request the eviction of the very pod that was seen; 429 when a budget holds it back."""
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
        patch = self.kube.custom.patch_namespaced_custom_object
        self.call(patch, "argoproj.io", "v1alpha1", namespace, "workflows", name, body)
