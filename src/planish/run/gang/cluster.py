"""Requests of a stage that submits gangs to the API server."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from planish.base.answers import bounded
from planish.base.errors import ClusterError, ConfigError
from planish.run.gang.manifests import GANG_LABEL, RUN_LABEL, Launcher
from planish.run.kube import PATIENCE_SECONDS, REQUEST_SECONDS, Kube, in_pod

logger = logging.getLogger(__name__)

WATCH_SECONDS = 60
"""Seconds after which a watch is renewed; a lost event delays nothing for longer."""
POLL_SECONDS = 5.0
"""Pause between two requests if watching fails."""
LOG_LINES = 60

PERMISSIONS: tuple[tuple[str, str, str], ...] = (
    ("", "pods", "get"),
    ("", "pods", "list"),
    ("", "pods/log", "get"),
    ("", "services", "create"),
    ("", "services", "get"),
    ("batch", "jobs", "create"),
    ("batch", "jobs", "get"),
    ("batch", "jobs", "watch"),
    ("batch", "jobs", "patch"),
    ("batch", "jobs", "delete"),
)
"""Group, resource and verb of the requests for jobs; the role in `manifests/runs` grants them."""

RESOURCES: dict[Launcher, tuple[str, str, str]] = {
    "job": ("batch", "v1", "jobs"),
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
}
"""Group, version and plural of a gang's job, by launcher."""
TRAINER_PERMISSIONS = tuple(
    ("trainer.kubeflow.org", "trainjobs", verb) if group == "batch" else (group, resource, verb)
    for group, resource, verb in PERMISSIONS
)
"""Permissions if Kubeflow Trainer makes the jobs."""


class GangCluster(Kube):
    """The namespace of a stage's pod."""

    def __init__(
        self,
        settings: Any,
        namespace: str,
        pod: str,
        *,
        launcher: Launcher = "job",
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Make a client for the gangs of the named pod, by a `kubernetes` configuration."""
        super().__init__(settings, namespace, patience_seconds=patience_seconds)
        self.pod, self.launcher = pod, launcher

    @classmethod
    def from_pod(cls, launcher: Launcher) -> GangCluster:
        """Use the service account of this pod."""
        pod = os.environ.get("POD_NAME", "")
        if not pod or not in_pod():
            raise ConfigError(
                "`train.num_nodes` above 1 must be trained by the pods of a cluster, got a process "
                "outside of one; submit the run to a cluster, or set `train.num_nodes=1` and "
                "`train.num_processes`"
            )
        return cls.connect(pod=pod, launcher=launcher)

    def with_other_launcher(self) -> GangCluster:
        """Return a client of the same namespace for the other launcher."""
        other = copy.copy(self)
        other.launcher = "job" if self.launcher == "trainjob" else "trainjob"
        return other

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Do as `Kube.call`.

        Raises:
            ConfigError: the account may not do this, or the API server refuses the object.
            ClusterError: another refusal, or no answer within the patience (`.status` is then 0).
        """
        try:
            return super().call(function, *arguments, **options)
        except ClusterError as error:
            if error.status == 403:
                raise ConfigError(
                    f"the service account of the run must be allowed what it asks, but {error}; "
                    "apply the overlay of manifests/ for this namespace"
                ) from None
            if error.status in (400, 422):
                raise ConfigError(
                    f"the API server must accept the gang, but {error}; change the profile, or the "
                    "quota or policy that it names"
                ) from None
            raise

    @property
    def jobs(self) -> tuple[str, str, str, str]:
        """Path of the jobs: group, version, namespace and plural."""
        group, version, plural = RESOURCES[self.launcher]
        return group, version, self.namespace, plural

    def own_pod(self) -> dict[str, Any]:
        """Return the pod of the stage."""
        pod: dict[str, Any] = self.call(self.core.read_namespaced_pod, self.pod, self.namespace)
        return pod

    def create_job(self, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
        """Create a job and return it; None if its name exists."""
        create = self.custom.create_namespaced_custom_object
        try:
            job: dict[str, Any] = self.call(create, *self.jobs, manifest)
        except ClusterError as error:
            if error.status == 404 and self.launcher == "trainjob":
                raise ConfigError(
                    "the cluster must have the resource trainjobs.trainer.kubeflow.org, but has "
                    "not; install Kubeflow Trainer 2.1, or set `train.launcher=job`"
                ) from None
            if error.status != 409:
                raise
            return None
        return job

    def create_service(self, manifest: Mapping[str, Any]) -> bool:
        """Create a service; False if its name exists."""
        try:
            self.call(self.core.create_namespaced_service, self.namespace, manifest)
        except ClusterError as error:
            if error.status != 409:
                raise
            return False
        return True

    def service(self, name: str) -> dict[str, Any] | None:
        """Return the current service; None if there is none."""
        found: dict[str, Any] | None = self.find(
            self.core.read_namespaced_service, name, self.namespace
        )
        return found

    def job(self, name: str) -> dict[str, Any] | None:
        """Return the current job; None if there is none."""
        found: dict[str, Any] | None = self.find(
            self.custom.get_namespaced_custom_object, *self.jobs, name
        )
        return found

    def own(self, name: str, owner: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """Make an object the only owner of a job, and give the job these labels."""
        absent = {} if RUN_LABEL in labels else {RUN_LABEL: None}
        change = {"metadata": {"ownerReferences": [owner], "labels": {**labels, **absent}}}
        self.call(self.custom.patch_namespaced_custom_object, *self.jobs, name, change)

    def delete_job(self, name: str) -> None:
        """Delete a job, and with it pods and service, unless it is gone already.

        A Job exists until its pods are gone. A TrainJob is deleted before its pods, because its
        controller would create deleted pods again.
        """
        policy = "Foreground" if self.launcher == "job" else "Background"
        body = {"propagationPolicy": policy}
        self.find(self.custom.delete_namespaced_custom_object, *self.jobs, name, body=body)

    def wait_for_change(self, job: Mapping[str, Any], seconds: float) -> None:
        """Wait until a job changes, at most `seconds` and at most `WATCH_SECONDS`.

        If the API server cannot be watched, the next request follows after `POLL_SECONDS`. A
        restarted server may not know the version of an unchanged job (410): then the watch starts
        from the current state.
        """
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        name, version = job["metadata"]["name"], job["metadata"]["resourceVersion"]
        try:
            try:
                self._watch(name, version, seconds, resource_version=version)
            except ApiException as error:
                if error.status != 410:
                    raise
                self._watch(name, version, seconds)
        except (ApiException, HTTPError, OSError, ValueError) as error:
            logger.info("not watched job=%s error=%.200s", name, error)
            time.sleep(POLL_SECONDS)

    def _watch(self, name: str, version: str, seconds: float, **begin: str) -> None:
        """Return once a job of a name has another version, or the time is over."""
        from kubernetes.watch import Watch

        limit = max(1, min(WATCH_SECONDS, round(seconds)))
        with bounded(limit + REQUEST_SECONDS):
            for event in Watch().stream(
                self.custom.list_namespaced_custom_object,
                *self.jobs,
                field_selector=f"metadata.name={name}",
                timeout_seconds=limit,
                _request_timeout=(REQUEST_SECONDS, limit + REQUEST_SECONDS),
                **begin,
            ):
                # A watch without a start version first sends the existing object.
                if event["raw_object"]["metadata"]["resourceVersion"] != version:
                    return

    def pods(self, digest: str) -> list[dict[str, Any]]:
        """Return the pods of a gang."""
        selector = f"{GANG_LABEL}={digest[:63]}"
        listing = self.core.list_namespaced_pod
        return list(self.items(listing, self.namespace, label_selector=selector))

    def log(self, pod: str) -> str:
        """Return the last lines of a pod's log, or the reason why it cannot be read."""
        read = self.core.read_namespaced_pod_log
        try:
            return str(self.call(read, pod, self.namespace, tail_lines=LOG_LINES))
        except (ClusterError, ConfigError) as error:
            return f"no log: {error}"
