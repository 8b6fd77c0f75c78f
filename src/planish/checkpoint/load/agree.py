"""One plan for all ranks of a load: made on rank 0 from everybody's wishes, dealt out to each."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planish.base.errors import CheckpointIncomplete, LayoutMismatch, PeerLost, PlanMismatch
from planish.checkpoint.format.geometry import volumes
from planish.checkpoint.format.records import Columns
from planish.checkpoint.load import rates as load_rates
from planish.checkpoint.load.fit import Fit, Key, Verdict, encode_fit, judge
from planish.checkpoint.load.rates import Order, Rates, Sharing
from planish.checkpoint.load.reader import Opened, check_objects
from planish.checkpoint.load.records import LoadOptions
from planish.checkpoint.plan.coalesce import Costs
from planish.checkpoint.plan.load import match
from planish.checkpoint.plan.reads import LocalReads, RankReads
from planish.checkpoint.plan.share import SharedReads, rank_reads, share_reads
from planish.checkpoint.ranks.messages import EVERYONE

if TYPE_CHECKING:
    from planish.checkpoint.ranks.control import Control


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
    sharing: Sharing
    """Between whom bytes are exchanged."""
    replication: float
    """How many ranks need a block on average."""
    rates: Rates | None
    """What that was decided by, where it was measured."""


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
    planner: _Planner | None = None
    order = b""
    if findings is not None and wishes is not None:
        try:
            planner = _Planner(opened, options, call, findings, wishes)
            order = planner.order()
        except Exception as found:
            error = found
    lost = _measure(opened, call, Order.decode(call.broadcast(order, "rates")))
    heads: list[bytes] = []
    wires: list[bytes] = []
    if planner is not None and error is None:
        try:
            heads, wires = planner.plan()
        except Exception as found:
            error = found
    judged = isinstance(error, (LayoutMismatch, PlanMismatch))
    call.settle(error or lost, "plan", whose=EVERYONE if judged else None)
    head = json.loads(call.scatter(heads or None, "plan.head"))
    wire = call.scatter(wires or None, "plan.reads")
    return _job(opened, head, wire, match(opened.metadata, columns))


def _measure(opened: Opened, call: Control, order: Order | None) -> PeerLost | None:
    """Let the ranks measure, if rank 0 wants it; a collective. Returns that a peer is gone."""
    if order is None:
        return None
    found = b""
    lost: PeerLost | None = None
    try:
        found = load_rates.measure(opened, call, order)
    except PeerLost as error:
        lost = error
    measured = call.gather(found, "rates")
    if measured is not None:
        load_rates.keep_rates(opened, call, measured)
    return lost


def _job(opened: Opened, head: dict[str, Any], wire: bytes, mine: LocalReads) -> JobPlan:
    """Return the plan of this rank from what rank 0 sent; without reads it plans its own."""
    if wire:
        reads = rank_reads(opened.metadata, wire, mine)
    else:
        costs = Costs(**head["costs"])
        reads = share_reads(opened.metadata, [mine], costs=costs).rank(opened.metadata, 0, mine)
    return JobPlan(
        reads,
        head["members"],
        head["tag"],
        head["unique_bytes"],
        Verdict(tuple(head["missing"]), tuple(head["unexpected"]), head["max_host_bytes"]),
        head["sharing"],
        head["replication"],
        Rates(**head["rates"]) if head["rates"] else None,
    )


class _Planner:
    """What rank 0 does, once it knows what all ranks have found and want."""

    def __init__(
        self,
        opened: Opened,
        options: LoadOptions,
        call: Control,
        findings: Sequence[bytes],
        wishes: Sequence[bytes],
    ) -> None:
        self.opened, self.options, self.call = opened, options, call
        columns = [Columns.decode(data) for data in wishes]
        keys: set[Key] = {key for one in columns for key in one.tensors.ids}
        self.verdict = judge(opened.metadata, findings, keys, options)
        self.reads = _match_all(opened, columns)
        shards = np.unique(np.concatenate([one.shard for one in self.reads]))
        self.files: list[int] = np.unique(opened.metadata.shards.file[shards]).tolist()
        self._refuse_missing()

    def order(self) -> bytes:
        """Return what has to be measured first, empty for nothing."""
        metadata = self.opened.metadata
        # Replicas want the same; what one of them wants is counted once and multiplied.
        counts = Counter(map(id, self.reads))
        different = {id(one): one for one in self.reads}
        item_bytes = metadata.tensors.item_bytes[metadata.shards.tensor]
        num_bytes = sum(
            counts[key] * int((volumes(one.lengths) * item_bytes[one.shard]).sum())
            for key, one in different.items()
        )
        network = self.options.redundancy == "auto"
        order = load_rates.order_for(self.opened, self.call, self.files, num_bytes, network=network)
        return b"" if order is None else order.encode()

    def plan(self) -> tuple[list[bytes], list[bytes]]:
        """Return for every rank the head and the reads of its plan; no reads: it plans alone."""
        hosts, metadata = self.call.hosts, self.opened.metadata
        rates = load_rates.kept_rates(self.opened, self.call)
        costs = rates.costs() if rates is not None else Costs()
        shared = share_reads(metadata, self.reads, hosts=hosts, costs=costs)
        sharing = load_rates.choose_sharing(
            self.options.redundancy,
            shared.replication,
            hosts,
            in_memory=load_rates.is_in_memory(self.opened),
            rates=rates,
        )
        ranks = range(len(self.reads))
        if sharing == "all" or len(ranks) == 1:
            groups, wires = members_of(shared), [shared.wire(rank) for rank in ranks]
        elif sharing == "machine":
            groups, wires = self._by_machine(costs)
        else:
            groups, wires = [[rank] for rank in ranks], [b"" for _ in ranks]
        head = {
            "missing": self.verdict.missing,
            "unexpected": self.verdict.unexpected,
            "max_host_bytes": self.verdict.max_host_bytes,
            "tag": secrets.token_hex(8),
            "unique_bytes": shared.unique_bytes,
            "costs": dataclasses.asdict(costs),
            "sharing": sharing,
            "replication": shared.replication,
            "rates": dataclasses.asdict(rates) if rates is not None else None,
        }
        return [json.dumps({**head, "members": one}).encode() for one in groups], wires

    def _by_machine(self, costs: Costs) -> tuple[list[list[int]], list[bytes]]:
        """Plan every machine as if it were alone; ranks keep their numbers."""
        hosts = self.call.hosts
        groups: list[list[int]] = [[rank] for rank in range(len(hosts))]
        wires = [b""] * len(hosts)
        for host in sorted(set(hosts)):
            reads = [
                one if where == host else _nothing(one)
                for one, where in zip(self.reads, hosts, strict=True)
            ]
            shared = share_reads(self.opened.metadata, reads, hosts=hosts, costs=costs)
            members = members_of(shared)
            for rank in (rank for rank, where in enumerate(hosts) if where == host):
                groups[rank], wires[rank] = members[rank], shared.wire(rank)
        return groups, wires

    def _refuse_missing(self) -> None:
        faults = check_objects(self.opened, set(self.files))
        if faults:
            raise CheckpointIncomplete(
                f"`{self.opened.uri}` must hold the objects that its metadata names, but "
                f"{'; '.join(faults)}; load an earlier checkpoint"
            )


def _nothing(reads: LocalReads) -> LocalReads:
    """Return the reads of a rank that wants nothing, of the same width."""
    columns = (getattr(reads, one.name) for one in dataclasses.fields(reads))
    return LocalReads(*(column[:0] for column in columns))


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
