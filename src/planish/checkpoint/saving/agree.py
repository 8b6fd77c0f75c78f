"""First part of a save, before anything is copied: all ranks agree and get a plan.

Every rank sends a signature of its items. Rank 0 looks up the plan of an earlier save with the
same signatures; without one it gathers the columns of all ranks and plans anew. Everything here
runs on the caller's thread, because the state must not change before it is staged.

Source: ByteCheckpoint, arXiv 2407.20143, sections 3.3 (global plan) and 4.1 (plan cache). We add
the comparison of all ranks' signatures at every save.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from planish.base import telemetry
from planish.base.errors import SaveFailed
from planish.checkpoint.commit.journal import new_attempt
from planish.checkpoint.format.items import Collected, Columns, LocalItem
from planish.checkpoint.format.small_objects import (
    Claim,
    SmallObject,
    choose_writers,
    differing,
    encode_objects,
)
from planish.checkpoint.plan.files import GlobalPlan, RankPlan
from planish.checkpoint.plan.save import decode_all, plan_save
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.ranks.messages import (
    decode_errors,
    encode_errors,
    joined_error,
    refuse_different,
)

logger = logging.getLogger(__name__)

MOST_PLANS = 8
"""Number of plans in the cache; the least recently used one is dropped first."""
_MAY_DIFFER = {"timeout_s", "pace_s", "header", "allow_pickle"}

Roles = Mapping[str, Collected]
"""Role -> result of its adapter."""


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save; all ranks need the same, except those in `_MAY_DIFFER`."""

    uri: str
    """Place of the checkpoint: `s3://bucket/key`, `file:///folder` or a path."""
    step: int = 0
    """Training step, at least 0."""
    overwrite: bool = False
    """Replace a committed checkpoint at this place; else refuse."""
    inflight: Literal["wait", "skip", "raise"] = "wait"
    """Action while earlier saves use all staging buffers: wait, skip this save, or raise."""
    timeout_s: float = 1800.0
    """Limit on the whole save, seconds."""
    pace_s: float = 0.0
    """Seconds over which the upload is spread, so that it slows training less; 0: full speed. Keep
    it below the time between two saves. A synchronous save ignores it."""
    is_async: bool = True
    """Return when the state is staged, not when it is committed."""
    tags: Mapping[str, str] = field(default_factory=dict)
    run_id: str = ""
    header: Mapping[str, Any] = field(default_factory=dict)
    """JSON for the metadata (layout, parents, attributes); rank 0's is stored."""
    allow_pickle: bool = False
    """Store arbitrary objects among the small values; else refuse them."""

    def __post_init__(self) -> None:
        faults = []
        if type(self.step) is not int or self.step < 0:
            faults.append(f"`step` must be a whole number of at least 0, got {self.step!r}")
        if not self.timeout_s > 0:
            faults.append(f"`timeout_s` must be positive, got {self.timeout_s!r}")
        if not 0 <= self.pace_s < self.timeout_s:
            faults.append(f"`pace_s` must be at least 0 and below `timeout_s`, got {self.pace_s!r}")
        if self.inflight not in ("wait", "skip", "raise"):
            faults.append(f"`inflight` must be `wait`, `skip` or `raise`, got {self.inflight!r}")
        if faults:
            raise ValueError("; ".join(faults))

    def compared(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks."""
        found = {name: value for name, value in vars(self).items() if name not in _MAY_DIFFER}
        return found | {"tags": dict(sorted(self.tags.items()))}


@dataclass
class _Local:
    """Contribution of one rank to a save."""

    items: Sequence[LocalItem]
    columns: Columns
    signature: bytes
    small: list[SmallObject]
    roles: tuple[str, ...]
    facts: dict[str, Any]
    """Role -> `Collected.facts`."""


@dataclass
class Agreed:
    """Result of the agreement on one rank."""

    attempt: str
    plan: RankPlan
    whole: GlobalPlan | None
    """Plan of all ranks, on rank 0; else None."""
    items: Sequence[LocalItem]
    """Items of this rank; [] once they are staged."""
    small: list[SmallObject]
    """Small objects that this rank writes."""
    roles: tuple[str, ...]
    facts: dict[str, Any]


class Skipped(Exception):
    """Earlier saves still use all buffers of a rank, and the policy is `skip`."""


class Planner:
    """Plans the saves of one engine; keeps the last plans.

    The key of a plan is `plan_key`, so a change on any rank means another plan. The caches of all
    ranks have the same keys in the same order. Each save compares `_history`, a digest of these
    keys: if one rank's differs, all ranks drop their plans and plan anew.
    """

    def __init__(self) -> None:
        self.hits = 0
        """Number of saves that have used an earlier plan."""
        self._plans: OrderedDict[bytes, tuple[RankPlan, GlobalPlan | None]] = OrderedDict()
        self._history = b""
        self._last: tuple[list[Any], Columns, bytes] | None = None
        self._warned: set[str] = set()
        """Keys of small objects that differ between ranks and have been logged as such."""

    def agree(
        self, call: Control, roles: Callable[[], Roles], options: SaveOptions, *, busy: bool
    ) -> Agreed:
        """Agree on which rank writes which bytes where; a collective.

        `roles` collects this rank's state; an error in it is raised on all ranks. `busy` is True if
        this rank has no free staging buffer and does not wait for one.

        Raises:
            PlanMismatch: the ranks' arguments differ, or a rank does not take part in time.
            LayoutMismatch: the shards of the ranks do not tile a tensor.
            Skipped: a rank is busy and the policy is `skip`.
            SaveFailed: a rank is busy and the policy is `raise`.
        """
        local, error = None, None
        try:
            local = self._collect(call.rank, roles(), options)
        except Exception as caught:
            error = caught
        except BaseException as interrupt:
            # Without this, the other ranks would wait for this one until the time limit.
            call.give_up(interrupt)
            raise
        facts = {
            "errors": encode_errors({call.rank: error} if error is not None else {}),
            "arguments": options.compared(),
            "busy": busy,
            "history": self._history.hex(),
            "signature": local.signature.hex() if local else "",
            "claims": [small.claim for small in local.small] if local else [],
            "roles": local.roles if local else (),
        }
        gathered = call.gather(json.dumps(facts).encode(), "facts")

        def decide() -> bytes:
            found = [json.loads(part) for part in gathered or ()]
            return json.dumps(self._decide(found, call, options)).encode()

        verdict = json.loads(call.decide(decide, "verdict", cause=error))
        if verdict["skip"]:
            raise Skipped(verdict["skip"])
        assert local is not None
        plans = self._prepare(call, local.columns, verdict)
        writers = verdict["writers"]
        return Agreed(
            verdict["attempt"],
            *plans,
            local.items,
            [one for one in local.small if writers.get(one.claim.key, call.rank) == call.rank],
            tuple(verdict["roles"]),
            local.facts,
        )

    def _collect(self, rank: int, roles: Roles, options: SaveOptions) -> _Local:
        items = [item for collected in roles.values() for item in collected.items]
        small = encode_objects(rank, roles, allow_pickle=options.allow_pickle)
        specs = [(item.tensor, item.boxes) for item in items]
        # To compare the items with those of the last save is much cheaper than to make columns.
        if self._last is None or self._last[0] != specs:
            columns = Columns.from_items(items)
            self._last = specs, columns, columns.signature()
        _, columns, signature = self._last
        facts = {role: collected.facts for role, collected in roles.items() if collected.facts}
        return _Local(items, columns, signature, small, tuple(roles), facts)

    def _decide(
        self, facts: Sequence[dict[str, Any]], call: Control, options: SaveOptions
    ) -> dict[str, Any]:
        """Return rank 0's decision for all ranks, from the `facts` of every rank."""
        errors = {k: v for fact in facts for k, v in decode_errors(fact["errors"]).items()}
        if errors:
            raise joined_error(errors, call.size)
        refuse_different("save", [fact["arguments"] for fact in facts])
        claims = [[Claim(*claim) for claim in fact["claims"]] for fact in facts]
        writers = choose_writers(claims)
        for name in set(differing(claims)) - self._warned:
            self._warned.add(name)
            logger.warning(
                telemetry.event("replicated_values_differ", object=name, kept="lowest rank")
            )
        busy = [rank for rank, fact in enumerate(facts) if fact["busy"]]
        reason = f"ranks {busy} still write earlier saves" if busy else ""
        if busy and options.inflight == "raise":
            text = f"no more saves may be under way than there are staging buffers: {reason}"
            raise SaveFailed(text, per_rank=dict.fromkeys(busy, text))
        key = plan_key([bytes.fromhex(fact["signature"]) for fact in facts], call.hosts)
        in_step = len({fact["history"] for fact in facts}) == 1
        return {
            "skip": reason,
            "attempt": new_attempt(),
            "key": key.hex(),
            "hit": in_step and key in self._plans,
            "reset": not in_step,
            "writers": writers,
            "roles": sorted({role for fact in facts for role in fact["roles"]}),
        }

    def _prepare(
        self, call: Control, columns: Columns, verdict: Mapping[str, Any]
    ) -> tuple[RankPlan, GlobalPlan | None]:
        """Return this rank's plan, cached or new, and on rank 0 also the plan of all ranks."""
        key = bytes.fromhex(verdict["key"])
        self.hits += verdict["hit"]
        if verdict["hit"]:
            self._plans.move_to_end(key)
            return self._plans[key]
        gathered = call.gather(columns.encode(), "columns")
        whole: GlobalPlan | None = None

        def plan() -> list[bytes]:
            nonlocal whole
            whole = plan_save(decode_all(gathered or ()), hosts=call.hosts)
            return [whole.wire(rank) for rank in range(call.size)]

        plans = RankPlan.decode(call.deal(plan, "plan"), columns), whole
        if verdict["reset"]:
            self._plans.clear()
            self._history = b""
        self._history = hashlib.sha256(self._history + key).digest()[:8]
        self._plans[key] = plans
        if len(self._plans) > MOST_PLANS:
            self._plans.popitem(last=False)
        return plans


def plan_key(signatures: Sequence[bytes], hosts: Sequence[int]) -> bytes:
    """Return the SHA-256 of the `Columns.signature()` of all ranks and of their `hosts`."""
    where = ",".join(map(str, hosts))
    return hashlib.sha256(f"{where};".encode() + b"".join(signatures)).digest()
