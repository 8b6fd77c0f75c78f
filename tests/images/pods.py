"""The pod of a task, as Kubeflow's driver makes it of a compiled pipeline.

Of Kubeflow itself nothing runs here: no launcher, which carries artifacts to the store; tasks give
them to each other on a claim.
"""

from collections.abc import Mapping, Sequence
from typing import Any

ACCOUNT = "planish-runner"


def pod_of(
    compiled: Sequence[Mapping[str, Any]],
    command: Sequence[str],
    *,
    name: str,
    run_id: str,
    artifacts: Mapping[str, str],
) -> dict[str, Any]:
    """Return the pod that runs the command of a task with everything that its YAML says.

    Args:
        compiled: both documents of the YAML, of the pipeline and of the platform.
        command: words of the task; its last one but `--function_to_execute` names the component.
        name: of the pod.
        run_id: of the run.
        artifacts: name of a claim -> where the pod sees it, beside those of the YAML.
    """
    component = command[command.index("--function_to_execute") + 1].replace("_", "-")
    executor = f"exec-{component}"
    spec, platform = compiled
    container = spec["deploymentSpec"]["executors"][executor]["container"]
    wanted = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"][executor]
    environment = [
        *container.get("env", []),
        *(
            {"name": field["name"], "valueFrom": {"fieldRef": {"fieldPath": field["fieldPath"]}}}
            for field in wanted.get("fieldPathAsEnv", [])
        ),
        *(
            {
                "name": key["envVar"],
                "valueFrom": {
                    "secretKeyRef": {
                        "name": secret["secretName"],
                        "key": key["secretKey"],
                        "optional": secret.get("optional", False),
                    }
                },
            }
            for secret in wanted.get("secretAsEnv", [])
            for key in secret["keyToEnv"]
        ),
    ]
    resources = container["resources"]
    volumes, mounts = _volumes(wanted, artifacts)
    metadata = wanted.get("podMetadata", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {**metadata.get("labels", {}), "pipeline/runid": run_id},
            "annotations": metadata.get("annotations", {}),
        },
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": ACCOUNT,
            "activeDeadlineSeconds": int(wanted["activeDeadlineSeconds"]),
            "tolerations": wanted.get("tolerations", []),
            "nodeSelector": wanted.get("nodeSelector", {}).get("labels", {}),
            "volumes": volumes,
            "containers": [
                {
                    "name": "main",
                    "image": container["image"],
                    "imagePullPolicy": wanted["imagePullPolicy"],
                    "command": list(command),
                    "env": environment,
                    "volumeMounts": mounts,
                    "resources": {
                        "requests": {
                            "cpu": resources["resourceCpuRequest"],
                            "memory": resources["resourceMemoryRequest"],
                        },
                        "limits": {"memory": resources["resourceMemoryLimit"]},
                    },
                }
            ],
        },
    }


def _volumes(
    wanted: Mapping[str, Any], artifacts: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of a pod and where its container sees them."""
    volumes: list[dict[str, Any]] = []
    mounts = []
    for empty in wanted.get("emptyDirMounts", []):
        source = {"medium": empty.get("medium", ""), "sizeLimit": empty.get("sizeLimit")}
        volumes.append({"name": empty["volumeName"], "emptyDir": source})
        mounts.append({"name": empty["volumeName"], "mountPath": empty["mountPath"]})
    claims = {claim["constant"]: claim["mountPath"] for claim in wanted.get("pvcMount", [])}
    for name, path in {**artifacts, **claims}.items():
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": name}})
        mounts.append({"name": name, "mountPath": path})
    return volumes, mounts
