"""What must hold before a machine is taken out of service; every guard can refuse alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from planish.minder.act.config import ActConfig
from planish.minder.act.kube import names
from planish.minder.act.kube.objects import NodeInfo, PodInfo, is_set, unix_seconds


@dataclass(frozen=True)
class Taken:
    """A node that was taken out of service."""

    time: float
    """Unix seconds."""
    job: str
    """Namespace and name of the job that lost it."""
    node: str


def cordoned(nodes: Sequence[NodeInfo]) -> list[Taken]:
    """Return what annotations of nodes say that monitors have taken."""
    return [
        Taken(unix_seconds(notes.get(names.SINCE)), notes.get(names.JOB, ""), node.name)
        for node in nodes
        if (notes := node.annotations) and node.is_ours
    ]


def standing_refusals(alert_id: str, node: NodeInfo, pods: Sequence[PodInfo]) -> list[str]:
    """Return what forbids every action on the pods of a job on a node, even a begun one."""
    reasons = []
    if is_set(node.labels, names.EXEMPT):
        reasons.append(f"the node is exempt by its label {names.EXEMPT}")
    exempt = sorted(pod.name for pod in pods if pod.is_exempt)
    if exempt:
        reasons.append(f"pods are exempt by their label {names.EXEMPT}: {', '.join(exempt)}")
    if node.annotations.get(names.MANUAL_UNCORDON) == alert_id:
        reasons.append("a human made the node schedulable again after this alert")
    return reasons


def limit_refusals(
    job: str, taken: Collection[Taken], nodes: Sequence[NodeInfo], now: float, config: ActConfig
) -> list[str]:
    """Return the limits of a job and of the cluster that are used up.

    `taken` are all nodes that were taken, also long ago; `nodes` all of the cluster.
    """
    resource = config.gpu_resource
    count = sum(not resource or node.allocatable.get(resource, "0") != "0" for node in nodes)
    # In floating point 0.1 * 30 is a little more than 3.
    share = math.ceil(config.max_node_share * count - 1e-9)
    limits = (
        (config.nodes_per_job, config.job_seconds, job, "of this job"),
        (min(config.nodes_per_cluster, share), config.cluster_seconds, "", "of the cluster"),
    )
    reasons = []
    for limit, window, of, whose in limits:
        lost = {t.node for t in taken if t.time > now - window and of in ("", t.job)}
        if len(lost) >= limit:
            reasons.append(f"{len(lost)} of at most {limit} nodes {whose} were taken in {window} s")
    return reasons
