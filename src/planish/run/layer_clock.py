"""Compute time of a rank without waits: seconds in the layers of its models.

A slow rank makes all others wait in the next collective, so steps last equally long on all ranks.
Inside a layer a rank waits only for ranks that share its matrices, its tokens or its experts.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from typing import Any

import torch
from torch import nn

from planish.base import telemetry
from planish.run.slow_ranks import Work
from planish.run.stage_metrics import this_rank

_LAYER = re.compile(r"(^|\.)layers\.\d+$")

own = Work()
"""Work of this process in layers so far."""
last_step = 0
_shown: dict[str, Work] = {}
"""Rank to its work that the metrics already include."""


def time_layers(scorer: nn.Module) -> None:
    """Count each forward pass of a decoder layer: its seconds, and its tokens with padding.

    The clock starts after the weights of a sharded layer are gathered. On CUDA it records events in
    the stream, and reads them later without synchronization.
    """
    for name, module in scorer.named_modules():
        if _LAYER.search(name):
            clock = _Clock()
            module.register_forward_pre_hook(clock.start, with_kwargs=True)
            module.register_forward_hook(clock.stop, prepend=True)


class _Clock:
    """Clock of one layer."""

    def __init__(self) -> None:
        self._tokens, self._started = 0, 0.0
        self._event: Any = None
        self._running: deque[tuple[Any, Any, int]] = deque()

    def start(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Start the clock of a pass, and count earlier passes that have ended."""
        hidden = args[0] if args else options["hidden_states"]
        self._tokens, self._started = math.prod(hidden.shape[:-1]), time.perf_counter()
        if not hidden.is_cuda:
            return
        while self._running and self._running[0][1].query():
            began, ended, tokens = self._running.popleft()
            count_pass(began.elapsed_time(ended) / 1000, tokens)
        self._event = _now()

    def stop(self, *_: Any) -> None:
        """Stop the clock of the pass."""
        if self._event is None:
            count_pass(time.perf_counter() - self._started, self._tokens)
            return
        self._running.append((self._event, _now(), self._tokens))
        self._event = None


def _now() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def count_pass(seconds: float, tokens: int) -> None:
    """Add one pass of a layer to the work of this rank."""
    global own
    own = Work(own[0] + seconds, own.passes + 1, own.tokens + tokens)


def finish_step(step: int) -> None:
    """Store the last finished training step of this rank; the first rank also shows its work."""
    global last_step
    last_step = step
    if this_rank() == "0":
        telemetry.set_level("planish_train_rank_last_step", step, rank="0")
        show_work("0", own)


def show_work(rank: str, work: Work) -> None:
    """Add the new work of a rank to the metrics `planish_train_rank_*_total`."""
    added = work.since(_shown.get(rank, Work()))
    _shown[rank] = work
    for name, amount in added._asdict().items():
        telemetry.count(f"planish_train_rank_{name}_total", amount, rank=rank)
