"""Plans of earlier saves, found by what every rank holds; the least recently used one goes first.

The key is made of the signatures of all ranks: names, shapes, types, layout and context of each.
A change on any rank is another key, so ranks never diverge about whether a plan may be used again.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (plan and metadata cache). That all ranks'
signatures are compared at every save is ours.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

Plan = TypeVar("Plan")


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
    joined = b"".join(signatures)
    if len(joined) != 32 * len(signatures) or any(len(one) != 32 for one in signatures):
        raise ValueError("every signature must have 32 bytes; take them from Columns.signature()")
    where = "" if hosts is None else ",".join(map(str, hosts))
    facts = f"{len(signatures)};{split_bytes};{where};".encode()
    return hashlib.sha256(facts + joined).digest()


class PlanCache(Generic[Plan]):
    """The last plans, by `plan_key`.

    Example:
        >>> cache = PlanCache(1)
        >>> cache.put(b"a", "plan"), cache.put(b"b", "other")
        (None, None)
        >>> cache.get(b"a"), cache.get(b"b"), len(cache)
        (None, 'other', 1)
    """

    def __init__(self, capacity: int = 8) -> None:
        """Keep at most `capacity` plans."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self._plans)

    def get(self, key: bytes) -> Plan | None:
        """Return a plan, which now counts as just used; None when it is not there."""
        plan = self._plans.get(key)
        if plan is None:
            self.misses += 1
            return None
        self.hits += 1
        self._plans.move_to_end(key)
        return plan

    def put(self, key: bytes, plan: Plan) -> None:
        """Keep a plan; drops the least recently used one when there is no room."""
        self._plans[key] = plan
        self._plans.move_to_end(key)
        while len(self._plans) > self._capacity:
            self._plans.popitem(last=False)

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()
