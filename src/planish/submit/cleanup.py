"""Deletes the objects that a run leaves in a namespace."""

from __future__ import annotations

from planish.run.gang.cluster import RESOURCES
from planish.run.gang.manifests import RUN_LABEL, STAGE_LABEL
from planish.run.kube import Kube
from planish.submit.server import ENDED, Kubeflow


def delete_labelled(kube: Kube, selector: str) -> list[str]:
    """Delete the jobs and services with these labels; return their names."""
    gone = []
    for launcher, (group, version, plural) in RESOURCES.items():
        place = (group, version, kube.namespace, plural)
        for job in kube.items(
            kube.custom.list_namespaced_custom_object, *place, label_selector=selector
        ):
            name = job["metadata"]["name"]
            body = {"propagationPolicy": "Background"}
            kube.find(kube.custom.delete_namespaced_custom_object, *place, name, body=body)
            gone.append(f"{launcher}/{name}")
    services = kube.core.list_namespaced_service
    for service in kube.items(services, kube.namespace, label_selector=selector):
        name = service["metadata"]["name"]
        kube.find(kube.core.delete_namespaced_service, name, kube.namespace)
        gone.append(f"service/{name}")
    return gone


def clean_up(server: Kubeflow, kube: Kube, run_id: str) -> list[str]:
    """End a run that is still alive and delete the objects that it created; return a line for each
    action.
    """
    state = server.terminate(run_id)
    word = "had ended" if state in ENDED else "is told to end, it was"
    gone = delete_labelled(kube, f"{RUN_LABEL}={run_id},{STAGE_LABEL}")
    told = [f"deleted {name}" for name in gone] or ["nothing of it to delete: no job, no service"]
    return [f"the run {run_id} {word} {state}", *told]
