"""The questions of `prepare` answered by a real Kubernetes API server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planish.stages.prepare.cluster import SERVICE_ACCOUNT, Permission

ACTIVE_PHASES = ("", "Pending", "Running")
"""Phases of a workflow that has not ended."""

TIMEOUT_SECONDS = 20


class KubernetesApi:
    """Meets `ClusterApi` through the official client."""

    def __init__(self, client: Any, namespace: str) -> None:
        """Use an `ApiClient` that is already configured."""
        from kubernetes.client import AuthorizationV1Api, CoreV1Api, CustomObjectsApi

        self._core = CoreV1Api(client)
        self._custom = CustomObjectsApi(client)
        self._authorization = AuthorizationV1Api(client)
        self.namespace = namespace

    @classmethod
    def from_pod(cls) -> KubernetesApi:
        """Use the service account of this pod."""
        from kubernetes import client, config

        config.load_incluster_config()
        namespace = (SERVICE_ACCOUNT / "namespace").read_text("utf-8").strip()
        return cls(client.ApiClient(), namespace)

    def allowed(self, permission: Permission, *, namespaced: bool) -> bool:
        """Ask by a SelfSubjectAccessReview."""
        attributes = {
            "group": permission.group,
            "resource": permission.resource,
            "verb": permission.verb,
        }
        if namespaced:
            attributes["namespace"] = self.namespace
        review = self._authorization.create_self_subject_access_review(
            {"spec": {"resourceAttributes": attributes}}, _request_timeout=TIMEOUT_SECONDS
        )
        return bool(review.status.allowed)

    def quotas(self) -> Sequence[Mapping[str, Mapping[str, str]]]:
        """List the ResourceQuotas of the namespace."""
        found = self._core.list_namespaced_resource_quota(
            self.namespace, _request_timeout=TIMEOUT_SECONDS
        )
        return [
            {"hard": item.status.hard or {}, "used": item.status.used or {}}
            for item in found.items
            if item.status is not None
        ]

    def nodes(self) -> Sequence[Mapping[str, str]]:
        """List the nodes that take pods."""
        found = self._core.list_node(_request_timeout=TIMEOUT_SECONDS)
        return [
            item.status.allocatable or {} for item in found.items if not item.spec.unschedulable
        ]

    def run_is_active(self, run_id: str) -> bool:
        """Look for the workflow of a run: by label with Kubeflow, by name with plain Argo."""
        for selector in (
            {"label_selector": f"pipeline/runid={run_id}"},
            {"field_selector": f"metadata.name={run_id}"},
        ):
            found = self._custom.list_namespaced_custom_object(
                *("argoproj.io", "v1alpha1", self.namespace, "workflows"),
                **selector,
                _request_timeout=TIMEOUT_SECONDS,
            )
            phases = [item.get("status", {}).get("phase", "") for item in found["items"]]
            if any(phase in ACTIVE_PHASES for phase in phases):
                return True
        return False
