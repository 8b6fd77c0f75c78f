"""Sets of whole groups that a shard leaves for the next iteration: surplus and carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planish.base.errors import ObjectMissing, RecordError
from planish.records.io import read_manifest, read_set, write_set
from planish.records.refs import parse_pin
from planish.records.rollouts import RolloutSet

_FACTS = ("config_sha256", "iteration", "seed", "shard", "num_shards", "policy_version")


def read_side_set(
    pin: str, config_sha256: str, *names: str
) -> tuple[RolloutSet, Mapping[str, Any]]:
    """Read a set and the attributes of its manifest; those in `names` have one int per group.

    It drops the verdicts of a run with another configuration, which may have judged differently.

    Raises:
        ObjectMissing: the set is gone.
        RecordError: the set is damaged, or another release wrote these attributes differently.
    """
    uri, digest = parse_pin(pin)
    rollouts, facts = read_set(RolloutSet, uri, sha256=digest), read_manifest(uri, sha256=digest)
    for name in names:
        seen: Any = facts.attributes.get(name)
        is_list = isinstance(seen, list) and all(type(number) is int for number in seen)
        if not is_list or len(seen) != rollouts.num_groups:
            raise RecordError(
                f"`{name}` of `{uri}` must be a number for each of its {rollouts.num_groups} "
                f"groups, got {seen!r:.80}; go on with the release that wrote it, or start from "
                "the policy alone"
            )
    if facts.attributes.get("config_sha256") != config_sha256:
        rollouts = replace(rollouts, accuracy=None)
    return rollouts, facts.attributes


def write_side_set(
    uri: str,
    rollouts: RolloutSet,
    parents: Mapping[str, str],
    facts: Mapping[str, Any],
    columns: Mapping[str, list[int]],
) -> str:
    """Write a set with one number per group in each of `columns`; return its manifest's digest."""
    attributes = {**{name: facts[name] for name in _FACTS}, **columns}
    return write_set(uri, rollouts, parents=parents, attributes=attributes).manifest_sha256


def is_there(uri: str, digest: str) -> bool:
    """Return True if the set with manifest `digest` exists, or if "" names no set."""
    if not digest:
        return True
    try:
        return read_manifest(uri).sha256 == digest
    except ObjectMissing:
        return False
