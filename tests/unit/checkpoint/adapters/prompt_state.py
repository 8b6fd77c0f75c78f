"""The data position of reinforcement learning as loader state: prompts, slots, surplus groups.

Rollout shards take the place of data-parallel ranks. Groups that go on (`slots`) and groups that
wait to be trained (`surplus`) are samples of a shard's buffer: another number of shards deals them
out anew, none lost and none twice, a group never split. Which prompts are consumed is the cursor's
business, equal on all shards. Groups are plain data here; the rollout stage gives them meaning.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (buffers split and merged); T-PPO, arXiv
2506.15050 (responses carried over iterations); what a state must hold is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.adapters.loader_state import LoaderShard
from planish.records.stream import Cursor, fresh_cursor, parse_cursor

Group = dict[str, Any]
"""Plain data of a group: `ordinal`, `drawn` (iteration of its entry), tokens, log-probabilities,
values, versions ... as numbers, text and arrays."""


@dataclass
class PromptState:
    """One rollout shard's part of the data position; meets `loader_state.Loader`.

    Example:
        >>> state = PromptState(0, 1, slots=[{"ordinal": 3, "drawn": 1}])
        >>> [kind for kind, _ in state.ckpt_shards()[0].buffer]
        ['slot']
    """

    dp_rank: int
    """Shard, 0 .. dp_size - 1."""
    dp_size: int
    """Number of rollout shards."""
    cursor: Cursor = field(default_factory=fresh_cursor)
    """Prompts consumed: trained, or drawn into a slot or a surplus group."""
    slots: list[Group] = field(default_factory=list)
    """Groups with responses that go on, in the order of their entry."""
    surplus: list[Group] = field(default_factory=list)
    """Complete groups that no batch has had room for."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Equal on all shards: digests of data, verifier and configuration, the KL controller's value,
    the reference model's id."""
    num_readers: int = 1
    """One reader per shard."""

    def ckpt_common(self) -> dict[str, Any]:
        """Return cursor and facts."""
        return {"cursor": {**self.cursor}, "facts": dict(self.facts)}

    def ckpt_shards(self) -> list[LoaderShard]:
        """Return the groups of this shard: slots, then surplus."""
        groups = [("slot", group) for group in self.slots]
        groups += [("surplus", group) for group in self.surplus]
        return [LoaderShard(self.dp_rank, 0, buffer=list(groups))]

    def ckpt_restore(self, common: Mapping[str, Any], shards: Iterable[LoaderShard]) -> None:
        """Go on from here; groups are sorted by their entry.

        Raises:
            CheckpointCorrupt: a sample is no group, or its prompt counts as not consumed.
        """
        cursor = parse_cursor(common.get("cursor"))
        found: dict[str, list[Group]] = {"slot": [], "surplus": []}
        for kind, group in (sample for shard in shards for sample in shard.buffer):
            found.get(kind, []).append(group)
            if kind not in found or not _is_consumed(cursor, group):
                raise CheckpointCorrupt(
                    "a group of the data position must be of a consumed prompt, got "
                    f"{kind!r:.40} with ordinal {group.get('ordinal')!r:.40} at a cursor whose "
                    f"next is {cursor['next']}; load an earlier checkpoint"
                )
        self.cursor, self.facts = cursor, dict(common.get("facts", {}))
        self.slots = sorted(found["slot"], key=_entry)
        self.surplus = sorted(found["surplus"], key=_entry)


def _is_consumed(cursor: Cursor, group: Group) -> bool:
    ordinal = group.get("ordinal")
    is_free = not isinstance(ordinal, int) or ordinal >= cursor["next"]
    return not is_free and ordinal not in cursor["pending"]


def _entry(group: Group) -> tuple[int, int]:
    return (group.get("drawn", 0), group["ordinal"])
