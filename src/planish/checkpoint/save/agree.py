"""The part of a save that all ranks do together before anything is copied: agree and plan.

Every rank sends what it would save, as a signature; rank 0 finds the plan of an earlier save of
the same signatures, or asks for the columns and plans anew. All of that on the caller's thread,
because the state must not change before it is staged.

Source: ByteCheckpoint, arXiv 2407.20143, sections 3.3 (global plan) and 4.1 (plan cache). That all
ranks' signatures are compared at every save is ours.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from planish import __version__
from planish.base import telemetry
from planish.base.errors import LayoutMismatch, PlanMismatch, SaveFailed
from planish.checkpoint.commit.commit import new_attempt
from planish.checkpoint.format.records import Collected, Columns, LocalItem
from planish.checkpoint.format.small_objects import (
    Claim,
    SmallObject,
    choose_writers,
    differing,
    encode_objects,
)
from planish.checkpoint.plan.cache import PlanCache, plan_key
from planish.checkpoint.plan.gather import decode_all
from planish.checkpoint.plan.records import GlobalPlan, RankPlan
from planish.checkpoint.plan.save import SPLIT_BYTES, plan_save
from planish.checkpoint.ranks import control_errors
from planish.checkpoint.ranks.control_store import pack, unpack
from planish.checkpoint.ranks.coordination import Control
from planish.checkpoint.save.content_checks import compare_replicas
from planish.checkpoint.save.options import SaveOptions
from planish.checkpoint.save.staging import BufferLayout, Stager

logger = logging.getLogger(__name__)

Roles = Mapping[str, Collected]
"""Role to what the adapter found in its state."""


@dataclass
class Prepared:
    """One rank's share of a plan that may be used again."""

    plan: RankPlan
    """What this rank writes."""
    layout: BufferLayout
    """Where the files lie in a staging buffer."""
    whole: GlobalPlan | None
    """On rank 0: the plan of all ranks."""
    stagers: dict[int, Stager] = field(default_factory=dict)
    """By number of the buffer."""


@dataclass
class Local:
    """What one rank brings into a save."""

    items: Sequence[LocalItem]
    columns: Columns
    signature: bytes
    small: list[SmallObject]
    roles: tuple[str, ...]
    facts: dict[str, Any]
    """By role: `Collected.facts`."""


@dataclass
class Agreed:
    """What all ranks have settled."""

    attempt: str
    prepared: Prepared
    items: Sequence[LocalItem]
    small: list[SmallObject]
    """Those that this rank writes."""
    roles: tuple[str, ...]
    """Of all ranks."""
    facts: dict[str, Any]
    """This rank's, by role."""


@dataclass
class Offer:
    """What one rank has told, on its way to what all ranks settle."""

    local: Local | None
    """None after an error."""
    error: Exception | None
    verdict: bytes
    """Of the coordinator; empty on other ranks, which have yet to hear it."""
    likely: Prepared | None
    """The plan that the verdict will name unless another rank has changed; None on rank 0."""


class Skipped(Exception):
    """An earlier save is still under way on a rank, and the caller prefers to skip this one."""


class Planner:
    """Plans the saves of one engine; keeps the last plans.

    Every rank's cache sees the same keys in the same order; `_history` is compared at each save,
    so a rank that has lost step makes all of them plan anew.
    """

    def __init__(self, *, split_bytes: int = SPLIT_BYTES) -> None:
        """Start without plans."""
        self.hits = 0
        """How many saves have used an earlier plan."""
        self._cache: PlanCache[Prepared] = PlanCache()
        self._kept: list[Prepared] = []
        self._history = b""
        self._split_bytes = split_bytes
        self._last: tuple[list[Any], Columns, bytes] | None = None
        self._described: tuple[str, dict[str, object]] | None = None
        """Context and descriptions by role of `_last`, where those tell all."""
        self._latest: tuple[bytes, Prepared | None] = b"", None
        """Signature and plan of the last save."""
        self._told: set[str] = set()

    def collect(self, rank: int, found: Callable[[], Roles] | Roles, options: SaveOptions) -> Local:
        """Turn the state of this rank into columns and small objects, without talking.

        Raises:
            TypeError: a value that can not be saved.
        """
        roles = found() if callable(found) else found
        several = [collected.items for collected in roles.values()]
        items = several[0] if len(several) == 1 else list(chain.from_iterable(several))
        small = encode_objects(rank, roles, allow_pickle=options.allow_pickle)
        context = f"{__version__}/{options.context}"
        described = {role: collected.description for role, collected in roles.items()}
        known = None not in described.values()
        if not known or self._described != (context, described):
            self._described = (context, described) if known else None
            specs: list[Any] = [context, *((item.tensor, item.boxes) for item in items)]
            # Comparing with the last save's items is much cheaper than making columns of them.
            if self._last is None or self._last[0] != specs:
                columns = Columns.from_items(items, context=context)
                self._last = specs, columns, columns.signature()
        assert self._last is not None
        _, columns, signature = self._last
        facts = {role: collected.facts for role, collected in roles.items() if collected.facts}
        return Local(items, columns, signature, small, tuple(roles), facts)

    def offer(
        self,
        call: Control,
        bring: Callable[[], Local],
        options: SaveOptions,
        *,
        busy: bool,
    ) -> Offer:
        """Tell the coordinator what this rank would save; followed by `settle`, a collective.

        Args:
            call: The operation.
            bring: Makes this rank's share; `settle` raises an error in it on all ranks.
            options: Of the save, compared between the ranks.
            busy: Whether this rank has no room for a further save.
        """
        local, error = None, None
        try:
            local = bring()
        except Exception as found:
            error = found
        except BaseException as interrupt:
            # Or the other ranks would wait for this one until the time limit.
            call.give_up(interrupt)
            raise
        facts = self._facts(local, options, busy)
        message = pack({0: json.dumps(facts).encode(), 1: _error_bytes(call.rank, error)})
        gathered = call.gather(message, "facts")
        verdict = b""
        if gathered is not None:
            verdict = json.dumps(self._decide(gathered, call, options)).encode()
            call.broadcast(verdict, "verdict")
        likely = None
        if not verdict and local is not None and local.signature == self._latest[0]:
            likely = self._latest[1]
        return Offer(local, error, verdict, likely)

    def settle(self, call: Control, offer: Offer, options: SaveOptions) -> Agreed:
        """Return what all ranks write where; a collective after `offer`.

        Raises:
            PlanMismatch: the ranks' arguments differ, or a rank stays away.
            LayoutMismatch: the ranks' shares do not make a whole, or replicas differ.
            Skipped: a rank is busy and the policy is `skip`.
            SaveFailed: a rank is busy and the policy is `raise`.
        """
        local = offer.local
        verdict = json.loads(offer.verdict or call.broadcast(None, "verdict"))
        if verdict["errors"]:
            brought = control_errors.decode(verdict["errors"].encode())
            raised = control_errors.joined(brought, call.size)
            call.see_off()
            raise raised from offer.error
        if verdict["skip"]:
            raise Skipped(verdict["skip"])
        assert local is not None
        if options.check_replicas:
            compare_replicas(call, local.items)
        key = bytes.fromhex(verdict["key"])
        prepared = self._cache.get(key) if verdict["hit"] else None
        if prepared is None:
            assert not verdict["hit"], "caches of all ranks are in step"
            prepared = self._plan(call, local)
            self._keep(key, prepared, verdict["reset"], options)
        self._latest = local.signature, prepared if options.plan_cache else None
        self.hits += verdict["hit"]
        writers = verdict["writers"]
        small = [one for one in local.small if writers.get(one.key, call.rank) == call.rank]
        return Agreed(
            verdict["attempt"],
            prepared,
            local.items,
            small,
            tuple(verdict["roles"]),
            local.facts,
        )

    def forget_buffer(self, number: int) -> None:
        """Drop the views of a buffer that is given back."""
        for prepared in self._kept:
            prepared.stagers.pop(number, None)

    def _facts(self, local: Local | None, options: SaveOptions, busy: bool) -> dict[str, Any]:
        return {
            "arguments": options.compared(),
            "busy": busy,
            "history": self._history.hex(),
            "signature": local.signature.hex() if local else "",
            "claims": [one.claim() for one in local.small] if local else [],
            "roles": local.roles if local else (),
        }

    def _decide(
        self, gathered: Sequence[bytes], call: Control, options: SaveOptions
    ) -> dict[str, Any]:
        """Return the verdict of rank 0 on what every rank has brought."""
        parts = [unpack(message) for message in gathered]
        facts = [json.loads(part[0]) for part in parts]
        errors = {rank: e for part in parts for rank, e in control_errors.decode(part[1]).items()}
        claims = [[Claim(*claim) for claim in fact["claims"]] for fact in facts]
        writers: dict[str, int] = {}
        if not errors:
            try:
                _refuse_differences(facts)
                writers = choose_writers(claims)
                self._warn(differing(claims))
            except (PlanMismatch, LayoutMismatch) as error:
                errors = {control_errors.EVERYONE: error}
        busy = [rank for rank, fact in enumerate(facts) if fact["busy"]]
        told = f"ranks {busy} still write earlier saves" if busy and not errors else ""
        if told and options.inflight == "raise":
            text = f"no more saves may be under way than there are staging buffers: {told}"
            errors = {0: SaveFailed(text, per_rank=dict.fromkeys(busy, text))}
        verdict = {"errors": control_errors.encode(errors).decode(), "skip": told}
        if errors or told:
            return verdict
        signatures = [bytes.fromhex(fact["signature"]) for fact in facts]
        key = plan_key(signatures, split_bytes=self._split_bytes, hosts=call.hosts)
        in_step = len({fact["history"] for fact in facts}) == 1
        hit = in_step and options.plan_cache and self._cache.get(key) is not None
        return {
            **verdict,
            "attempt": new_attempt(),
            "key": key.hex(),
            "hit": hit,
            "reset": not in_step,
            "writers": writers,
            "roles": sorted({role for fact in facts for role in fact["roles"]}),
        }

    def _warn(self, keys: Sequence[str]) -> None:
        for key in set(keys) - self._told:
            self._told.add(key)
            logger.warning(
                telemetry.event("replicated_values_differ", object=key, kept="lowest rank")
            )

    def _plan(self, call: Control, local: Local) -> Prepared:
        """Plan anew, all ranks together."""
        gathered = call.gather(local.columns.encode(), "columns")
        whole, replies = None, None
        if gathered is not None:
            try:
                columns = decode_all(gathered)
                whole = plan_save(columns, split_bytes=self._split_bytes, hosts=call.hosts)
                replies = [b"P" + whole.wire(rank) for rank in range(call.size)]
            except Exception as error:
                judged = isinstance(error, (LayoutMismatch, PlanMismatch))
                whose = control_errors.EVERYONE if judged else 0
                replies = [b"E" + control_errors.encode({whose: error})] * call.size
        reply = call.scatter(replies, "plan")
        if reply[:1] == b"E":
            call.see_off()
            raise control_errors.joined(control_errors.decode(reply[1:]), call.size)
        plan = RankPlan.decode(reply[1:], local.columns)
        return Prepared(plan, BufferLayout.of([file.size for file in plan.files]), whole)

    def _keep(self, key: bytes, prepared: Prepared, reset: bool, options: SaveOptions) -> None:
        if not options.plan_cache:
            return
        if reset:
            self._cache.clear()
            self._history = b""
        self._history = hashlib.sha256(self._history + key).digest()[:8]
        self._cache.put(key, prepared)
        self._kept = [*self._kept[-8:], prepared]


def _error_bytes(rank: int, error: Exception | None) -> bytes:
    return control_errors.encode({rank: error} if error is not None else {})


def _refuse_differences(facts: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a save that ranks call with different arguments."""
    first = facts[0]["arguments"]
    wrong = []
    for name in first:
        values: dict[str, list[int]] = {}
        for rank, fact in enumerate(facts):
            values.setdefault(repr(fact["arguments"].get(name)), []).append(rank)
        if len(values) > 1:
            wrong.append(f"`{name}`: " + ", ".join(f"{v} on ranks {r}" for v, r in values.items()))
    if wrong:
        raise PlanMismatch("every rank must save with the same arguments, got " + "; ".join(wrong))
