"""Delete the objects that a run may leave in a namespace."""

from __future__ import annotations

from typing import Any, Protocol

from planish.run.gang.cluster import TRAINER
from planish.submit.server import ENDED, Kubeflow

RUN_LABEL = "pipeline/runid"
"""Label that Kubeflow puts on every pod of a run, and we on every job of one."""

STAGE_LABEL = "planish/stage"
"""Label of every pod and job of ours."""


class Janitor(Protocol):
    """What can delete the objects of a run."""

    def delete_labelled(self, selector: str) -> list[str]:
        """Delete jobs and services with these labels and return their names."""


class KubernetesJanitor:
    """Meets `Janitor` through the official client."""

    def __init__(self, client: Any, namespace: str) -> None:
        """Use an `ApiClient` that is already configured."""
        from kubernetes.client import BatchV1Api, CoreV1Api, CustomObjectsApi

        self._batch, self._core = BatchV1Api(client), CoreV1Api(client)
        self._custom = CustomObjectsApi(client)
        self._namespace = namespace

    def delete_labelled(self, selector: str) -> list[str]:
        """Delete jobs and services with these labels and return their names."""
        gone = self.delete_train_jobs(selector)
        jobs = self._batch.list_namespaced_job(self._namespace, label_selector=selector)
        for job in jobs.items:
            self._batch.delete_namespaced_job(
                job.metadata.name, self._namespace, propagation_policy="Background"
            )
            gone.append(f"job/{job.metadata.name}")
        services = self._core.list_namespaced_service(self._namespace, label_selector=selector)
        for service in services.items:
            self._core.delete_namespaced_service(service.metadata.name, self._namespace)
            gone.append(f"service/{service.metadata.name}")
        return gone

    def delete_train_jobs(self, selector: str) -> list[str]:
        """Delete the jobs of Kubeflow Trainer, where it is installed, and return their names."""
        from kubernetes.client import ApiException

        group, version, plural = TRAINER
        place = (group, version, self._namespace, plural)
        try:
            found = self._custom.list_namespaced_custom_object(*place, label_selector=selector)
        except ApiException as error:
            if error.status != 404:
                raise
            return []
        names = [job["metadata"]["name"] for job in found["items"]]
        for name in names:
            self._custom.delete_namespaced_custom_object(*place, name)
        return [f"trainjob/{name}" for name in names]


def clean_up(server: Kubeflow, janitor: Janitor, run_id: str) -> list[str]:
    """End a run that is still alive and delete what it created; return what was done."""
    state = server.terminate(run_id)
    word = "had ended" if state in ENDED else "is told to end, it was"
    gone = janitor.delete_labelled(f"{RUN_LABEL}={run_id},{STAGE_LABEL}")
    told = [f"deleted {name}" for name in gone] or ["nothing of it to delete: no job, no service"]
    return [f"the run {run_id} {word} {state}", *told]
