"""Commits of a shard: its samples so far, kept beside its rollouts until these are written.

Each commit is a separate set of the groups that have changed since the commit before, so no commit
is ever rewritten. A retry reads the commits in order; the last state of a group counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish import store
from planish.base.errors import ObjectMissing, RecordError
from planish.records.io import read_manifest, read_set, write_set
from planish.records.manifest import MANIFEST
from planish.records.rollouts import RolloutSet
from planish.stages.rollout.groups import Group, as_set, from_set, group_facts

logger = logging.getLogger(__name__)


@dataclass
class Committed:
    """Samples that earlier attempts have left."""

    groups: dict[int, Group] = field(default_factory=dict)
    """Newest state of each group that has entered, by ordinal."""
    steps: int = 0
    """Decode steps of the engine so far."""
    most_rows: int = 0
    """Most rows of any of these steps."""


class Commits:
    """The commits of one shard of one iteration."""

    def __init__(self, uri: str, *, parents: Mapping[str, str], facts: Mapping[str, Any]) -> None:
        """Bind a folder; a retry uses commits with these digests of inputs and these facts."""
        self._uri, self._parents, self._facts = uri, dict(parents), dict(facts)
        self._next = 0

    def read(self) -> Committed:
        """Return the commits of earlier attempts with the same inputs; drop those of others.

        A damaged commit ends the sequence: this shard samples its part and all later ones again.
        """
        found = Committed()
        opened, key = store.open_store(self._uri)
        # Commits that another attempt writes meanwhile stay; writes of this one replace them.
        before = list(opened.list(key))
        try:
            while True:
                uri = self._place(self._next)
                manifest = read_manifest(uri)
                facts = manifest.attributes
                same = all(facts.get(name) == value for name, value in self._facts.items())
                if not same or not self._parents.items() <= manifest.parents.items():
                    break
                rollouts = read_set(RolloutSet, uri, sha256=manifest.sha256)
                groups = from_set(rollouts, facts["ordinals"], facts["drawn"])
                found.groups.update((group.ordinal, group) for group in groups)
                found.steps, found.most_rows = facts["steps"], facts["most_rows"]
                self._next += 1
        except ObjectMissing:
            pass
        except RecordError as error:
            logger.warning("damaged commit=%d error=%s", self._next, error)
        for stat in before:
            if stat.key >= f"{key}/{self._next:06d}" and stat.key.endswith(MANIFEST):
                opened.delete_exact(stat.key, stat.etag)
        if found.groups:
            logger.info(
                "resumed commits=%d groups=%d tokens=%d",
                self._next,
                len(found.groups),
                sum(group.num_tokens for group in found.groups.values()),
            )
        return found

    def write(self, groups: Sequence[Group], *, steps: int, most_rows: int) -> None:
        """Commit the present state of groups, and the engine's counts so far."""
        counts = {"steps": steps, "most_rows": most_rows}
        attributes = {**self._facts, **group_facts(groups), **counts}
        uri = self._place(self._next)
        write_set(uri, as_set(groups), parents=self._parents, attributes=attributes)
        self._next += 1

    def clear(self) -> None:
        """Delete all commits, also those of another attempt: the rollouts are written."""
        opened, key = store.open_store(self._uri)
        opened.delete(stat.key for stat in opened.list(key))
        opened.tidy(key)

    def _place(self, number: int) -> str:
        return f"{self._uri}/{number:06d}"
