"""One plan for all ranks of a load: made on rank 0 from everybody's wishes, dealt out to each."""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planish.checkpoint.load_fit import Fit, Key, Verdict, encode_fit, judge
from planish.checkpoint.load_records import LoadOptions
from planish.checkpoint.model import Columns
from planish.checkpoint.plan.load import match
from planish.checkpoint.plan.reads import LocalReads, RankReads
from planish.checkpoint.plan.share import SharedReads, rank_reads, share_reads
from planish.checkpoint.reader import Opened, check_objects
from planish.errors import CheckpointIncomplete

if TYPE_CHECKING:
    from planish.checkpoint.coordination import Control


@dataclass(frozen=True)
class JobPlan:
    """What one rank is to do in a load, and what all found out together."""

    reads: RankReads
    """Of this rank."""
    members: list[int]
    """The ranks that it exchanges bytes with, itself included."""
    tag: str
    """Random name of the exchange, equal on all ranks."""
    unique_bytes: int
    """Tensor bytes that at least one rank needs, each counted once."""
    verdict: Verdict


def plan_job(
    opened: Opened, fit: Fit, roles: Sequence[str], call: Control, options: LoadOptions
) -> JobPlan:
    """Check and plan a load; a collective of all ranks.

    Args:
        opened: the checkpoint.
        fit: what this rank found.
        roles: that this rank loads.
        call: of the ranks that load.
        options: of this rank.

    Raises:
        LayoutMismatch: names, shapes, types or layouts do not fit; every offender is listed.
        CheckpointIncomplete: objects are missing or short; every one is listed.
        PlanMismatch: the ranks want different things.
    """
    columns = Columns.from_items(fit.items)
    findings = call.gather(encode_fit(fit, options, roles), "fit")
    wishes = call.gather(columns.encode(), "columns")
    error: Exception | None = None
    heads: list[bytes] = []
    wires: list[bytes] = []
    if findings is not None and wishes is not None:
        try:
            heads, wires = _Planner(opened, options, call).plan(findings, wishes)
        except Exception as found:
            error = found
    call.settle(error, "plan")
    head = json.loads(call.scatter(heads or None, "plan.head"))
    wire = call.scatter(wires or None, "plan.reads")
    mine = match(opened.metadata, columns)
    if wire:
        reads = rank_reads(opened.metadata, wire, mine)
    else:
        reads = share_reads(opened.metadata, [mine]).rank(opened.metadata, 0, mine)
    verdict = Verdict(tuple(head["missing"]), tuple(head["unexpected"]), head["max_host_bytes"])
    return JobPlan(reads, head["members"], head["tag"], head["unique_bytes"], verdict)


class _Planner:
    """What rank 0 does."""

    def __init__(self, opened: Opened, options: LoadOptions, call: Control) -> None:
        self.opened, self.options, self.call = opened, options, call

    def plan(
        self, findings: Sequence[bytes], wishes: Sequence[bytes]
    ) -> tuple[list[bytes], list[bytes]]:
        """Return for every rank the head and the reads of its plan; no reads: it plans alone."""
        metadata = self.opened.metadata
        columns = [Columns.decode(data) for data in wishes]
        keys: set[Key] = {key for one in columns for key in one.tensors.ids}
        verdict = judge(metadata, findings, keys, self.options)
        reads = _match_all(self.opened, columns)
        self._refuse_missing(reads)
        shared = share_reads(metadata, reads, hosts=self.call.hosts)
        alone = self.options.redundancy == "off"
        groups = [[rank] for rank in range(len(reads))] if alone else members_of(shared)
        tag = secrets.token_hex(8)
        heads = [
            json.dumps(
                {
                    "missing": verdict.missing,
                    "unexpected": verdict.unexpected,
                    "max_host_bytes": verdict.max_host_bytes,
                    "members": groups[rank],
                    "tag": tag,
                    "unique_bytes": shared.unique_bytes,
                }
            ).encode()
            for rank in range(len(reads))
        ]
        return heads, [b"" if alone else shared.wire(rank) for rank in range(len(reads))]

    def _refuse_missing(self, reads: Iterable[LocalReads]) -> None:
        shards = np.unique(np.concatenate([one.shard for one in reads]))
        files = np.unique(self.opened.metadata.shards.file[shards])
        faults = check_objects(self.opened, set(files.tolist()))
        if faults:
            raise CheckpointIncomplete(
                f"`{self.opened.uri}` must hold the objects that its metadata names, but "
                f"{'; '.join(faults)}; load an earlier checkpoint"
            )


def _match_all(opened: Opened, columns: Sequence[Columns]) -> list[LocalReads]:
    """Match every rank's wishes; equal ones once."""
    found: dict[bytes, LocalReads] = {}
    reads = []
    for one in columns:
        signature = one.signature()
        if signature not in found:
            found[signature] = match(opened.metadata, one)
        reads.append(found[signature])
    return reads


def members_of(shared: SharedReads) -> list[list[int]]:
    """Return, for each rank, the ranks that it exchanges bytes with, directly or through others."""
    leader = list(range(shared.ranks))

    def find(rank: int) -> int:
        while leader[rank] != rank:
            leader[rank] = leader[leader[rank]]
            rank = leader[rank]
        return rank

    bounds, rows = shared.involved
    for rank in range(shared.ranks):
        for peer in np.unique(shared.reader[rows[bounds[rank] : bounds[rank + 1]]]).tolist():
            low, high = sorted((find(rank), find(peer)))
            leader[high] = low
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in range(shared.ranks):
        groups[find(rank)].append(rank)
    return [groups[find(rank)] for rank in range(shared.ranks)]
