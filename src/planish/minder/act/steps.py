"""The changes themselves: cordon, evict, undo. Each may be repeated without harm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.base.errors import ClusterError
from planish.minder.act.config import ActConfig
from planish.minder.act.kube import names
from planish.minder.act.kube.client import Cluster
from planish.minder.act.kube.objects import NodeInfo, PodInfo
from planish.minder.act.kube.parse import timestamp
from planish.minder.act.types import Outcome

logger = logging.getLogger(__name__)

MAX_TRIES = 3
"""Reads of a node that somebody else keeps changing."""
CONFLICT, GONE, BLOCKED = 409, 404, 429


def is_ours(node: NodeInfo, config: ActConfig) -> bool:
    """Tell whether the node says that we cordoned it."""
    return node.annotations.get(names.CORDONED_BY) == config.owner


def was_uncordoned(node: NodeInfo, config: ActConfig) -> bool:
    """Tell whether we cordoned the node and a human has made it schedulable again."""
    return is_ours(node, config) and not node.is_unschedulable


def _without_our_taints(node: NodeInfo) -> list[dict[str, str]]:
    ours = (names.FAULTY_TAINT, names.ANOMALY)
    return [taint for taint in node.taints if taint.get("key") not in ours]


def cordon_change(
    node: NodeInfo, alert_id: str, job: str, reason: str, *, now: float, config: ActConfig
) -> dict[str, Any]:
    """Return the patch that takes a node out of service and says who did it and why."""
    taints = _without_our_taints(node)
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


def uncordon_change(node: NodeInfo, *, by_human: bool) -> dict[str, Any]:
    """Return the patch that removes what a cordon of ours left.

    A node that was unschedulable before stays so.
    """
    annotations: dict[str, str | None] = dict.fromkeys(names.OWNED, None)
    if by_human:
        annotations[names.MANUAL_UNCORDON] = node.annotations.get(names.ALERT_ID, "unknown")
    before = node.annotations.get(names.WAS_UNSCHEDULABLE) == "true"
    spec: dict[str, Any] = {"taints": _without_our_taints(node)}
    if not by_human and not before:
        spec["unschedulable"] = False
    return {"metadata": {"annotations": annotations}, "spec": spec}


def change_node(
    cluster: Cluster,
    node: NodeInfo,
    change: Callable[[NodeInfo], dict[str, Any] | None],
    *,
    dry_run: bool,
) -> NodeInfo | None:
    """Patch a node; when somebody else was faster read it again and ask `change` anew.

    Returns:
        The node after the patch; None when `change` no longer wants one.

    Raises:
        ClusterError: 409 after three tries, or any other refusal.
    """
    for attempt in range(1, MAX_TRIES + 1):
        wanted = change(node)
        if wanted is None:
            return None
        try:
            return cluster.patch_node(node, wanted, dry_run=dry_run)
        except ClusterError as error:
            if error.status != CONFLICT or attempt == MAX_TRIES:
                raise
            node = cluster.node(node.name)
    raise AssertionError("the loop returns or raises")


@dataclass
class Attempt:
    """How often the eviction of a pod was asked for."""

    begun: float
    """Unix seconds of the first time."""
    due: float
    """Unix seconds before which it is not asked again."""
    pause: float
    """Seconds until the time after that."""


@dataclass
class Evictions:
    """Evictions of one alert: those that are under way, and what became of the others."""

    attempts: dict[str, Attempt] = field(default_factory=dict)
    """Pod uid to attempt, while a budget holds it back."""
    given_up: list[str] = field(default_factory=list)
    """Pod uids."""
    num_evicted: int = 0


@dataclass
class Memory:
    """What this actor knows of one alert."""

    first_end: int
    """Last second of the result that it first came with."""
    handled: float = 0.0
    """Unix seconds of the last answer."""
    state: str = ""
    """State of the alert then."""
    last: Outcome | None = None
    """The last answer."""
    is_finished: bool = False
    """Nothing is left to do."""
    has_opened: bool = False
    """It has opened the breaker, and does so once."""
    evictions: Evictions = field(default_factory=Evictions)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Memory:
        """Return what `asdict` made of one."""
        evictions = Evictions(**raw["evictions"])
        attempts = raw["evictions"]["attempts"].items()
        evictions.attempts = {uid: Attempt(**attempt) for uid, attempt in attempts}
        last = Outcome(**raw["last"]) if raw["last"] else None
        return cls(**{**raw, "evictions": evictions, "last": last})


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
    dry_run: bool,
) -> Round:
    """Ask once for the eviction of each pod that is due.

    Raises:
        ClusterError: anything but a budget that holds a pod back and a pod that is gone.
    """
    done = Round()
    for pod in pods:
        if not pod.is_evictable or pod.is_terminating or pod.uid in state.given_up:
            continue
        known = state.attempts.get(pod.uid)
        if known is not None and now < known.due:
            done.num_waiting += 1
            continue
        try:
            cluster.evict(pod, dry_run=dry_run)
        except ClusterError as error:
            if error.status == BLOCKED:
                _held_back(pod, known, error, state, done, now=now, config=config)
                continue
            if error.status not in (GONE, CONFLICT):
                raise
        else:
            done.evicted.append(pod)
            state.num_evicted += 1
        state.attempts.pop(pod.uid, None)
    return done


def _held_back(
    pod: PodInfo,
    known: Attempt | None,
    error: ClusterError,
    state: Evictions,
    done: Round,
    *,
    now: float,
    config: ActConfig,
) -> None:
    """Wait longer, or give up."""
    attempt = known or Attempt(now, now, config.backoff_seconds)
    if now - attempt.begun >= config.give_up_seconds:
        state.attempts.pop(pod.uid, None)
        state.given_up.append(pod.uid)
        done.blocked.append(pod)
        return
    attempt.due = now + max(attempt.pause, min(error.retry_after, config.max_backoff_seconds))
    attempt.pause = min(2 * attempt.pause, config.max_backoff_seconds)
    state.attempts[pod.uid] = attempt
    done.num_waiting += 1
