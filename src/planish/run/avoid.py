"""Nodes that the runs on a root avoid, who named them, and the node affinity of pods.

This module sends no request to the cluster: only the scheduler knows whether a node exists.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from planish import store
from planish.base.errors import ConfigError, ObjectExists, RecordError
from planish.records import layout
from planish.store.documents import read_json, write_json

logger = logging.getLogger(__name__)

HOSTNAME_LABEL = "kubernetes.io/hostname"
"""Label whose value is the node's name, unless somebody has changed it."""

WHICH_RUNS = (
    "runs keep away from it whose pipeline was compiled with `--max-restarts` (`python -m "
    "pipelines.compile --monitor URI --max-restarts N`, then `planish submit --pipeline FILE`); "
    "others refuse to begin"
)

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class AvoidedNode:
    """One avoided node, and who named it."""

    name: str
    named_by: str
    """`monitor_check`, or `operator`."""
    run_id: str = ""
    """Run that named the node; empty outside a cluster."""
    iteration: int = 0
    seconds: float = 0.0


def is_node_name(name: str) -> bool:
    """Return whether a machine's name is a valid value of the label `HOSTNAME_LABEL`."""
    return _NAME.fullmatch(name) is not None


def avoid(root: str, node: AvoidedNode) -> bool:
    """Make the following runs on a root avoid a node; return False if it was named before."""
    if not is_node_name(node.name):
        raise ConfigError(
            f"a node must be named like the label `{HOSTNAME_LABEL}`, got {node.name!r}; the "
            "identity of a machine is the name of its node"
        )
    document = {**asdict(node), "seconds": node.seconds or time.time()}
    uri = layout.avoided_node(root, node.name)
    try:
        write_json(uri, document, over="")
    except ObjectExists:
        return False
    logger.info("following runs avoid node=%s named_by=%s", node.name, node.named_by)
    return True


def avoided(root: str) -> list[AvoidedNode]:
    """Return the avoided nodes, in the order in which they were named.

    Other objects in the same folder are logged and ignored.
    """
    nodes = []
    for uri in store.list_uris(f"{layout.avoided_nodes(root)}/"):
        try:
            nodes.append(TypeAdapter(AvoidedNode).validate_python(read_json(uri)))
        except (ValueError, RecordError) as error:
            logger.warning("ignored, no mark of a node uri=%s error=%.200s", uri, error)
    return sorted(nodes, key=lambda node: (node.seconds, node.name))


def node_affinity(names: Sequence[str]) -> dict[str, Any]:
    """Return the affinity by which a pod avoids these nodes; empty without nodes.

    It has one term with one requirement: terms are alternatives, so a second one would allow the
    nodes.
    """
    if not names:
        return {}
    keep_away = {"key": HOSTNAME_LABEL, "operator": "NotIn", "values": sorted(names)}
    terms = [{"matchExpressions": [keep_away]}]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
