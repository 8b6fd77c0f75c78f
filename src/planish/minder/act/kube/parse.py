"""From the JSON of the API server to the values of `kube_objects`.

A field that is missing or of another type is as if it were not there: labels are written by people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from planish.minder.act.kube import names
from planish.minder.act.kube.config import KubernetesConfig
from planish.minder.act.kube.objects import NodeInfo, PodInfo

Raw = Mapping[str, Any]

RUNNING = "Running"
ENDED = ("Succeeded", "Failed")
_GANGS = (names.TRAINING_LABEL, names.VOLCANO_LABEL)
MAX_ROOT = 1024
"""Longer values are no URI of a run."""


def seconds(text: object) -> int:
    """Return a time as the API server writes it as unix seconds; 0 where there is none.

    Example:
        >>> seconds("1970-01-01T00:01:00Z"), seconds(None)
        (60, 0)
    """
    if not isinstance(text, str) or not text:
        return 0
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except ValueError:
        return 0


def timestamp(now: float) -> str:
    """Return unix seconds as the API server reads them, whole seconds.

    Example:
        >>> timestamp(60.7)
        '1970-01-01T00:01:00Z'
    """
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_pod(raw: Raw, config: KubernetesConfig) -> PodInfo | None:
    """Return a pod; None for one that belongs to no job."""
    metadata, spec, status = _part(raw, "metadata"), _part(raw, "spec"), _part(raw, "status")
    labels, annotations = _part(metadata, "labels"), _part(metadata, "annotations")
    by = next((key for key in config.job_labels if _names_job(labels, key)), "")
    if not by:
        return None
    role = _role(by, labels, annotations)
    is_launcher = by in _GANGS and role in names.LAUNCHER_ROLES
    # Engines of a LeaderWorkerSet get requests as these come: none has to do what others do.
    allowed = labels.get(names.OPT_IN_LABEL, "observe" if by == names.LEADER_WORKER_LABEL else "")
    owners = [owner.get("kind") for owner in metadata.get("ownerReferences") or ()]
    return PodInfo(
        name=str(metadata["name"]),
        namespace=str(metadata["namespace"]),
        uid=str(metadata.get("uid", "")),
        machine=str(spec.get("nodeName") or ""),
        job=str(labels[by]),
        phase=str(status.get("phase") or "Pending"),
        started=_started(status),
        role=str(labels.get(config.role_label, role)),
        pipeline_stage=str(labels.get(config.pipeline_stage_label, "")),
        run_id=str(labels.get(names.RUN_ID_LABEL, "")),
        stage=str(labels.get(names.STAGE_LABEL, "")),
        iteration=_whole(labels.get(names.ITERATION_LABEL), 0),
        rank=_whole(
            labels.get(names.RANK_LABEL, annotations.get(names.RANK_LABEL)),
            -1,
        ),
        workflow=str(labels.get(names.WORKFLOW_LABEL, "")),
        run_root=_run_root(annotations, spec),
        is_driver=is_launcher or annotations.get(names.KFP_ROLE) == "driver",
        is_evictable="DaemonSet" not in owners and names.MIRROR not in annotations,
        is_exempt=_is_set(labels, names.EXEMPT),
        is_terminating=bool(metadata.get("deletionTimestamp")),
        is_observed_only=allowed == "observe",
        requests=requests_of(spec),
        selector={str(k): str(v) for k, v in _part(spec, "nodeSelector").items()},
        tolerations=tuple(spec.get("tolerations") or ()),
    )


def selector(label: str) -> str:
    """Return the label selector for pods whose job a label names."""
    return f"{label},{names.RANK_LABEL}" if label == names.BATCH_LABEL else label


def _names_job(labels: Raw, key: str) -> bool:
    return bool(labels.get(key)) and (key != names.BATCH_LABEL or names.RANK_LABEL in labels)


def _role(by: str, labels: Raw, annotations: Raw) -> str:
    """Return what a pod does in its job, where its controller tells it."""
    if by == names.LEADER_WORKER_LABEL:
        return "leader" if labels.get(names.WORKER_INDEX) == "0" else "worker"
    keys = names.ROLE_LABELS.get(by, ())
    role = next((str(labels[key]) for key in keys if labels.get(key)), "")
    if not role and by == names.WORKFLOW_LABEL:
        return _task(str(annotations.get(names.NODE_NAME, "")))
    return "" if by in _GANGS and role in names.RANK_ROLES else role


def _task(node_name: str) -> str:
    """Return the task of a pod of a workflow, the same for all iterations of a loop over it.

    Example:
        >>> _task("run-x.root.for-loop-1.iteration-iterations(3:3).iteration-item.fit.executor(0)")
        'fit'
    """
    _, *path = re.sub(r"\([^)]*\)|\[\d+\]", "", node_name).split(".")
    return next((part for part in reversed(path) if part != "executor"), "")


def parse_node(raw: Raw) -> NodeInfo:
    """Return a node."""
    metadata, spec, status = _part(raw, "metadata"), _part(raw, "spec"), _part(raw, "status")
    ready = [c.get("status") for c in status.get("conditions") or () if c.get("type") == "Ready"]
    return NodeInfo(
        name=str(metadata["name"]),
        uid=str(metadata.get("uid", "")),
        version=str(metadata.get("resourceVersion", "")),
        is_unschedulable=bool(spec.get("unschedulable")),
        is_ready=ready == ["True"],
        labels={str(k): str(v) for k, v in _part(metadata, "labels").items()},
        annotations={str(k): str(v) for k, v in _part(metadata, "annotations").items()},
        taints=tuple(spec.get("taints") or ()),
        allocatable=amounts(_part(status, "allocatable")),
    )


def is_exempt(node: NodeInfo) -> bool:
    """Tell whether a node's label forbids any action."""
    return _is_set(node.labels, names.EXEMPT)


def requests_of(spec: Raw) -> dict[str, float]:
    """Return what the containers of a pod ask for together, by resource; one place of a pod too."""
    total: dict[str, float] = {"pods": 1.0}
    for container in spec.get("containers") or ():
        resources = _part(container, "resources")
        # What is limited only is requested to the same amount.
        wanted = {**_part(resources, "limits"), **_part(resources, "requests")}
        for name, amount in amounts(wanted).items():
            total[name] = total.get(name, 0.0) + amount
    first = [
        amounts(_part(_part(container, "resources"), "requests"))
        for container in spec.get("initContainers") or ()
    ]
    for wanted in first:
        for name, amount in wanted.items():
            total[name] = max(total.get(name, 0.0), amount)
    return total


def amounts(quantities: Raw) -> dict[str, float]:
    """Return quantities as numbers; what is none is left out.

    Example:
        >>> amounts({"cpu": "500m", "memory": "1Ki", "x": "?"})
        {'cpu': 0.5, 'memory': 1024.0}
    """
    from kubernetes.utils import parse_quantity

    found = {}
    for name, text in quantities.items():
        try:
            found[str(name)] = float(parse_quantity(text))
        except (ValueError, TypeError):
            continue
    return found


def _part(raw: Raw, key: str) -> Raw:
    value = raw.get(key)
    return value if isinstance(value, Mapping) else {}


def _whole(text: object, otherwise: int) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 10 else otherwise


def _is_set(labels: Raw, key: str) -> bool:
    return key in labels and str(labels[key]).lower() not in ("false", "0", "no")


def _started(status: Raw) -> int:
    """Return the last start of a container, or of the pod."""
    starts = [seconds(status.get("startTime"))]
    for container in status.get("containerStatuses") or ():
        starts.append(seconds(_part(_part(container, "state"), "running").get("startedAt")))
    return max(starts)


def _run_root(annotations: Raw, spec: Raw) -> str:
    """Return the URI of the run that a pod names: by annotation, or in its own arguments."""
    found = annotations.get(names.RUN_ROOT) or next(_roots(spec), "")
    root = found if isinstance(found, str) and len(found) <= MAX_ROOT else ""
    return root.rstrip("/") if "://" in root else ""


def _roots(spec: Raw) -> Iterator[object]:
    """Yield what the arguments of containers give as root: Kubeflow's executor, or `--root`."""
    for container in spec.get("containers") or ():
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        for word, following in zip(words, [*words[1:], ""], strict=False):
            if word == "--executor_input":
                yield from _executor_root(following)
            elif word == "--root":
                yield following
            elif str(word).startswith("--root="):
                yield str(word).partition("=")[2]


def _executor_root(text: str) -> Iterator[object]:
    try:
        given = json.loads(text)["inputs"]["parameterValues"]["root"]
    except (ValueError, KeyError, TypeError):
        return
    yield given
