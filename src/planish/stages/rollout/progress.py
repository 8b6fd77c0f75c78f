"""Progress of a shard while it samples: levels for the monitoring server, and lines of the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from planish.base import telemetry
from planish.run.stage_metrics import this_rank

logger = logging.getLogger(__name__)

LEVEL_SECONDS = 1.0
"""Seconds between levels."""
MOST_EXPERT_SERIES = 512
"""Most experts, over all layers, that get a series each; with more only the imbalance shows."""
LINE_SECONDS = 5.0
"""Seconds between lines of the log."""


class SamplingProgress:
    """Levels and log lines of one shard."""

    def __init__(self, goal: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to count towards a goal of groups, or of windows of responses."""
        self._goal, self._clock = goal, clock
        self._began = self._levels_at = self._line_at = clock()
        self._kept_before: int | None = None
        self._shown: dict[tuple[str, str], float] = {}

    def look(
        self,
        *,
        kept: int,
        dropped: int,
        num_rows: int,
        stats: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Publish the present state, at most every `LEVEL_SECONDS`; log it every `LINE_SECONDS`.

        Args:
            kept: groups or windows that count towards the goal so far.
            dropped: groups without a signal.
            num_rows: responses that are in the engine now.
            stats: returns the counters of the engine; called at most every `LEVEL_SECONDS`.
        """
        if self._kept_before is None:
            self._kept_before = kept
        now = self._clock()
        if now - self._levels_at < LEVEL_SECONDS:
            return
        self._levels_at = now
        elapsed = now - self._began
        counters = stats()
        speed = counters["tokens"] / elapsed
        new, missing = kept - self._kept_before, max(0, self._goal - kept)
        left = elapsed * missing / new if new > 0 else None
        telemetry.set_level("planish_rollout_kept_groups", kept)
        telemetry.set_level("planish_rollout_dropped_groups", dropped)
        telemetry.set_level("planish_rollout_tokens_per_second", speed, rank=this_rank())
        telemetry.set_level("planish_rollout_busy_slots", num_rows)
        if left is not None:
            telemetry.set_level("planish_rollout_remaining_seconds", left)
        self.show_ranks(counters)
        if now - self._line_at < LINE_SECONDS:
            return
        self._line_at = now
        logger.info(
            "sampling kept=%d goal=%d dropped=%d tokens_per_second=%.0f slots=%d seconds_left=%s",
            kept,
            self._goal,
            dropped,
            speed,
            num_rows,
            "unknown" if left is None else f"{left:.0f}",
        )

    def show_ranks(self, stats: Mapping[str, Any]) -> None:
        """Show the counters of an engine's ranks; an engine without ranks shows nothing."""
        if "imbalance" in stats:
            telemetry.set_level("planish_rollout_expert_imbalance_ratio", stats["imbalance"])
        tokens = stats.get("expert_tokens", ())
        if sum(map(len, tokens)) <= MOST_EXPERT_SERIES:
            for layer, rows in enumerate(tokens):
                for expert, value in enumerate(rows):
                    grown = self._grown("experts", f"{layer} {expert}", value)
                    labels = {"layer": str(layer), "expert": str(expert)}
                    telemetry.count("planish_rollout_expert_rows_total", grown, **labels)
        for facts in stats.get("ranks", ()):
            rank = {"rank": str(facts["rank"]), "role": facts["role"]}
            number = rank["rank"]
            for name in ("busy_s", "wait_s", "rows"):
                series = f"planish_rollout_rank_{name.replace('_s', '_seconds')}_total"
                telemetry.count(series, self._grown(number, name, facts[name]), **rank)
            bubble = 1.0 - facts["busy_s"] / max(stats["step_seconds"], 1e-9)
            telemetry.set_level("planish_rollout_rank_bubble_ratio", max(0.0, bubble), **rank)
            telemetry.set_level("planish_rollout_rank_queue", facts["queue"], **rank)
            if "cache_bytes" in facts:
                telemetry.set_level(
                    "planish_rollout_rank_cache_bytes", facts["cache_bytes"], **rank
                )
            if "m2n" not in facts:
                continue
            traffic = facts["m2n"]
            for name, unit in (("num_bytes", "frame_bytes"), ("num_frames", "frames")):
                for kind, value in traffic[name].items():
                    telemetry.count(
                        f"planish_rollout_rank_{unit}_total",
                        self._grown(number, f"{kind} {unit}", value),
                        kind=kind,
                        rank=number,
                    )
            telemetry.observe_counts(
                "planish_rollout_rank_reply_seconds",
                [
                    int(self._grown(number, f"bucket {bucket}", value))
                    for bucket, value in enumerate(traffic["reply_counts"])
                ],
                self._grown(number, "reply_seconds", traffic["reply_seconds"]),
                rank=number,
            )

    def _grown(self, rank: str, name: str, value: float) -> float:
        """Return the growth of a rank's counter, 0 if it restarts after the loss of a rank."""
        before = self._shown.get((rank, name), 0)
        self._shown[rank, name] = value
        return max(0, value - before)
