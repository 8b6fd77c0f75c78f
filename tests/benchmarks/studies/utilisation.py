"""E8: how full the slots of a rollout are, simulated for several distributions of lengths."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.studies import slot_model as model
from tests.benchmarks.studies.pictures import COLOURS
from tests.benchmarks.studies.reading import Interval, Runs, interval
from tests.benchmarks.studies.writing import SIMULATED, Direction, Findings, Study

NUM_SLOTS = 512
LONGEST = 24_576
NUM_BATCHES = 200
WINDOWS = (24_576, 16_384, 8_192, 4_096, 2_048, 1_024)
PUBLISHED_WINDOW = 8_192
"""T-PPO's; its longest response is `LONGEST`."""
SEEDS = (0, 1, 2)

LENGTHS = {
    "log-normal, mu 7.6, sigma 1.0": model.log_normal(7.6, 1.0),
    "log-normal, mu 7.6, sigma 0.5": model.log_normal(7.6, 0.5),
    "90 % of 2,000, 10 % of 24,576": model.mixture(2_000, 0.9, LONGEST, 0.1),
    "uniform, 1 to 24,576": model.uniform(1, LONGEST),
    "all of 8,192": model.constant(8_192),
}


def simulate() -> dict[str, dict[str, Any]]:
    """Return utilisation of whole batches and of each window, and the speed-up, over seeds."""
    found = {}
    for name, lengths in LENGTHS.items():
        capped = model.capped(lengths, LONGEST)
        options: dict[str, Any] = {"num_slots": NUM_SLOTS, "num_batches": NUM_BATCHES}
        whole = [model.synchronous(capped, seed=seed, **options).share for seed in SEEDS]
        windows = {
            window: [
                model.successive(capped, window_tokens=window, seed=seed, **options).share
                for seed in SEEDS
            ]
            for window in WINDOWS
        }
        found[name] = {
            "whole": interval(whole),
            "windows": {window: interval(shares) for window, shares in windows.items()},
            "speed_up": {
                window: interval(a / b for a, b in zip(shares, whole, strict=True))
                for window, shares in windows.items()
            },
        }
    return found


def _gain(found: Interval) -> Interval:
    """Return by how much a speed-up exceeds 1."""
    return interval(value - 1.0 for value in found.values)


def read(_: Runs) -> Findings:
    """Simulate all distributions."""
    found = simulate()
    directions = [
        Direction(
            f"rollout speed-up of windows of {PUBLISHED_WINDOW:,} tokens, less 1: {name}",
            "up to 2.5x in training efficiency (abstract)",
            _gain(facts["speed_up"][PUBLISHED_WINDOW]),
        )
        for name, facts in found.items()
    ]

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for colour, (name, facts) in zip(COLOURS, found.items(), strict=False):
            shares = [facts["windows"][window].mean for window in WINDOWS]
            left.plot(WINDOWS, shares, "o-", color=colour, markersize=3, label=name)
            left.axhline(facts["whole"].mean, color=colour, linewidth=0.8, linestyle=":")
            gains = [facts["speed_up"][window].mean for window in WINDOWS]
            right.plot(WINDOWS, gains, "o-", color=colour, markersize=3, label=name)
        left.set_ylabel("share of slots in use (dotted: whole responses)")
        right.set_ylabel("speed-up of the rollout stage, x")
        right.axhline(1.0, color="grey", linewidth=0.8)
        right.legend(fontsize=8)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(WINDOWS, [f"{window:,}" for window in WINDOWS], fontsize=7)
            axes.set_xlabel("window, tokens")
            axes.grid(alpha=0.3)

    setup = {"slots": NUM_SLOTS, "longest_response_tokens": LONGEST, "batches": NUM_BATCHES}
    return Findings({"setup": setup, "distributions": found}, directions, draw, size=(10.0, 4.2))


STUDIES = (
    Study(
        "utilisation",
        "E8: slots in use, whole responses against windows",
        "T-PPO, arXiv 2506.15050; the model of the gain is ours",
        read,
        label=SIMULATED,
    ),
)
