"""What a driver may call on a rollout engine, whichever it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol

from planish.engines.requests import (
    Capabilities,
    ModelRef,
    Output,
    Request,
    ShardSpec,
    WeightUpdate,
)
from planish.engines.weights import WeightSource

PauseMode = Literal["abort", "wait", "keep"]


class RolloutEngine(Protocol):
    """What a driver may call; `submit`, `poll` and `abort` also from different threads."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do with this model."""

    def start(self, model: ModelRef, source: WeightSource | None = None) -> None:
        """Load the model; `source` replaces the weights of its folder."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; all or none."""

    def poll(self, timeout: float) -> list[Output]:
        """Return finished outputs, waiting at most `timeout` seconds for the first."""

    def abort(self, request_ids: Collection[str] | None = None) -> list[Output]:
        """Take requests back (all of them for None); unknown ids are ignored."""

    def pause(self, mode: PauseMode) -> list[Output]:
        """Stop work: give all back, finish what runs, or freeze it."""

    def resume(self) -> None:
        """Go on after a pause."""

    def update_weights(
        self, source: WeightSource, version: int, *, keep_cache: bool = False
    ) -> WeightUpdate:
        """Change the weights while nothing runs."""

    def score(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[list[float]]:
        """Return log-probabilities of the tokens after the first n of each (tokens, n)."""

    def sleep(self, level: int = 1) -> None:
        """Free device memory."""

    def wake(self) -> None:
        """Take device memory back."""

    def version(self) -> int:
        """Return the policy version of the weights."""

    def layout(self) -> list[ShardSpec]:
        """Return which boxes of which tensors each rank holds."""

    def stats(self) -> dict[str, Any]:
        """Return counters since the start."""

    def close(self) -> None:
        """Free everything; may be called twice."""
