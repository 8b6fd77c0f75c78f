"""Steps of draining: cordon a node, evict its pods, undo the cordon. Each step may be repeated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.base.errors import ClusterError
from planish.minder.act.kube import names
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.objects import NodeInfo, PodInfo, timestamp

logger = logging.getLogger(__name__)

CONFLICT, GONE, BLOCKED = 409, 404, 429
_PATCH_TRIES = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
"""Pause in seconds after a disruption budget has refused an eviction; it doubles each time."""
_GIVE_UP_SECONDS = 900.0
"""Seconds after which an eviction is given up if budgets refuse it all the time."""


def cordon(
    cluster: Cluster, node: NodeInfo, alert_id: str, job: str, reason: str, now: int
) -> bool:
    """Cordon a node and record the reason; return False if somebody else has cordoned it."""

    def change(node: NodeInfo) -> dict[str, Any] | None:
        if node.is_unschedulable:
            return None
        taint = {"key": names.FAULTY_TAINT, "value": alert_id, "effect": "NoSchedule"}
        annotations = {
            names.CORDONED_BY: names.OWNER,
            names.REASON: reason,
            names.SINCE: timestamp(now),
            names.ALERT_ID: alert_id,
            names.JOB: job,
            names.MANUAL_UNCORDON: None,
        }
        return {
            "metadata": {"annotations": annotations},
            "spec": {"unschedulable": True, "taints": [*_others_taints(node), taint]},
        }

    is_done = change_node(cluster, node, change)
    if is_done:
        logger.info("cordoned machine=%s alert=%s", node.name, alert_id)
    return is_done


def mark(cluster: Cluster, node: NodeInfo, reason: str, message: str, now: int) -> None:
    """Set the node's condition to faulty; without a `reason`, to not faulty."""

    def change(node: NodeInfo) -> dict[str, Any] | None:
        old = node.condition(names.FAULTY_MACHINE)
        wanted = {"status": "True" if reason else "False", "message": message}
        if wanted.items() <= old.items() or not (reason or old):
            return None
        new = {
            **wanted,
            "type": names.FAULTY_MACHINE,
            "reason": reason or "Recovered",
            "lastTransitionTime": timestamp(now),
            "lastHeartbeatTime": timestamp(now),
        }
        # A merge patch replaces a list as a whole.
        return {"status": {"conditions": [*(c for c in node.conditions if c is not old), new]}}

    change_node(cluster, node, change)


def release(cluster: Cluster, node: NodeInfo, reason: str, now: int) -> None:
    """Remove taint and annotations of a cordon from a node that a human made schedulable again, and
    clear its condition for that reason.
    """

    def change(node: NodeInfo) -> dict[str, Any] | None:
        if not node.is_ours:
            return None
        annotations: dict[str, str | None] = dict.fromkeys(names.OWNED, None)
        annotations[names.MANUAL_UNCORDON] = node.annotations.get(names.ALERT_ID, "unknown")
        return {"metadata": {"annotations": annotations}, "spec": {"taints": _others_taints(node)}}

    change_node(cluster, node, change)
    mark(cluster, cluster.node(node.name), "", reason, now)
    logger.info("given up machine=%s", node.name)


def change_node(
    cluster: Cluster, node: NodeInfo, change: Callable[[NodeInfo], dict[str, Any] | None]
) -> bool:
    """Patch a node; after a conflict, read it again and compute a new patch.

    Returns:
        False if `change` returns no patch.
    """
    for attempt in range(1, _PATCH_TRIES + 1):
        patch = change(node)
        if patch is None:
            return False
        try:
            cluster.patch_node(node, patch)
            break
        except ClusterError as error:
            if error.status != CONFLICT or attempt == _PATCH_TRIES:
                raise
            node = cluster.node(node.name)
    return True


def _others_taints(node: NodeInfo) -> list[dict[str, str]]:
    return [taint for taint in node.taints if taint.get("key") != names.FAULTY_TAINT]


@dataclass
class Attempt:
    """Eviction of a pod that a disruption budget holds back."""

    first: float
    """Unix seconds of the first request."""
    due: float
    """Unix seconds of the next request."""
    pause: float = _FIRST_PAUSE
    """Seconds from the next request to the one after it."""


@dataclass
class Evictions:
    """Evictions of one alert, by the uid of the pod."""

    attempts: dict[str, Attempt] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)


@dataclass
class Round:
    """Result of one round of evictions."""

    evicted: list[PodInfo] = field(default_factory=list)
    given_up: list[PodInfo] = field(default_factory=list)
    num_waiting: int = 0


def evict_round(cluster: Cluster, pods: Sequence[PodInfo], state: Evictions, now: float) -> Round:
    """Request the eviction of each pod whose request is due, once; `state` is updated."""
    done = Round()
    for pod in pods:
        if not pod.is_evictable or pod.is_terminating or pod.uid in state.given_up:
            continue
        attempt = state.attempts.get(pod.uid, Attempt(now, now))
        if now < attempt.due:
            done.num_waiting += 1
            continue
        try:
            cluster.evict(pod)
            logger.info("evicted pod=%s machine=%s", pod.name, pod.machine)
            done.evicted.append(pod)
        except ClusterError as error:
            if error.status == BLOCKED:
                if now - attempt.first < _GIVE_UP_SECONDS:
                    attempt.due = now + max(attempt.pause, min(error.retry_after, _LONGEST_PAUSE))
                    attempt.pause = min(2 * attempt.pause, _LONGEST_PAUSE)
                    state.attempts[pod.uid] = attempt
                    done.num_waiting += 1
                    continue
                state.given_up.add(pod.uid)
                done.given_up.append(pod)
            elif error.status not in (GONE, CONFLICT):
                raise
        state.attempts.pop(pod.uid, None)
    return done
