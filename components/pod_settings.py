"""Settings of every pod: environment, labels, secret, timeout, retries, and what a GPU needs.

KFP cannot set a priority class, host network or a second extended resource; those belong to the
overlays of `manifests/`.
"""

import json
from collections.abc import Mapping
from typing import Any

from kfp import dsl, kubernetes

from components.images import (
    FETCHING_STAGES,
    GPU,
    GPU_NODE_LABEL,
    ITERATION_STAGES,
    STAGE_IMAGES,
    WAITING,
    Profile,
    Resources,
)

STAGE_LABEL = "planish/stage"

FIELD_ENV: dict[str, str] = {
    "RUN_ID": "metadata.labels['pipeline/runid']",
    "NODE_NAME": "spec.nodeName",
    "POD_NAME": "metadata.name",
}
"""Environment variable to the field of the pod that fills it."""

SECRET_ENV: dict[str, str] = {
    "endpoint": "MINIO_ENDPOINT",
    "access_key": "MINIO_ACCESS_KEY",
    "secret_key": "MINIO_SECRET_KEY",
    "secure": "MINIO_SECURE",
}
"""Key of the store secret to the environment variable that it fills."""

WEBHOOK_ENV: dict[str, str] = {"webhook": "PLANISH_WEBHOOK"}
"""The same, for the report alone."""

HUB_ENV: dict[str, str] = {"token": "HF_TOKEN"}
"""The same of the hub secret, for the stages that fetch models and data sets."""

RANKS_ENV: dict[str, str] = {"ranks_token": "PLANISH_RANKS_TOKEN"}
"""The same, for the stages of `SAMPLING_STAGES`."""

SAMPLING_STAGES = ("rollout", "evaluate")
"""Stages whose engine may have its ranks in pods of their own (`engine.peers`)."""

ITERATION_LIMIT = "PLANISH_ITERATION_LIMIT_SECONDS"
"""Tells the alert on stalled iterations how long one may last under the profile."""

GANG_ENV = "PLANISH_GANG"
"""Tells a train task that waits what the pods have that it submits, as JSON."""

SCRATCH = "/scratch"

GPU_ENV: dict[str, str] = {
    "HOME": SCRATCH,
    "HF_HOME": f"{SCRATCH}/huggingface",
    "XDG_CACHE_HOME": f"{SCRATCH}/cache",
    "TRITON_CACHE_DIR": f"{SCRATCH}/triton",
    "VLLM_CACHE_ROOT": f"{SCRATCH}/vllm",
    "PLANISH_GPU_POD": "1",
}
"""Caches of GPU libraries on a writable volume, for pods run as a user without a home; and that
the pod asked for GPUs, so that it does not compute without."""


def with_pod_settings(
    task: dsl.PipelineTask,
    stage: str,
    *,
    profile: Profile,
    images: Mapping[str, str],
    is_exit_task: bool = False,
    node_affinity: Any = None,
) -> dsl.PipelineTask:
    """Set everything of a task's pod that does not depend on the inputs of the task.

    Args:
        task: the task of one component.
        stage: name of the stage, key of `STAGE_IMAGES` and of `profile.stages`.
        profile: resources, retries, timeouts, and the name of the secret with the keys of
            `SECRET_ENV`.
        images: image name to reference.
        is_exit_task: an exit task takes no retries.
        node_affinity: output of the first task that keeps pods away from faulty machines; a
            pipeline channel, which carries no type. None for a pod that goes anywhere.

    Returns:
        The same task.
    """
    resources = profile.stages[stage]
    task.set_container_image(images[STAGE_IMAGES[stage]])
    task.set_display_name(stage)
    # Every stage reads or writes the run root, which no cache key knows.
    task.set_caching_options(False)
    waits = stage in ("train", "iterate") and profile.num_nodes > 1
    cpu, memory = (
        (WAITING["cpu"], WAITING["memory"]) if waits else (resources.cpu, resources.memory)
    )
    task.set_cpu_request(cpu)
    task.set_memory_request(memory)
    task.set_memory_limit(memory)
    if waits:
        pods = json.dumps(gang_pods(resources, profile.num_nodes), sort_keys=True)
        task.set_env_variable(GANG_ENV, pods)
    for name, value in profile.env.items():
        task.set_env_variable(name, value)
    if stage in (*ITERATION_STAGES, "iterate"):
        task.set_env_variable(ITERATION_LIMIT, str(profile.iteration_limit_seconds))
    for name, path in FIELD_ENV.items():
        kubernetes.use_field_path_as_env(task, env_name=name, field_path=path)
    kubernetes.use_secret_as_env(
        task, profile.store_secret, secret_key_to_env=dict(SECRET_ENV), optional=True
    )
    if stage in SAMPLING_STAGES:
        kubernetes.use_secret_as_env(task, profile.store_secret, dict(RANKS_ENV), optional=True)
    kubernetes.add_pod_label(task, STAGE_LABEL, stage)
    kubernetes.set_timeout(task, resources.timeout_seconds)
    kubernetes.set_image_pull_policy(task, "IfNotPresent")
    if not is_exit_task:
        # A task that says nothing gets the retries of the installation; 0 is said as well.
        task.set_retry(
            num_retries=resources.retries,
            backoff_duration=f"{resources.backoff_seconds}s",
            backoff_factor=2.0,
            backoff_max_duration=f"{resources.backoff_max_seconds}s",
        )
    if node_affinity is not None:
        kubernetes.add_node_affinity_json(task, node_affinity)
    if resources.gpus and not waits:
        task.set_accelerator_type(GPU).set_accelerator_limit(resources.gpus)
        kubernetes.add_toleration(task, key=GPU, operator="Exists", effect="NoSchedule")
        kubernetes.add_node_selector(task, *GPU_NODE_LABEL)
        size = resources.shared_memory
        kubernetes.empty_dir_mount(task, "shm", "/dev/shm", medium="Memory", size_limit=size)
        kubernetes.empty_dir_mount(task, "scratch", SCRATCH)
        for name, value in GPU_ENV.items():
            task.set_env_variable(name, value)
    if stage in FETCHING_STAGES:
        kubernetes.use_secret_as_env(
            task, profile.hub_secret, secret_key_to_env=dict(HUB_ENV), optional=True
        )
    return task


def gang_pods(resources: Resources, num_nodes: int) -> dict[str, Any]:
    """Return what the pods of a job have beside what the pod of the train task has.

    Args:
        resources: of one of them.
        num_nodes: how many they are.
    """
    gpus = {GPU: str(resources.gpus)} if resources.gpus else {}
    container = {
        "resources": {
            "requests": {"cpu": resources.cpu, "memory": resources.memory, **gpus},
            "limits": {"memory": resources.memory, **gpus},
        }
    }
    if not resources.gpus:
        return {"num_nodes": num_nodes, "container": container}
    shm = {"medium": "Memory", "sizeLimit": resources.shared_memory}
    return {
        "num_nodes": num_nodes,
        "gpus": resources.gpus,
        "container": {
            **container,
            "env": [{"name": name, "value": value} for name, value in GPU_ENV.items()],
            "volumeMounts": [
                {"name": "shm", "mountPath": "/dev/shm"},
                {"name": "scratch", "mountPath": SCRATCH},
            ],
        },
        "spec": {
            "nodeSelector": dict([GPU_NODE_LABEL]),
            "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
            "volumes": [
                {"name": "shm", "emptyDir": shm},
                {"name": "scratch", "emptyDir": {}},
            ],
        },
    }
