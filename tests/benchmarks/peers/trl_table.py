"""What the comparison with TRL says, from ratios by seed to rows of docs/results.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.intervals import Interval, interval, ratio_interval

FAIR = "ours"
"""The arm that makes the same passes over the same number of rollouts as TRL."""
DIFFERENCES = {
    "ours": "both sides sample 128 x 8, keep every group and compute old log-probabilities by a "
    "forward pass of the trainer; ours makes no policy gradient for rollouts whose advantage is 0",
    "ours_bypass": "as `ours`, but old log-probabilities are those of the sampler: ours skips a "
    "pass that TRL makes",
    "ours_dynamic": "the demo's preset: dynamic sampling draws groups until 128 are mixed, old "
    "log-probabilities are those of the sampler; TRL does neither",
    "ours_dynamic_recomputed": "as `ours_dynamic`, but old log-probabilities are computed by a "
    "forward pass of the trainer, as TRL does",
}
"""Arm of ours to what differs between it and TRL."""
ARMS = tuple(DIFFERENCES)
SYSTEMS = ("trl", *ARMS)
CLOCKS = ("seconds", "processor_seconds")
REACHES = (
    "the target of a seed is the lower of the accuracies that TRL and the arm have after the last "
    "iteration; either side reaches it with its first policy that is at least as accurate, and has "
    "spent the seconds of the iterations up to it; all policies are evaluated alike"
)
"""The same rule for both sides."""

Seeds = Mapping[str, Mapping[str, Any]]
"""Seed to what `bench_trl` measured."""


def iterations_to(target: float, accuracy: Sequence[float]) -> int:
    """Return how many iterations it takes to an accuracy; the last policy must have it.

    Args:
        target: accuracy to reach.
        accuracy: of the policy after each iteration.

    Example:
        >>> iterations_to(0.3, [0.1, 0.3, 0.2, 0.4])
        2
    """
    return next(k for k, found in enumerate(accuracy, 1) if found >= target)


def summary(seeds: Seeds) -> dict[str, Any]:
    """Return, for every arm of ours, what is said of all seeds together."""
    return {arm: _of_arm(list(seeds.values()), arm) for arm in ARMS}


def _of_arm(seeds: Sequence[Mapping[str, Any]], arm: str) -> dict[str, Any]:
    found: dict[str, Any] = {"differs": DIFFERENCES[arm]}
    for clock in CLOCKS:
        found[clock] = {
            "trl_over_it_per_iteration": _ratios(seeds, arm, clock, _median),
            "trl_over_it_all_iterations": _ratios(seeds, arm, clock, sum),
            "trl_over_it_to_accuracy": ratio_interval(
                _to_accuracy(seed, arm, clock) for seed in seeds
            ).to_json(),
            "median_iteration": {
                name: statistics.median(_median(_spent(seed, name, clock)) for seed in seeds)
                for name in ("trl", arm)
            },
        }
    number = len(seeds[0][arm]["accuracy"])
    found["accuracy_minus_trl"] = [
        _difference(seeds, arm, iteration).to_json() for iteration in range(number)
    ]
    found["accuracy"], found["trl_accuracy"] = (
        [statistics.fmean(s[name]["accuracy"][k] for s in seeds) for k in range(number)]
        for name in (arm, "trl")
    )
    groups = [t["generated_groups"] for s in seeds for t in s[arm]["iterations"]]
    found["generated_groups_per_iteration"] = statistics.fmean(groups)
    return found


def _spent(seed: Mapping[str, Any], name: str, clock: str) -> list[float]:
    return [turn[clock] for turn in seed[name]["iterations"]]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _ratios(
    seeds: Sequence[Mapping[str, Any]], arm: str, clock: str, of_iterations: Any
) -> dict[str, Any]:
    return ratio_interval(
        of_iterations(_spent(seed, "trl", clock)) / of_iterations(_spent(seed, arm, clock))
        for seed in seeds
    ).to_json()


def _to_accuracy(seed: Mapping[str, Any], arm: str, clock: str) -> float:
    target = min(seed[name]["accuracy"][-1] for name in ("trl", arm))
    trl, ours = (
        sum(_spent(seed, name, clock)[: iterations_to(target, seed[name]["accuracy"])])
        for name in ("trl", arm)
    )
    return trl / ours


def _difference(seeds: Sequence[Mapping[str, Any]], arm: str, iteration: int) -> Interval:
    return interval(s[arm]["accuracy"][iteration] - s["trl"]["accuracy"][iteration] for s in seeds)


def result_rows(result: Mapping[str, Any], label: str) -> list[str]:
    """Return the rows of docs/results.md, as Markdown.

    Args:
        result: of `results/trl.json`.
        label: how it was measured.
    """
    found, seeds = result["summary"], result["seeds"]
    count = len(found[FAIR]["accuracy"])
    conditions = f"{len(seeds)} seeds fixed beforehand, one thread each ({label}, idle machine)"

    def ratio(arm: str, name: str) -> str:
        return _shown(found[arm]["seconds"][name], "{:.2f}x")

    def row(what: str, figure: str) -> str:
        return f"| {what} | {figure} | [trl.json](../tests/benchmarks/results/trl.json) |"

    groups = found["ours_dynamic"]["generated_groups_per_iteration"]
    return [
        row(
            'seconds of an iteration of TRL 1.16 `GRPOTrainer` (`loss_type="dapo"`) over ours: '
            "same start, prompts, batch, updates and reward, both without dynamic sampling and "
            "with recomputed old log-probabilities; ours makes no gradient for rollouts of zero "
            f"advantage; {conditions}",
            ratio("ours", "trl_over_it_per_iteration"),
        ),
        row(
            "the same where ours takes the sampler's log-probabilities and so skips a pass that "
            "TRL makes",
            ratio("ours_bypass", "trl_over_it_per_iteration"),
        ),
        row(
            "the same, seconds to the accuracy that both sides have at the end: without dynamic "
            f"sampling; with it, as the demo's preset ({groups:.0f} groups generated an iteration "
            "for TRL's 128); with it and recomputed old log-probabilities",
            "; ".join(
                ratio(arm, "trl_over_it_to_accuracy")
                for arm in ("ours", "ours_dynamic", "ours_dynamic_recomputed")
            ),
        ),
        row(
            f"the same, held-out avg@8 of ours minus TRL's after {count} equal iterations: without "
            "dynamic sampling; with it",
            "; ".join(
                _shown(found[arm]["accuracy_minus_trl"][-1], "{:+.3f}")
                for arm in ("ours", "ours_dynamic")
            ),
        ),
    ]


def _shown(found: Mapping[str, Any], form: str) -> str:
    mean = form.format(found["mean"])
    if found["interval_95"] is None:
        return mean
    low, high = (form.format(bound).rstrip("x") for bound in found["interval_95"])
    return f"{mean} [{low}, {high}]"
