"""Agreement of all ranks on a load: options, fit of checkpoint and state, and who reads what.

Every rank compares its own items with the metadata. Rank 0 joins the results, plans the reads of
all ranks and sends each rank its part. This module changes no tensor.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from planish.base.errors import (
    CheckpointIncomplete,
    DtypeMismatch,
    LayoutMismatch,
    MissingKeys,
    ShapeMismatch,
    UnexpectedKeys,
)
from planish.checkpoint.format.items import PARTS, Columns, LocalItem, quoted_name, renamed
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.format.strict_json import Values
from planish.checkpoint.loading.reader import Opened, check_objects
from planish.checkpoint.plan.match import ShardIndex, match
from planish.checkpoint.plan.reads import RankPart, RankReads, assemble
from planish.checkpoint.plan.share import SharedReads, share_reads
from planish.checkpoint.ranks.messages import ranks_text, refuse_different

if TYPE_CHECKING:
    from planish.checkpoint.ranks.control import Control


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load; `map_fqn`, `timeout_s` and `allow_pickle` may differ between ranks."""

    strict: bool = True
    """Refuse tensors that only the state or only the checkpoint has; else report and skip them."""
    parts: tuple[str, ...] = PARTS
    """Parts to load, of `PARTS`; a load never reads the bytes of others."""
    verify: Literal["crc", "none"] = "crc"
    """`crc`: compare each block with its checksum before its bytes are used."""
    map_fqn: Callable[[str], str] | None = None
    """Parameter or buffer name in the state -> name in the checkpoint; optimizer state follows."""
    dtype_policy: Literal["exact", "cast"] = "exact"
    """`cast` converts where the types differ; the default refuses."""
    redundancy: Literal["auto", "off"] = "auto"
    """`auto`: one rank reads the bytes that several need and sends them on, unless all ranks run on
    one machine and read from a folder; `off`: each rank reads all that it needs."""
    timeout_s: float = 1800.0
    store_timings: bool = False
    """Keep the timings of all ranks beside those of the save, if the store can be written;
    `planish checkpoint report --load` shows them."""
    allow_pickle: bool = False
    """True: unpickle small values that were saved with `allow_pickle`; else refuse them."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.parts) - set(PARTS))
        faults = {
            f"`parts` must be of {PARTS}": unknown or not self.parts,
            "`verify` must be `crc` or `none`": self.verify not in ("crc", "none"),
            "`dtype_policy` must be `exact` or `cast`": self.dtype_policy not in ("exact", "cast"),
            "`redundancy` must be `auto` or `off`": self.redundancy not in ("auto", "off"),
            "`timeout_s` must be positive": self.timeout_s <= 0,
        }
        told = [text for text, is_wrong in faults.items() if is_wrong]
        if told:
            raise ValueError(f"{'; '.join(told)}, got {self}")


Key = tuple[str, str, str]
"""(role, kind, fqn)"""
_COMPLEX = ("C64", "C128")
_NAMED = 8
"""Most faults of one rank that `per_rank` lists."""
_FAULTS: dict[str, tuple[type[LayoutMismatch], str]] = {
    "missing": (MissingKeys, "the checkpoint lacks "),
    "unexpected": (UnexpectedKeys, "nothing asks for "),
    "shape": (ShapeMismatch, ""),
    "dtype": (DtypeMismatch, ""),
}
"""Kind of a fault -> its error, and the text in front of all faults of the kind."""


@dataclass
class Fit:
    """Result of one rank's comparison of its items with a checkpoint."""

    items: list[LocalItem] = field(default_factory=list)
    """Items to fill; their `tensor` has the checkpoint's name and type."""
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Kind (`missing`, `shape` or `dtype`) -> one text for each tensor."""
    absent: list[str] = field(default_factory=list)
    """Tensors of kind `extra` (random generators) that the checkpoint lacks: never an error."""
    unfit: list[Key] = field(default_factory=list)
    """Tensors of the checkpoint whose shape or type differs from that of the state."""


def fit_items(metadata: Metadata, items: Iterable[LocalItem], options: LoadOptions) -> Fit:
    """Match the items of one rank with the tensors of a checkpoint, by name, shape and type."""
    fit = Fit()
    for item in items:
        spec = item.tensor
        if spec.kind not in options.parts:
            continue
        fqn = renamed(spec.kind, spec.fqn, options.map_fqn)
        row = metadata.tensor_ids.get((spec.role, spec.kind, fqn))
        name = quoted_name(spec.role, spec.kind, spec.fqn)
        if row is None:
            name += f" (as `{fqn}`)" if fqn != spec.fqn else ""
            (fit.absent if spec.kind == "extra" else fit.faults["missing"]).append(name)
            continue
        stored = metadata.tensors.spec(row)
        casts = options.dtype_policy == "cast" and (
            (spec.dtype in _COMPLEX) == (stored.dtype in _COMPLEX)
        )
        if spec.shape != stored.shape:
            text = f"{name} must have the shape {list(spec.shape)}, got {list(stored.shape)}"
            fit.faults["shape"].append(text)
        elif spec.dtype != stored.dtype and not casts:
            fit.faults["dtype"].append(f"{name} must be {spec.dtype}, got {stored.dtype}")
        else:
            fit.items.append(LocalItem(stored, item.boxes, item.data))
            continue
        fit.unfit.append((stored.role, stored.kind, stored.fqn))
    return fit


def judge(
    metadata: Metadata,
    findings: Sequence[Values],
    wanted: Iterable[Key],
    options: LoadOptions,
) -> tuple[list[str], list[str]]:
    """Join the findings of all ranks, on rank 0; one error lists all faults.

    Return the tensors that the checkpoint lacks, and its tensors that no rank wants.
    """
    refuse_different("load", [{"options": f["options"], "roles": f["roles"]} for f in findings])
    used = {*wanted, *(tuple(key) for fact in findings for key in fact["unfit"])}
    unexpected = [
        quoted_name(*key)
        for key in sorted(metadata.tensor_ids)
        if key not in used
        and key[0] in findings[0]["roles"]
        and key[1] in options.parts
        and key[1] != "extra"
    ]
    ranks_of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, fact in enumerate(findings):
        for kind, texts in fact["faults"].items():
            for text in texts:
                ranks_of[kind, text].append(rank)
    missing = [text for kind, text in ranks_of if kind == "missing"]
    faults: dict[str, list[str]] = {kind: [] for kind in _FAULTS}
    per_rank: dict[int, list[str]] = defaultdict(list)
    for (kind, text), ranks in ranks_of.items():
        if len(ranks) < len(findings):
            for rank in ranks:
                per_rank[rank].append(f"{kind}: {text}")
            text = f"{text} (on {ranks_text(ranks)})"
        faults[kind].append(text)
    if options.strict:
        faults["unexpected"] = unexpected
    else:
        faults["missing"] = []
    shown = {kind: f"{_FAULTS[kind][1]}{'; '.join(own)}" for kind, own in faults.items() if own}
    if shown:
        error = (_FAULTS[next(iter(shown))][0] if len(shown) == 1 else LayoutMismatch)(
            f"a checkpoint must fit the state that loads it, but {'; '.join(shown.values())};"
            " no tensor has been touched (see `strict`, `parts`, `map_fqn`, `dtype_policy`)"
        )
        error.per_rank = {rank: "; ".join(own[:_NAMED]) for rank, own in per_rank.items()}
        raise error
    absent = dict.fromkeys(text for fact in findings for text in fact["absent"])
    return [*missing, *absent], unexpected


class JobPlan(NamedTuple):
    """Plan of one rank for a load."""

    reads: RankReads
    members: list[int]
    """Ranks with which this one exchanges bytes, itself included."""
    tag: str
    """Random name of the exchange, equal on all ranks."""
    facts: dict[str, Any]
    """Equal on all ranks: `missing` tensors of the state, `unexpected` ones of the checkpoint,
    `sharing` (`all`: ranks exchange bytes; `none`), and `replication`: mean number of ranks that
    need a block."""


def plan_job(
    opened: Opened, fit: Fit, roles: Sequence[str], call: Control, options: LoadOptions
) -> JobPlan:
    """Check and plan a load of `roles`; a collective of all ranks.

    Raises:
        LayoutMismatch: names, shapes, types or layouts do not fit; every offender is listed.
        CheckpointIncomplete: objects are missing or short; every one is listed.
        PlanMismatch: the options or roles differ between ranks.
    """
    columns = Columns.from_items(fit.items)
    compared = {**vars(options), "map_fqn": options.map_fqn is not None}
    del compared["timeout_s"], compared["allow_pickle"]
    finding = {
        "faults": fit.faults,
        "absent": fit.absent,
        "unfit": fit.unfit,
        "options": compared,
        "roles": list(roles),
    }
    findings = call.gather(json.dumps(finding).encode(), "fit")
    wishes = call.gather(columns.encode(), "columns")

    def plan() -> list[bytes]:
        facts = [json.loads(data) for data in findings or ()]
        return _plan_for_all(opened, options, call.hosts, facts, wishes or ())

    head, _, wire = call.deal(plan, "plan").partition(b"\n")
    mine = match(opened.metadata, columns)
    part = RankPart.decode(wire) if wire else share_reads(opened.metadata, [mine]).part(0)
    reads = assemble(opened.metadata, part, mine)
    return JobPlan(reads, **json.loads(head))


def _plan_for_all(
    opened: Opened,
    options: LoadOptions,
    hosts: Sequence[int],
    findings: Sequence[Values],
    wishes: Sequence[bytes],
) -> list[bytes]:
    """Return each rank's plan: a line of JSON, then its `RankPart` if ranks share reads."""
    metadata = opened.metadata
    # Replicas send equal bytes; each distinct message is decoded and matched once.
    wanted = {data: Columns.decode(data) for data in dict.fromkeys(wishes)}
    keys = {key for columns in wanted.values() for key in columns.tensors.ids}
    missing, unexpected = judge(metadata, findings, keys, options)
    index = ShardIndex(metadata)
    matched = {data: match(metadata, columns, index=index) for data, columns in wanted.items()}
    reads = [matched[data] for data in wishes]
    shards = np.unique(np.concatenate([mine.shard for mine in reads]))
    faults = check_objects(opened, set(metadata.shards.file[shards].tolist()))
    if faults:
        raise CheckpointIncomplete(
            f"`{opened.uri}` must hold the objects that its metadata names, but "
            f"{'; '.join(faults)}; load an earlier checkpoint"
        )
    shared = share_reads(metadata, reads, hosts=hosts)
    # Processes of one machine share its page cache, which costs less than messages.
    is_near = opened.storage.in_memory or (opened.uri.startswith("file:") and len({*hosts}) == 1)
    is_shared = options.redundancy == "auto" and not is_near and shared.replication > 1.0
    members = members_of(shared) if is_shared else [[rank] for rank in range(len(reads))]
    head = {
        "tag": secrets.token_hex(8),
        "facts": {
            "missing": missing,
            "unexpected": unexpected,
            "sharing": "all" if is_shared else "none",
            "replication": shared.replication,
        },
    }
    return [
        json.dumps({**head, "members": mine}).encode()
        + b"\n"
        + (shared.part(rank).encode() if is_shared else b"")
        for rank, mine in enumerate(members)
    ]


def members_of(shared: SharedReads) -> list[list[int]]:
    """Return, for each rank, its connected component of ranks that exchange bytes."""
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
