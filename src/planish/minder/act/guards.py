"""Guards of actions: each guard alone can keep a machine in service."""

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
    """Namespace and name of the job that lost the node."""
    node: str


def cordoned(nodes: Sequence[NodeInfo]) -> list[Taken]:
    """Return the nodes that a monitor has cordoned, as their annotations say."""
    return [
        Taken(unix_seconds(notes.get(names.SINCE)), notes.get(names.JOB, ""), node.name)
        for node in nodes
        if (notes := node.annotations) and node.is_ours
    ]


def standing_refusals(alert_id: str, node: NodeInfo, pods: Sequence[PodInfo]) -> list[str]:
    """Return the reasons that forbid every action on a node and a job's pods on it, also the next
    step of an eviction.
    """
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
    """Return a reason for each limit, of the job and of the cluster, that is used up.

    `taken` are all nodes that were taken out of service at any time; `nodes` are all nodes of the
    cluster.
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
