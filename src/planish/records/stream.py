"""The endless stream of prompts: the ordinals of an iteration, and the prompt of each ordinal.

Ordinal k belongs to epoch `k // num_prompts`; each epoch runs through all prompts in its own
order. The cursor says which ordinals are consumed (trained, or sampled and dropped), so that no
prompt is lost or trained twice under any shards, retries and restarts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from planish.base.errors import RecordError
from planish.records import layout
from planish.records.refs import parse_pin

_PARTS = ("surplus", "carry", "values", "waiting")
"""Parts of a train state's data beside the cursor."""

_STATES = layout.state("", 0).rpartition("/")[0] + "/"


class Cursor(TypedDict):
    """Consumed ordinals: every ordinal below `next` that is not in `pending`.

    Example:
        >>> Cursor(next=4, pending=[2])   # 0, 1 and 3 are consumed
        {'next': 4, 'pending': [2]}
    """

    next: int
    pending: list[int]


def fresh_cursor() -> Cursor:
    """Return the cursor of a run that has consumed nothing."""
    return Cursor(next=0, pending=[])


def parse_cursor(raw: object) -> Cursor:
    """Check a cursor that was read from a file.

    Raises:
        RecordError: of another form, or `pending` is not sorted, unique and below `next`.
    """
    bounds: list[Any] = []
    if isinstance(raw, Mapping) and set(raw) == {"next", "pending"}:
        pending = raw["pending"]
        bounds = [-1, *(pending if isinstance(pending, list) else "?"), raw["next"]]
    is_whole = bool(bounds) and all(type(number) is int for number in bounds)
    if not is_whole or not all(a < b for a, b in itertools.pairwise(bounds)):
        raise RecordError(
            "a prompt cursor must be {next, pending} with `pending` rising and below `next`, got "
            f"{str(raw)[:200]}; the train state that holds it is damaged"
        )
    return Cursor(next=bounds[-1], pending=bounds[1:-1])


@dataclass(frozen=True)
class StreamState:
    """The data part of a train state; pins are relative to the root of the run.

    It does not name the root, so that equal runs have equal states.

    Example:
        >>> StreamState(fresh_cursor(), carry=[f"carry/00#sha256={'0' * 64}"]).to_data()["next"]
        0
    """

    cursor: Cursor
    surplus: list[str] = field(default_factory=list)
    """Surplus sets that the next rollout may use."""
    carry: list[str] = field(default_factory=list)
    """Carry sets, one per shard of the iteration that wrote them; empty where no response goes on
    from one iteration to the next."""
    values: str = ""
    """Values of the tokens of unfinished responses; "" for none."""
    waiting: str = ""
    """Finished responses on which the critic has not trained yet; "" for none."""

    def to_data(self) -> dict[str, Any]:
        """Return the form that `parse_data` reads; empty parts are left out."""
        parts = {name: getattr(self, name) for name in _PARTS}
        return {**self.cursor, **{name: part for name, part in parts.items() if part}}


def parse_data(raw: object) -> StreamState:
    """Check the data part of a train state.

    Raises:
        RecordError: of another form.

    Example:
        >>> parse_data({"next": 4, "pending": [2]}).cursor
        {'next': 4, 'pending': [2]}
    """
    if not isinstance(raw, Mapping):
        return StreamState(parse_cursor(raw))
    cursor = parse_cursor({name: part for name, part in raw.items() if name not in _PARTS})
    kinds = {"surplus": list, "carry": list, "values": str, "waiting": str}
    return StreamState(cursor, **{name: _pins(raw, name, kind) for name, kind in kinds.items()})


def state_root(state_pin: str) -> str:
    """Return the root of the run that wrote a train state: its pins are relative to that.

    A forked run begins with the state of another root, whose sets lie there too.

    Example:
        >>> state_root(f"file:///runs/a/states/step-00000008#sha256={'0' * 64}")
        'file:///runs/a'
    """
    return parse_pin(state_pin)[0].rpartition(_STATES)[0]


def _pins(raw: Mapping[str, object], name: str, kind: type) -> Any:
    value = raw.get(name, kind())
    pins: list[Any] = value if isinstance(value, list) else [value] if value else []
    if not isinstance(value, kind) or not all(isinstance(pin, str) for pin in pins):
        raise RecordError(
            f"`{name}` of a train state must hold pins, got {str(value)[:200]}; the train state "
            "that holds it is damaged"
        )
    for pin in pins:
        parse_pin(pin)
    return value


def assign(cursor: Cursor, shard: int, num_shards: int) -> Iterator[int]:
    """Return the endless ordinals that one shard may take, in order.

    The sequence to consume is the pending ordinals and then `next`, `next + 1`, ...; element j
    belongs to shard `j % num_shards`.

    Example:
        >>> from itertools import islice
        >>> list(islice(assign({"next": 7, "pending": [2, 5]}, 1, 2), 3))
        [5, 8, 10]
    """
    sequence = itertools.chain(cursor["pending"], itertools.count(cursor["next"]))
    return itertools.islice(sequence, shard, None, num_shards)


def advance(cursor: Cursor, consumed: Iterable[int]) -> Cursor:
    """Return the cursor after the `consumed` ordinals, in any order.

    Raises:
        RecordError: an ordinal twice, or one that was consumed before.

    Example:
        >>> advance({"next": 7, "pending": [2, 5]}, [5, 7, 9])
        {'next': 10, 'pending': [2, 8]}
    """
    taken = sorted(consumed)
    open_below = set(cursor["pending"])
    again = [a for a, b in itertools.pairwise(taken) if a == b]
    again += [k for k in taken if k < cursor["next"] and k not in open_below]
    if again:
        raise RecordError(
            f"a prompt must be consumed once, got ordinals {again[:8]} again ({len(again)} in "
            "all); the rollouts were drawn from another train state"
        )
    following = max(cursor["next"], taken[-1] + 1) if taken else cursor["next"]
    left = open_below.union(range(cursor["next"], following)).difference(taken)
    return Cursor(next=following, pending=sorted(left))


@lru_cache(maxsize=4)
def _order(epoch: int, num_prompts: int, seed: int) -> npt.NDArray[np.int64]:
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.permutation(num_prompts)


def position(ordinal: int, num_prompts: int, seed: int) -> int:
    """Return the row of the prompt set for an ordinal.

    Each epoch has its own order, derived from `seed`; ordinals count from 0.

    Raises:
        RecordError: the prompt set is empty.
    """
    if num_prompts < 1:
        raise RecordError(
            f"a prompt set must hold at least one prompt, got {num_prompts}; the filters of the "
            "curate stage let nothing through"
        )
    epoch, index = divmod(ordinal, num_prompts)
    return int(_order(epoch, num_prompts, seed)[index])
