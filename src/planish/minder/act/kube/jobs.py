"""Pods to jobs: which machines belong together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from planish.minder.act.kube.objects import JobInfo, PodInfo
from planish.minder.act.kube.parse import ENDED, RUNNING


def group_jobs(pods: Iterable[PodInfo]) -> list[JobInfo]:
    """Return one job for each (namespace, name, role), sorted by key.

    Only Running pods on a node count. Drivers of Kubeflow start pods and compute nothing.
    """
    groups: dict[tuple[str, str, str], list[PodInfo]] = defaultdict(list)
    for pod in pods:
        if pod.phase == RUNNING and pod.machine and not pod.is_driver:
            groups[pod.namespace, pod.job, pod.role].append(pod)
    return [_job(found) for _, found in sorted(groups.items())]


def _job(found: list[PodInfo]) -> JobInfo:
    pods = sorted(found, key=lambda pod: (pod.machine, pod.name))
    # Stages of one workflow follow each other; the last one that began is the one that runs.
    newest = max(pods, key=lambda pod: (pod.started, pod.iteration, pod.stage))
    joined: dict[str, int] = {}
    for pod in pods:
        joined[pod.machine] = min(joined.get(pod.machine, pod.started), pod.started)
    machines = tuple(sorted(joined))
    return JobInfo(
        name=newest.job,
        namespace=newest.namespace,
        machines=machines,
        stages={pod.machine: pod.pipeline_stage for pod in pods if pod.pipeline_stage},
        roles={machine: newest.role for machine in machines if newest.role},
        started=newest.started,
        run_id=newest.run_id,
        stage=newest.stage,
        iteration=newest.iteration,
        run_root=newest.run_root or next((p.run_root for p in pods if p.run_root), ""),
        role=newest.role,
        joined=joined,
        pods=tuple(pods),
        is_observed_only=any(pod.is_observed_only for pod in pods),
    )


def pods_on(pods: Iterable[PodInfo], job: JobInfo, machine: str) -> tuple[PodInfo, ...]:
    """Return the pods of a job on one machine that have not ended, whatever their role."""
    return tuple(
        pod
        for pod in pods
        if (pod.namespace, pod.job, pod.machine) == (job.namespace, job.name, machine)
        and pod.phase not in ENDED
    )
