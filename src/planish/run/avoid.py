"""Nodes that the runs on a root keep away from: who named them, and the affinity that does it.

It deliberately asks no cluster: whether a node of that name exists, the scheduler will know.
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
"""Label of a node that holds its name, where nobody has changed it."""

WHICH_RUNS = (
    "runs keep away from it whose pipeline was compiled with `--max-restarts` (`python -m "
    "pipelines.compile --monitor URI --max-restarts N`, then `planish submit --pipeline FILE`); "
    "others refuse to begin"
)

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class AvoidedNode:
    """One node and who named it."""

    name: str
    named_by: str
    """`monitor_check`, or `operator`."""
    run_id: str = ""
    """Run in which it was named; empty outside a cluster."""
    iteration: int = 0
    seconds: float = 0.0


def is_node_name(name: str) -> bool:
    """Tell whether a machine may be the value of the label that holds a node's name."""
    return _NAME.fullmatch(name) is not None


def avoid(root: str, node: AvoidedNode) -> bool:
    """Keep the following runs on a root away from a node; False: somebody named it before."""
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
    """Return the nodes that are avoided, by the time at which they were named.

    What else lies among their marks is told and ignored.
    """
    nodes = []
    for uri in store.list_uris(f"{layout.avoided_nodes(root)}/"):
        try:
            nodes.append(TypeAdapter(AvoidedNode).validate_python(read_json(uri)))
        except (ValueError, RecordError) as error:
            logger.warning("ignored, no mark of a node uri=%s error=%.200s", uri, error)
    return sorted(nodes, key=lambda node: (node.seconds, node.name))


def node_affinity(names: Sequence[str]) -> dict[str, Any]:
    """Return the affinity that keeps a pod away from these nodes; empty for none.

    One term with one requirement: terms are alternatives, so a second one would let a pod back.
    """
    if not names:
        return {}
    keep_away = {"key": HOSTNAME_LABEL, "operator": "NotIn", "values": sorted(names)}
    terms = [{"matchExpressions": [keep_away]}]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
