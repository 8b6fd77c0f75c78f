"""Cordon a node, evict pods from it, undo the cordon. Each step may be repeated without harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.base.errors import ClusterError
from planish.minder.act.config import ActConfig
from planish.minder.act.kube import names
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.objects import NodeInfo, PodInfo, timestamp

MAX_TRIES = 3
"""Patches of a node that somebody else keeps changing."""
CONFLICT, GONE, BLOCKED = 409, 404, 429


def is_ours(node: NodeInfo, config: ActConfig) -> bool:
    """Tell whether the node's annotation says that this monitor cordoned it."""
    return node.annotations.get(names.CORDONED_BY) == config.owner


def was_uncordoned(node: NodeInfo, config: ActConfig) -> bool:
    """Tell whether a human has made a node schedulable again that this monitor cordoned."""
    return is_ours(node, config) and not node.is_unschedulable


def cordon_change(
    node: NodeInfo, alert_id: str, job: str, reason: str, *, now: float, config: ActConfig
) -> dict[str, Any]:
    """Return the patch that takes a node out of service and notes who did it and why."""
    taints = _others_taints(node)
    taints.append({"key": names.FAULTY_TAINT, "value": alert_id, "effect": "NoSchedule"})
    if config.no_execute_taint:
        taints.append({"key": names.ANOMALY, "value": "true", "effect": "NoExecute"})
    annotations = {
        names.CORDONED_BY: config.owner,
        names.REASON: reason,
        names.SINCE: timestamp(now),
        names.WAS_UNSCHEDULABLE: str(node.is_unschedulable).lower(),
        names.ALERT_ID: alert_id,
        names.JOB: job,
        names.MANUAL_UNCORDON: None,
    }
    return {
        "metadata": {"annotations": annotations},
        "spec": {"unschedulable": True, "taints": taints},
    }


def release_change(node: NodeInfo) -> dict[str, Any]:
    """Return the patch that removes what a cordon left on a node that a human has uncordoned."""
    annotations: dict[str, str | None] = dict.fromkeys(names.OWNED, None)
    annotations[names.MANUAL_UNCORDON] = node.annotations.get(names.ALERT_ID, "unknown")
    return {"metadata": {"annotations": annotations}, "spec": {"taints": _others_taints(node)}}


def _others_taints(node: NodeInfo) -> list[dict[str, str]]:
    ours = (names.FAULTY_TAINT, names.ANOMALY)
    return [taint for taint in node.taints if taint.get("key") not in ours]


def change_node(
    cluster: Cluster,
    node: NodeInfo,
    change: Callable[[NodeInfo], dict[str, Any] | None],
) -> NodeInfo | None:
    """Patch a node; after a conflict read it again and ask `change` for a new patch.

    Returns:
        The node after the patch; None when `change` wants none.

    Raises:
        ClusterError: 409 after three tries, or any other refusal.
    """
    for attempt in range(1, MAX_TRIES + 1):
        patch = change(node)
        if patch is None:
            return None
        try:
            return cluster.patch_node(node, patch)
        except ClusterError as error:
            if error.status != CONFLICT or attempt == MAX_TRIES:
                raise
            node = cluster.node(node.name)
    raise AssertionError("the loop returns or raises")


@dataclass
class Attempt:
    """Eviction of a pod that a disruption budget holds back."""

    begun: float
    """Unix seconds of the first request."""
    due: float
    """Unix seconds before which it is not requested again."""
    pause: float
    """Seconds between the next request and the one after it."""


@dataclass
class Evictions:
    """State of the evictions of one alert."""

    attempts: dict[str, Attempt] = field(default_factory=dict)
    """Pod uid to attempt, while a budget holds the pod back."""
    given_up: list[str] = field(default_factory=list)
    """Pod uids."""
    num_evicted: int = 0


@dataclass
class Round:
    """What one round of evictions brought."""

    evicted: list[PodInfo] = field(default_factory=list)
    blocked: list[PodInfo] = field(default_factory=list)
    """Given up in this round."""
    num_waiting: int = 0


def evict_round(
    cluster: Cluster,
    pods: Sequence[PodInfo],
    state: Evictions,
    *,
    now: float,
    config: ActConfig,
) -> Round:
    """Request once the eviction of each pod that is due; `state` is updated.

    Raises:
        ClusterError: anything but a budget that holds a pod back and a pod that is gone.
    """
    done = Round()
    for pod in pods:
        if not pod.is_evictable or pod.is_terminating or pod.uid in state.given_up:
            continue
        attempt = state.attempts.get(pod.uid)
        if attempt is not None and now < attempt.due:
            done.num_waiting += 1
            continue
        try:
            cluster.evict(pod)
            done.evicted.append(pod)
            state.num_evicted += 1
        except ClusterError as error:
            if error.status == BLOCKED:
                attempt = attempt or Attempt(now, now, config.backoff_seconds)
                if now - attempt.begun < config.give_up_seconds:
                    wanted = min(error.retry_after, config.max_backoff_seconds)
                    attempt.due = now + max(attempt.pause, wanted)
                    attempt.pause = min(2 * attempt.pause, config.max_backoff_seconds)
                    state.attempts[pod.uid] = attempt
                    done.num_waiting += 1
                    continue
                state.given_up.append(pod.uid)
                done.blocked.append(pod)
            elif error.status not in (GONE, CONFLICT):
                raise
        state.attempts.pop(pod.uid, None)
    return done
