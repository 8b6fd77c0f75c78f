"""Data-loader state made one step ahead of its save, so that the save has only to pick it up.

A loader may offer two methods more than `loader_state.Loader`. What holds between it and us:

* `ckpt_prepare(step)` returns the state that the loader expects to have when `step` is over, and
  the mark that goes with that state; None where it can not tell. It runs on a thread of ours while
  the training thread goes on with that step, and hands out copies: nothing in them changes later.
* `ckpt_mark()` returns the mark of the state as it is now. The loader guarantees that equal marks
  mean equal states; numbers of the samples taken from each source and handed out are such a mark.
* A save asks for the mark after its step, on the thread that saves. What was prepared is used only
  if it is for that step and that loader, and if its mark is equal; otherwise the loader is asked
  for its state as if nothing had been prepared. A wrong forecast or a failed preparation costs
  time and nothing else: no save holds a state that the loader did not have.

Never two calls of these methods at once: a save waits for a preparation that is under way.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.4 (loader state prefetched before the save); the
marks are ours.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from planish.base.telemetry import event
from planish.checkpoint.adapters.loader_state import LoaderShard
from planish.checkpoint.format.small_objects import encode_extra

logger = logging.getLogger(__name__)

_PART = "dataloader"


@dataclass(frozen=True)
class Foreseen:
    """A state that a loader expects to have.

    Example:
        >>> Foreseen(mark=128, common={"seed": 1}, shards=[]).mark
        128
    """

    mark: object
    """What `ckpt_mark()` returns once the loader has this state: numbers, text, tuples of them."""
    common: dict[str, Any]
    """As `ckpt_common()` would return."""
    shards: list[LoaderShard]
    """As `ckpt_shards()` would return."""


class ForeseeingLoader(Protocol):
    """What a `Loader` offers besides, to be asked one step ahead; see the module."""

    def ckpt_prepare(self, step: int) -> Foreseen | None:
        """Return the state that there will be when `step` is over; None: unknown."""

    def ckpt_mark(self) -> object:
        """Return the mark of the state as it is."""


@dataclass(frozen=True)
class _Ready:
    """What one preparation has made."""

    loader: Any
    state: Foreseen
    """Its shards are encoded."""


class LoadersAhead:
    """The state of the loaders of one process, made ahead of at most one save.

    Example:
        >>> ahead = LoadersAhead()
        >>> ahead.take(8, {"extra": {}})
        {'extra': {}}
        >>> ahead.used, ahead.stale
        (0, 0)
    """

    def __init__(self) -> None:
        """Prepare nothing yet."""
        self.used = 0
        """How often what was prepared went into a save."""
        self.stale = 0
        """How often it was thrown away, because the loader had gone another way."""
        self._step = -1
        self._ready: dict[str, _Ready] = {}
        self._thread: threading.Thread | None = None

    def begin(self, step: int, state: Mapping[str, Any]) -> None:
        """Begin to make the loader state of the end of `step`, on a thread.

        Args:
            step: Of the save that is to come.
            state: As for `save`; loaders that can not be asked ahead are left alone.
        """
        self.drop()
        loaders = dict(_loaders(state))
        if not loaders:
            return
        self._step = step
        self._thread = threading.Thread(
            target=self._prepare, args=(step, loaders), name="loaders-ahead", daemon=True
        )
        self._thread.start()

    def take(self, step: int, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `state` with loaders replaced by what was prepared, where that is still true."""
        self._join()
        ready, is_due = self._ready, self._step == step
        self._ready, self._step = {}, -1
        if not is_due:
            return state
        found = dict(state)
        for role, loader in _loaders(state):
            one = ready.get(role)
            if one is None or one.loader is not loader:
                continue
            if loader.ckpt_mark() != one.state.mark:
                self.stale += 1
                logger.info(event("loader_state_stale", step=step, role=role or "main"))
                continue
            self.used += 1
            prepared = _Prepared(loader, one.state)
            if role:
                found[role] = {**state[role], _PART: prepared}
            else:
                found[_PART] = prepared
        return found

    def drop(self) -> None:
        """Wait for what is under way, and forget what was prepared."""
        self._join()
        self._ready, self._step = {}, -1

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _prepare(self, step: int, loaders: Mapping[str, Any]) -> None:
        for role, loader in loaders.items():
            try:
                state = loader.ckpt_prepare(step)
                if state is None:
                    continue
                shards = [
                    replace(
                        shard,
                        buffer=[],
                        cursor=dict(shard.cursor),
                        num_samples=len(shard.buffer),
                        encoded=encode_extra(shard.to_data()),
                    )
                    for shard in state.shards
                ]
                self._ready[role] = _Ready(loader, replace(state, shards=shards))
            except Exception as error:
                # The save makes the state itself, and raises what is still wrong then.
                logger.warning(event("loader_not_prepared", step=step, reason=error))


class _Prepared:
    """Stands in for a loader in one save."""

    def __init__(self, loader: Any, state: Foreseen) -> None:
        self.dp_rank, self.dp_size = loader.dp_rank, loader.dp_size
        self.num_readers = loader.num_readers
        self.is_owner = getattr(loader, "is_owner", True)
        self._state = state

    def ckpt_common(self) -> dict[str, Any]:
        return self._state.common

    def ckpt_shards(self) -> list[LoaderShard]:
        return self._state.shards


def _loaders(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return role, empty for a state without roles, and loader of those that can be asked ahead."""
    roles = {"": state} if _PART in state else state
    for role, inner in roles.items():
        loader = inner.get(_PART) if isinstance(inner, Mapping) else None
        if hasattr(loader, "ckpt_prepare") and hasattr(loader, "ckpt_mark"):
            yield role, loader
