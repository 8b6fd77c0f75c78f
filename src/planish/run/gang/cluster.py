"""The API server of Kubernetes, as far as a stage needs it that submits gangs.

Every request is sent again until it is answered: an API server that restarts must cost no training.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planish.base.errors import ClusterError, ConfigError
from planish.run.gang.manifests import GANG_LABEL, RUN_LABEL, Launcher

logger = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

REQUEST_SECONDS = 20.0
PATIENCE_SECONDS = 600.0
"""An API server that does not answer for so long is given up."""
STARTING_SECONDS = 30.0
"""An API server that did not answer may forbid everything for so long after it was last silent."""
WATCH_SECONDS = 60
"""A watch is renewed after so long, so that an event that was lost delays nothing for longer."""
POLL_SECONDS = 5.0
"""Pause between two questions where watching fails."""
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

TRAINER = ("trainer.kubeflow.org", "v1alpha1", "trainjobs")
"""Group, version and plural of the jobs of Kubeflow Trainer."""
TRAINER_PERMISSIONS = tuple(
    (TRAINER[0], TRAINER[2], verb) if group == "batch" else (group, resource, verb)
    for group, resource, verb in PERMISSIONS
)
"""The same where Kubeflow Trainer makes the jobs."""


class GangCluster:
    """The namespace of a stage's pod."""

    def __init__(
        self,
        client: Any,
        namespace: str,
        pod: str,
        *,
        launcher: Launcher = "job",
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Use an `ApiClient` that is already configured.

        Args:
            client: of the package `kubernetes`.
            namespace: of the pod, where its gangs run too.
            pod: name of the stage's own pod.
            launcher: what a job is here.
            patience_seconds: how long a request is sent again.
        """
        from kubernetes.client import BatchV1Api, CoreV1Api, CustomObjectsApi

        self._core, self._batch = CoreV1Api(client), BatchV1Api(client)
        self._custom = CustomObjectsApi(client)
        self.namespace, self.pod, self.launcher = namespace, pod, launcher
        self.patience_seconds = patience_seconds
        self._silent_at = -math.inf

    @classmethod
    def from_pod(cls, launcher: Launcher) -> GangCluster:
        """Use the service account of this pod.

        Raises:
            ConfigError: this process is not in a pod.
        """
        pod = os.environ.get("POD_NAME", "")
        if not pod or not (SERVICE_ACCOUNT / "token").is_file():
            raise ConfigError(
                "`train.num_nodes` above 1 must be trained by the pods of a cluster, got a process "
                "outside of one; submit the run to a cluster, or set `train.num_nodes=1` and "
                "`train.num_processes`"
            )
        from kubernetes import client, config

        settings = client.Configuration()
        settings.retries = False
        config.load_incluster_config(client_configuration=settings)
        namespace = (SERVICE_ACCOUNT / "namespace").read_text("utf-8").strip()
        return cls(client.ApiClient(settings), namespace, pod, launcher=launcher)

    def with_other_launcher(self) -> GangCluster:
        """Return the same namespace, seen by who makes jobs of the other kind."""
        other = copy.copy(self)
        other.launcher = "job" if self.launcher == "trainjob" else "trainjob"
        return other

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Send a request until it is answered; return the JSON of the answer, or its text.

        Raises:
            ConfigError: the account may not do this, or the API server refuses the object.
            ClusterError: another refusal, or no answer within the patience; `.status` is 0 then.
        """
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        deadline, pause = time.monotonic() + self.patience_seconds, 0.5
        while True:
            try:
                answer = function(
                    *arguments, **options, _preload_content=False, _request_timeout=REQUEST_SECONDS
                )
                text = answer.data.decode(errors="replace")
                is_json = answer.headers.get("Content-Type", "").startswith("application/json")
                return json.loads(text) if is_json else text
            except ApiException as error:
                status, reason = int(error.status or 0), f"{error.status} {error.reason}"
                # One that has just started knows the rules of no account yet, and forbids all.
                is_starting = time.monotonic() - self._silent_at < STARTING_SECONDS
                if 0 < status < 500 and status != 429 and not (status == 403 and is_starting):
                    raise refusal(function.__name__, status, str(error.body)) from None
            except (HTTPError, OSError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
                self._silent_at = time.monotonic()
            if time.monotonic() + pause > deadline:
                raise ClusterError(
                    f"the API server must answer {function.__name__} within "
                    f"{self.patience_seconds:g} s, got {reason:.300}; run the stage again once it "
                    "answers"
                )
            logger.warning("API server does not answer pause=%.1f error=%.200s", pause, reason)
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)

    def jobs(self, verb: str, *rest: Any) -> tuple[Any, ...]:
        """Return the method of the client for a verb, and its arguments.

        Args:
            verb: create, get, list, patch or delete.
            rest: name, body or both, as far as the verb has them.
        """
        if self.launcher == "trainjob":
            method: Any = {
                "create": self._custom.create_namespaced_custom_object,
                "get": self._custom.get_namespaced_custom_object,
                "list": self._custom.list_namespaced_custom_object,
                "patch": self._custom.patch_namespaced_custom_object,
                "delete": self._custom.delete_namespaced_custom_object,
            }[verb]
            group, version, plural = TRAINER
            return (method, group, version, self.namespace, plural, *rest)
        method = {
            "create": self._batch.create_namespaced_job,
            "get": self._batch.read_namespaced_job,
            "list": self._batch.list_namespaced_job,
            "patch": self._batch.patch_namespaced_job,
            "delete": self._batch.delete_namespaced_job,
        }[verb]
        if verb in ("create", "list"):
            return (method, self.namespace, *rest)
        name, *body = rest
        return (method, name, self.namespace, *body)

    def own_pod(self) -> dict[str, Any]:
        """Return the pod of the stage."""
        pod: dict[str, Any] = self.call(self._core.read_namespaced_pod, self.pod, self.namespace)
        return pod

    def create_job(self, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
        """Create a job and return it; None where there is one of its name."""
        try:
            job: dict[str, Any] = self.call(*self.jobs("create", manifest))
        except ClusterError as error:
            if error.status == 404 and self.launcher == "trainjob":
                raise ConfigError(
                    f"the cluster must have the resource {TRAINER[2]}.{TRAINER[0]}, but has not; "
                    "install Kubeflow Trainer 2.1, or set `train.launcher=job`"
                ) from None
            if error.status != 409:
                raise
            return None
        return job

    def create_service(self, manifest: Mapping[str, Any]) -> bool:
        """Create a service; False where there is one of its name."""
        try:
            self.call(self._core.create_namespaced_service, self.namespace, manifest)
        except ClusterError as error:
            if error.status != 409:
                raise
            return False
        return True

    def service(self, name: str) -> dict[str, Any] | None:
        """Return a service as it is now; None where there is none."""
        read = self._core.read_namespaced_service
        try:
            service: dict[str, Any] = self.call(read, name, self.namespace)
        except ClusterError as error:
            if error.status != 404:
                raise
            return None
        return service

    def job(self, name: str) -> dict[str, Any] | None:
        """Return a job as it is now; None where there is none."""
        try:
            job: dict[str, Any] = self.call(*self.jobs("get", name))
        except ClusterError as error:
            if error.status != 404:
                raise
            return None
        return job

    def own(self, name: str, owner: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """Make an object the only owner of a job, and give the job these labels."""
        change: Any = [
            {"op": "add", "path": "/metadata/ownerReferences", "value": [owner]},
            {"op": "add", "path": "/metadata/labels", "value": dict(labels)},
        ]
        if self.launcher == "trainjob":
            # The client sends steps for its own kinds, and merges for others.
            absent = {} if RUN_LABEL in labels else {RUN_LABEL: None}
            change = {"metadata": {"ownerReferences": [owner], "labels": {**labels, **absent}}}
        self.call(*self.jobs("patch", name, change))

    def delete_job(self, name: str) -> None:
        """Delete a job, and with it pods and service, unless it is gone already.

        A Job is there until its pods are gone. A TrainJob is not: while it is there, its controller
        makes the pods again that are deleted below it.
        """
        is_job = self.launcher == "job"
        body = {"propagationPolicy": "Foreground" if is_job else "Background"}
        try:
            self.call(*self.jobs("delete", name), body=body)
        except ClusterError as error:
            if error.status != 404:
                raise

    def wait_for_change(self, job: Mapping[str, Any], seconds: float) -> None:
        """Wait until a job differs from what was read, at most so long and `WATCH_SECONDS`.

        An API server that can not be watched is asked again after `POLL_SECONDS`. One that has been
        started anew has forgotten the version of a job that has not changed since (410): it is
        watched from what it has now.
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

        for event in Watch().stream(
            *self.jobs("list"),
            field_selector=f"metadata.name={name}",
            timeout_seconds=max(1, min(WATCH_SECONDS, round(seconds))),
            _request_timeout=(REQUEST_SECONDS, WATCH_SECONDS + REQUEST_SECONDS),
            **begin,
        ):
            # A watch without a beginning tells first what is there.
            if event["raw_object"]["metadata"]["resourceVersion"] != version:
                return

    def pods(self, digest: str) -> list[dict[str, Any]]:
        """Return the pods of a gang."""
        selector = f"{GANG_LABEL}={digest[:63]}"
        listed = self.call(self._core.list_namespaced_pod, self.namespace, label_selector=selector)
        pods: list[dict[str, Any]] = listed["items"]
        return pods

    def log(self, pod: str) -> str:
        """Return the last lines of a pod's log; why there are none where it cannot be read."""
        read = self._core.read_namespaced_pod_log
        try:
            return str(self.call(read, pod, self.namespace, tail_lines=LOG_LINES))
        except (ClusterError, ConfigError) as error:
            return f"no log: {error}"


def refusal(name: str, status: int, body: str) -> Exception:
    """Return the error for a request that the API server has refused."""
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, TypeError, KeyError):
        message = body[:300]
    if status == 403:
        return ConfigError(
            f"the service account of the run must be allowed to {name.replace('_', ' ')}, but is "
            f"not ({message}); apply the overlay of manifests/ for this namespace"
        )
    if status in (400, 422):
        return ConfigError(
            f"the API server must accept the gang, got {status} {message}; change the profile, or "
            "the quota or policy that it names"
        )
    return ClusterError(f"the API server refused {name}: {status} {message}", status=status)
