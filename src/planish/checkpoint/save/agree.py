"""The part of a save that all ranks do together before anything is copied: agree and plan.

Every rank sends what it would save, as a signature; rank 0 finds the plan of an earlier save of
the same signatures, or asks for the columns and plans anew. All of that on the caller's thread,
because the state must not change before it is staged.

Source: ByteCheckpoint, arXiv 2407.20143, sections 3.3 (global plan) and 4.1 (plan cache). That all
ranks' signatures are compared at every save is ours.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypedDict

from planish.base import telemetry
from planish.base.errors import LayoutMismatch, PlanMismatch, SaveFailed
from planish.checkpoint.commit.journal import new_attempt
from planish.checkpoint.format.items import Collected, Columns, LocalItem
from planish.checkpoint.format.metafile import block_crcs
from planish.checkpoint.format.small_objects import (
    Claim,
    SmallObject,
    choose_writers,
    differing,
    encode_objects,
)
from planish.checkpoint.plan.files import GlobalPlan, RankPlan
from planish.checkpoint.plan.save import SPLIT_BYTES, decode_all, plan_save
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.ranks.messages import (
    EVERYONE,
    decode_errors,
    encode_errors,
    joined_error,
    pack,
    unpack,
)
from planish.checkpoint.save.staging import BufferLayout, Stager

logger = logging.getLogger(__name__)

MOST_PLANS = 8
"""Plans that are kept; the least recently used one goes first."""
_NAMED = 8
"""Tensors that a message names, at most."""
_MAY_DIFFER = {"timeout_s", "pace_s", "header", "context", "allow_pickle", "scan"}
"""Options that may differ between ranks."""

Roles = Mapping[str, Collected]
"""Role to what the adapter found in its state."""


@dataclass(frozen=True)
class SaveOptions:
    """How to save; equal on all ranks.

    Example:
        >>> SaveOptions("/runs/step-1", step=1).snapshot
        'copy'
    """

    uri: str
    """Place of the checkpoint: `s3://bucket/key`, `file:///folder` or an absolute path."""
    step: int = 0
    """Training step, at least 0."""
    overwrite: bool = False
    """Replace a committed checkpoint at this place; else refuse."""
    plan_cache: bool = True
    """Use the plan of an earlier save of the same tensors."""
    snapshot: Literal["copy", "lazy"] = "copy"
    """`copy`: all is copied when the call returns. `lazy`: copied while forward and backward run;
    the next `optimizer.step()` waits for it."""
    inflight: Literal["wait", "skip", "raise"] = "wait"
    """What to do while earlier saves use all staging memory."""
    timeout_s: float = 1800.0
    """Limit on the whole save, seconds."""
    pace_s: float = 0.0
    """Spread the upload over so many seconds, below the time between two saves, so that it slows
    training less; 0: at full speed. A save that the caller waits for is never slowed."""
    is_async: bool = True
    """Return when the state is staged, not when it is committed."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Texts for COMMIT."""
    run_id: str = ""
    """For COMMIT."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """JSON for the metadata (layout, parents, attributes); that of rank 0 counts."""
    context: str = ""
    """What else must be equal for a plan to be used again (adapters, group)."""
    allow_pickle: bool = False
    """Store arbitrary objects among the small values; else refuse them."""
    check_replicas: bool = False
    """Refuse a state of which ranks hold unequal copies; else that of one rank is kept."""
    scan: bool = False
    """Count and name tensors with values that are not finite; they are saved all the same."""

    def __post_init__(self) -> None:
        """Refuse options that mean nothing.

        Raises:
            ValueError: a negative step, a timeout that is not positive, an unknown policy.
        """
        faults = []
        if type(self.step) is not int or self.step < 0:
            faults.append(f"`step` must be a whole number of at least 0, got {self.step!r}")
        if not self.timeout_s > 0:
            faults.append(f"`timeout_s` must be positive, got {self.timeout_s!r}")
        if not 0 <= self.pace_s < self.timeout_s:
            faults.append(f"`pace_s` must be at least 0 and below `timeout_s`, got {self.pace_s!r}")
        if self.snapshot not in ("copy", "lazy"):
            faults.append(f"`snapshot` must be `copy` or `lazy`, got {self.snapshot!r}")
        if self.inflight not in ("wait", "skip", "raise"):
            faults.append(f"`inflight` must be `wait`, `skip` or `raise`, got {self.inflight!r}")
        if faults:
            raise ValueError("; ".join(faults))

    def compared(self) -> dict[str, Any]:
        """Return what must be equal on all ranks."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in _MAY_DIFFER]
        return {
            **{name: getattr(self, name) for name in names},
            "tags": dict(sorted(self.tags.items())),
        }


class SaveKeywords(TypedDict, total=False):
    """Types of the keywords of `checkpoint.api.save` that become fields of `SaveOptions`."""

    overwrite: bool
    plan_cache: bool
    snapshot: Literal["copy", "lazy"]
    inflight: Literal["wait", "skip", "raise"]
    timeout_s: float
    pace_s: float
    tags: Mapping[str, str]
    run_id: str
    header: Mapping[str, Any]
    allow_pickle: bool
    check_replicas: bool
    scan: bool


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
    """What one rank has sent, on its way to what all ranks settle."""

    local: Local | None
    """None after an error."""
    error: Exception | None
    verdict: bytes
    """Of the coordinator; empty on other ranks, which have yet to receive it."""
    likely: Prepared | None
    """The plan that the verdict will name unless another rank has changed; None on rank 0."""


class Skipped(Exception):
    """An earlier save is still under way on a rank, and the caller prefers to skip this one."""


class Planner:
    """Plans the saves of one engine; keeps the last plans.

    A plan is found by `plan_key`, so a change on any rank means another plan. Every rank's plans
    have the same keys in the same order; `_history` is compared at each save, so a rank that has
    lost step makes all of them plan anew.
    """

    def __init__(self, *, split_bytes: int = SPLIT_BYTES) -> None:
        """Start without plans."""
        self.hits = 0
        """How many saves have used an earlier plan."""
        self._plans: OrderedDict[bytes, Prepared] = OrderedDict()
        self._history = b""
        self._split_bytes = split_bytes
        self._last: tuple[list[Any], Columns, bytes] | None = None
        self._described: tuple[str, dict[str, object]] | None = None
        """Context and descriptions by role of `_last`, where those say all."""
        self._latest: tuple[bytes, Prepared | None] = b"", None
        """Signature and plan of the last save."""
        self._warned: set[str] = set()
        """Small objects of which ranks hold different values, as logged."""

    def collect(self, rank: int, state: Callable[[], Roles] | Roles, options: SaveOptions) -> Local:
        """Turn the state of this rank into columns and small objects, without talking.

        Raises:
            TypeError: a value that can not be saved.
        """
        roles = state() if callable(state) else state
        several = [collected.items for collected in roles.values()]
        items = several[0] if len(several) == 1 else list(chain.from_iterable(several))
        small = encode_objects(rank, roles, allow_pickle=options.allow_pickle)
        context = options.context
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
        except Exception as caught:
            error = caught
        except BaseException as interrupt:
            # Or the other ranks would wait for this one until the time limit.
            call.give_up(interrupt)
            raise
        facts = {
            "arguments": options.compared(),
            "busy": busy,
            "history": self._history.hex(),
            "signature": local.signature.hex() if local else "",
            "claims": [small.claim() for small in local.small] if local else [],
            "roles": local.roles if local else (),
        }
        errors = encode_errors({call.rank: error} if error is not None else {})
        gathered = call.gather(pack({0: json.dumps(facts).encode(), 1: errors}), "facts")
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
            error = joined_error(decode_errors(verdict["errors"].encode()), call.size)
            call.see_off()
            raise error from offer.error
        if verdict["skip"]:
            raise Skipped(verdict["skip"])
        assert local is not None
        if options.check_replicas:
            compare_replicas(call, local.items)
        key = bytes.fromhex(verdict["key"])
        if verdict["hit"]:
            prepared = self._plans[key]  # those of all ranks are in step
            self._plans.move_to_end(key)
        else:
            prepared = self._plan(call, local)
            if options.plan_cache:
                if verdict["reset"]:
                    self._plans.clear()
                    self._history = b""
                self._history = hashlib.sha256(self._history + key).digest()[:8]
                self._plans[key] = prepared
                if len(self._plans) > MOST_PLANS:
                    self._plans.popitem(last=False)
        self._latest = local.signature, prepared if options.plan_cache else None
        self.hits += verdict["hit"]
        writers = verdict["writers"]
        return Agreed(
            verdict["attempt"],
            prepared,
            local.items,
            [small for small in local.small if writers.get(small.key, call.rank) == call.rank],
            tuple(verdict["roles"]),
            local.facts,
        )

    def forget_buffer(self, number: int) -> None:
        """Drop the views of a buffer that is given back."""
        for prepared in self._plans.values():
            prepared.stagers.pop(number, None)

    def _decide(
        self, gathered: Sequence[bytes], call: Control, options: SaveOptions
    ) -> dict[str, Any]:
        """Return the verdict of rank 0 on what every rank has brought."""
        parts = [unpack(message) for message in gathered]
        facts = [json.loads(part[0]) for part in parts]
        errors = {rank: error for part in parts for rank, error in decode_errors(part[1]).items()}
        claims = [[Claim(*claim) for claim in fact["claims"]] for fact in facts]
        writers: dict[str, int] = {}
        if not errors:
            try:
                wrong = []
                for name in facts[0]["arguments"]:
                    values: dict[str, list[int]] = {}
                    for rank, fact in enumerate(facts):
                        values.setdefault(repr(fact["arguments"].get(name)), []).append(rank)
                    if len(values) > 1:
                        texts = (f"{value} on ranks {ranks}" for value, ranks in values.items())
                        wrong.append(f"`{name}`: {', '.join(texts)}")
                if wrong:
                    raise PlanMismatch(
                        "every rank must save with the same arguments, got " + "; ".join(wrong)
                    )
                writers = choose_writers(claims)
            except (PlanMismatch, LayoutMismatch) as error:
                errors = {EVERYONE: error}
            else:
                for name in set(differing(claims)) - self._warned:
                    self._warned.add(name)
                    logger.warning(
                        telemetry.event("replicated_values_differ", object=name, kept="lowest rank")
                    )
        busy = [rank for rank, fact in enumerate(facts) if fact["busy"]]
        reason = f"ranks {busy} still write earlier saves" if busy and not errors else ""
        if reason and options.inflight == "raise":
            text = f"no more saves may be under way than there are staging buffers: {reason}"
            errors = {0: SaveFailed(text, per_rank=dict.fromkeys(busy, text))}
        verdict = {"errors": encode_errors(errors).decode(), "skip": reason}
        if errors or reason:
            return verdict
        signatures = [bytes.fromhex(fact["signature"]) for fact in facts]
        key = plan_key(signatures, split_bytes=self._split_bytes, hosts=call.hosts)
        in_step = len({fact["history"] for fact in facts}) == 1
        return {
            **verdict,
            "attempt": new_attempt(),
            "key": key.hex(),
            "hit": in_step and options.plan_cache and key in self._plans,
            "reset": not in_step,
            "writers": writers,
            "roles": sorted({role for fact in facts for role in fact["roles"]}),
        }

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
                replies = [b"E" + encode_errors({EVERYONE if judged else 0: error})] * call.size
        reply = call.scatter(replies, "plan")
        if reply[:1] == b"E":
            call.see_off()
            raise joined_error(decode_errors(reply[1:]), call.size)
        plan = RankPlan.decode(reply[1:], local.columns)
        return Prepared(plan, BufferLayout.of([file.size for file in plan.files]), whole)


def plan_key(
    signatures: Sequence[bytes], *, split_bytes: int, hosts: Sequence[int] | None = None
) -> bytes:
    """Return 32 bytes that name a plan: equal for equal arguments of `plan_save`, else different.

    Args:
        signatures: `Columns.signature()` of all ranks, rank r's at position r, 32 bytes each.
        split_bytes: As given to `plan_save`.
        hosts: As given to `plan_save`.

    Raises:
        ValueError: a signature has another length than 32 bytes.
    """
    if any(len(signature) != 32 for signature in signatures):
        raise ValueError("every signature must have 32 bytes; take them from Columns.signature()")
    where = "" if hosts is None else ",".join(map(str, hosts))
    facts = f"{len(signatures)};{split_bytes};{where};".encode()
    return hashlib.sha256(facts + b"".join(signatures)).digest()


def compare_replicas(call: Control, items: Sequence[LocalItem]) -> None:
    """Compare what ranks hold of the same part of a tensor; a collective, if the caller asks.

    Replicas are kept once, so a rank whose copy differs would be lost without a word. The checksums
    take a pass over the memory.

    Args:
        call: The operation.
        items: Of this rank.

    Raises:
        LayoutMismatch: on every rank, with names and ranks, if replicas differ in a bit.
    """
    gathered = call.gather(json.dumps(checksums(items)).encode(), "replicas")
    error = None
    if gathered is not None:
        wrong = unequal([json.loads(part) for part in gathered])
        if wrong:
            error = LayoutMismatch(
                "replicas must be equal to the bit, got different values of "
                + "; ".join(wrong[:_NAMED])
                + (f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "")
                + "; has a rank missed an update, or was a buffer never synchronised?"
            )
    call.settle(error, "replicas.verdict", whose=EVERYONE)


def checksums(items: Sequence[LocalItem]) -> dict[str, str]:
    """Return one checksum for each item that holds values, by role, kind, name and place."""
    import torch

    by_part = {}
    for item in items:
        if item.data is None or not item.boxes:
            continue
        values = item.data.detach().resolve_conj().resolve_neg().contiguous().cpu()
        crcs = block_crcs(values.reshape(-1).view(torch.uint8).numpy())
        place = [item.tensor.role, item.tensor.kind, item.tensor.fqn]
        boxes = [[*box.offsets, *box.lengths] for box in item.boxes]
        by_part[json.dumps([*place, boxes])] = hashlib.sha256(crcs.tobytes()).hexdigest()[:16]
    return by_part


def unequal(by_rank: Sequence[dict[str, str]]) -> list[str]:
    """Return which parts ranks disagree about, as text.

    Example:
        >>> part = '["main", "model", "w", [[0, 2]]]'
        >>> unequal([{part: "a"}, {part: "b"}, {part: "a"}])
        ['`w` (main.model): ranks [0, 2] against [1]']
    """
    wrong = []
    for part in sorted({part for checksums in by_rank for part in checksums}):
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(by_rank):
            if part in own:
                ranks.setdefault(own[part], []).append(rank)
        if len(ranks) > 1:
            role, kind, fqn, _ = json.loads(part)
            wrong.append(
                f"`{fqn}` ({role}.{kind}): ranks " + " against ".join(map(str, ranks.values()))
            )
    return wrong


def count_nonfinite(items: Sequence[LocalItem]) -> list[str]:
    """Return the names of this rank's tensors with NaN or infinity; counts and logs them."""
    import torch

    names = []
    for item in items:
        values = item.data
        if values is None or not (values.is_floating_point() or values.is_complex()):
            continue
        if values.element_size() == 1:  # Nothing is computed with 8 bits but conversions.
            values = values.to(torch.float32)
        if not bool(torch.isfinite(values.detach()).all()):
            names.append(item.tensor.fqn)
    if names:
        telemetry.count("planish_checkpoint_nonfinite_total", len(names))
        first = ",".join(names[:_NAMED])
        logger.warning(telemetry.event("nonfinite_tensors", count=len(names), first=first))
    return names
