"""Requests of the monitor to the Kubernetes API. This module takes no decisions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, get_args

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
"""Field selector for live pods; workflows leave many pods that have ended."""
_REQUEST_SECONDS = 10.0


class Cluster:
    """One API server under one account. A failed request is not repeated, since the next call
    follows.
    """

    def __init__(self, kube: Kube, config: KubernetesConfig) -> None:
        """Use a client; its namespace must be the namespace of lease and state."""
        self.kube, self.config = kube, config
        self.core, self.call = kube.core, kube.call

    @classmethod
    def connect(cls, config: KubernetesConfig) -> Cluster:
        """Connect with the kubeconfig, or with the service account of this pod."""
        kube = Kube.connect(
            config.kubeconfig,
            namespace=config.own_namespace or own_namespace() or "default",
            patience_seconds=0.0,
            request_seconds=_REQUEST_SECONDS,
        )
        return cls(kube, config)

    def pods(self, namespace: str = "") -> list[PodInfo]:
        """Return the live pods of jobs, in one namespace or in all configured ones.

        The server selects pods by the labels that name jobs, since most pods belong to no job.
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
        """Return all jobs that run now, one for each role, sorted by key."""
        return group_jobs(self.pods())

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes, sorted by name."""
        nodes = [parse_node(raw) for raw in self.kube.items(self.core.list_node)]
        return sorted(nodes, key=lambda node: node.name)

    def nodes_down(self) -> set[str]:
        """Return the names of the nodes that are not ready or whose state is unknown."""
        return {node.name for node in self.nodes() if not node.is_ready}

    def node(self, name: str) -> NodeInfo:
        """Return the present state of one node."""
        return parse_node(self.call(self.core.read_node, name))

    def patch_node(self, node: NodeInfo, change: Raw) -> None:
        """Merge a change into a node. The API server answers 409 if the node has changed since it
        was read.
        """
        metadata = {**change.get("metadata", {}), "resourceVersion": node.version}
        patch = self.core.patch_node_status if "status" in change else self.core.patch_node
        self.call(patch, node.name, {**change, "metadata": metadata})

    def opted_in(self, namespace: str) -> Mode:
        """Return the strongest action that a namespace allows; `observe` without a valid label."""
        content = self.call(self.core.read_namespace, namespace)
        value = (content["metadata"].get("labels") or {}).get(names.OPT_IN_LABEL)
        return next((mode for mode in get_args(Mode) if mode == value), "observe")

    def evict(self, pod: PodInfo) -> None:
        """Request the eviction of the pod with this uid; a 429 means that a budget holds it
        back.
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
        """Set annotations of an Argo workflow, which is a Kubeflow run."""
        body = {"metadata": {"annotations": dict(annotations)}}
        patch = self.kube.custom.patch_namespaced_custom_object
        self.call(patch, "argoproj.io", "v1alpha1", namespace, "workflows", name, body)
