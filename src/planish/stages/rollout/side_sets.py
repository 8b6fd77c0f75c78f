"""Sets of whole groups that a shard leaves for the next iteration: surplus and carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planish.base.errors import ObjectMissing, RecordError
from planish.records.io import read_manifest, read_set, write_set
from planish.records.refs import parse_pin
from planish.records.rollouts import RolloutSet

_FACTS = ("config_sha256", "iteration", "seed", "shard", "num_shards", "policy_version")


def read_side_set(
    pin: str, names: Sequence[str], *, kind: str
) -> tuple[RolloutSet, dict[str, list[int]]]:
    """Read a set and the counts that its manifest holds for each group.

    Args:
        pin: pinned URI.
        names: attributes, one list of G numbers each.
        kind: `surplus` or `carry`, for messages.

    Raises:
        ObjectMissing: the set is gone.
        RecordError: the set is damaged.
    """
    uri, digest = parse_pin(pin)
    manifest = read_manifest(uri, sha256=digest)
    rollouts = read_set(RolloutSet, uri, sha256=digest)
    columns: dict[str, list[int]] = {}
    for name in names:
        counts: Any = manifest.attributes.get(name)
        if not isinstance(counts, list) or any(type(k) is not int or k < 0 for k in counts):
            raise RecordError(
                f"`{name}` of the {kind} set with manifest {manifest.sha256} must be a list of "
                f"counts, got {counts!r:.80}; resume from an earlier state"
            )
        columns[name] = counts
    if any(len(column) != rollouts.num_groups for column in columns.values()):
        raise RecordError(
            f"the {kind} set `{uri}` must name {sorted(columns)} for each of its "
            f"{rollouts.num_groups} groups, got {[len(column) for column in columns.values()]}; "
            "resume from an earlier state"
        )
    return rollouts, columns


def write_side_set(
    uri: str,
    rollouts: RolloutSet,
    parents: Mapping[str, str],
    facts: Mapping[str, Any],
    columns: Mapping[str, list[int]],
) -> str:
    """Write a set with the counts of its groups; returns the digest of its manifest."""
    attributes = {**{name: facts[name] for name in _FACTS}, **columns}
    return write_set(uri, rollouts, parents=parents, attributes=attributes).manifest_sha256


def is_there(uri: str, digest: str) -> bool:
    """Tell whether the set that the rollouts name by `digest` is there; "" names none."""
    if not digest:
        return True
    try:
        return read_manifest(uri).sha256 == digest
    except ObjectMissing:
        return False
