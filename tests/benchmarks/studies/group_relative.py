"""GRPO, DAPO and what lies between: the ladder and E1 to E4, on column arithmetic."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tests.benchmarks.studies import column_arms as arms
from tests.benchmarks.studies.pictures import curves, dots
from tests.benchmarks.studies.reading import (
    Run,
    Runs,
    at,
    differences,
    over_seeds,
    ratio_interval,
)
from tests.benchmarks.studies.writing import Direction, Findings, Study

AIME = (30, 36, 38, 41, 42, 50)
"""AIME 2024 avg@32 of Qwen2.5-32B after each step of the ladder. DAPO, table 1."""

STEPS = (
    "GRPO",
    "+ overlong filtering",
    "+ clip-higher",
    "+ soft overlong",
    "+ token-level loss",
    "+ dynamic sampling",
)
TOKENS = "generated tokens of the last arm over those of the first"
ACCURACY = "held-out avg@8"
UPDATES = "iterations"


def accuracy(run: Run) -> float:
    """Return avg@8 of the last policy."""
    return run.final("accuracy")


def facts(runs: Runs) -> dict[str, Any]:
    """Return the figures that every study of this task gives for each arm."""
    return {
        label: {
            "start_accuracy": over_seeds(row, lambda run: run.scores("accuracy")[0]),
            "accuracy": over_seeds(row, accuracy),
            "greedy": over_seeds(row, lambda run: run.final("greedy")),
            "pass@8": over_seeds(row, lambda run: run.final("pass@8")),
            "entropy_nats_per_token": over_seeds(row, lambda run: run.final("entropy")),
            "response_tokens": over_seeds(row, lambda run: run.final("response_length_mean")),
            "truncated_fraction": over_seeds(row, lambda run: run.final("truncated_fraction")),
            "generated_tokens": over_seeds(row, lambda run: run.tokens()[-1]),
            "cpu_seconds": over_seeds(row, lambda run: run.seconds()[-1]),
        }
        for label, row in runs.items()
    }


def _scores(key: str) -> Any:
    return lambda run: run.scores(key)


def read_ladder(runs: Runs) -> Findings:
    """Compare each step with the one before."""
    directions = [
        Direction(
            f"{after} (cumulative) - {before} in avg@8",
            f"AIME 2024 {AIME[k]} -> {AIME[k + 1]}",
            differences(runs[after], runs[before], accuracy),
        )
        for k, (before, after) in enumerate(pairwise(STEPS))
    ]
    whole = differences(runs[STEPS[-1]], runs[STEPS[0]], accuracy)
    directions.append(Direction("DAPO - GRPO in avg@8", "AIME 2024 30 -> 50", whole))

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        dots(left, {k: over_seeds(v, accuracy) for k, v in runs.items()}, label=ACCURACY)
        right.barh(range(len(AIME)), AIME, color="#bbbbbb")
        right.set_yticks([])
        right.set_ylim(len(AIME) - 0.5, -0.5)
        for row, score in enumerate(AIME):
            right.text(score - 1, row, str(score), va="center", ha="right", fontsize=9)
        right.set_xlabel("AIME avg@32, 32B (published)")

    tokens = [[run.tokens()[-1] for run in runs[label]] for label in (STEPS[-1], STEPS[0])]
    figures = facts(runs) | {TOKENS: ratio_interval(a / b for a, b in zip(*tokens, strict=True))}
    return Findings(figures, directions, draw)


def read_clip(runs: Runs) -> Findings:
    """Compare the clip ranges in entropy and in pass@8."""
    higher, symmetric = runs["clip-higher 0.28"], runs["symmetric 0.2"]
    directions = [
        Direction(
            "clip-higher - symmetric in entropy, nats a token",
            "entropy collapses with 0.2 and stays up with 0.28 (figure 2)",
            differences(higher, symmetric, lambda run: run.final("entropy")),
        ),
        Direction(
            "clip-higher - symmetric in avg@8",
            "AIME 2024 36 -> 38",
            differences(higher, symmetric, accuracy),
        ),
        Direction(
            "clip-higher - symmetric in pass@8",
            "more exploration; no figure",
            differences(higher, symmetric, lambda run: run.final("pass@8")),
        ),
    ]
    clipped = {
        label: over_seeds(row, lambda run: sum(run.trained("train", "clipfrac_high")) / 12)
        for label, row in runs.items()
    }

    def draw(figure: Any) -> None:
        names = (("entropy", "entropy, nats a token"), ("pass@8", "pass@8"), ("accuracy", ACCURACY))
        for axes, (key, label) in zip(figure.subplots(1, 3), names, strict=True):
            curves(axes, runs, Run.updates, _scores(key), labels=(UPDATES, label))
        axes.legend(fontsize=8)

    figures = {**facts(runs), "fraction_of_tokens_clipped_above": clipped}
    return Findings(figures, directions, draw)


def read_sampling(runs: Runs) -> Findings:
    """Compare with and without dynamic sampling at equal iterations and at equal tokens."""
    on, off = runs["dynamic sampling"], runs["every group"]
    budget = min(run.tokens()[-1] for run in (*on, *off))

    def at_budget(run: Run) -> float:
        return at(budget, run.tokens(), run.scores("accuracy"))

    directions = [
        Direction(
            "on - off in avg@8 after equal iterations",
            "AIME 2024 42 -> 50; fewer steps to equal accuracy (figure 6)",
            differences(on, off, accuracy),
        ),
        Direction(
            "on - off in avg@8 after equally many generated tokens",
            "training time is not made longer (section 3.2); no figure",
            differences(on, off, at_budget),
        ),
    ]
    figures = {
        **facts(runs),
        "tokens_of_the_equal_token_comparison": budget,
        "samples_per_trained_sample": over_seeds(
            on, lambda run: sum(run.trained("rollout", "ds/samples_per_trained_sample")) / 12
        ),
        "kept_fraction_of_groups": over_seeds(
            on, lambda run: sum(run.trained("rollout", "ds/kept_frac")) / 12
        ),
    }

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        curves(left, runs, Run.updates, _scores("accuracy"), labels=(UPDATES, ACCURACY))
        curves(
            *(right, runs, lambda run: [tokens / 1e6 for tokens in run.tokens()]),
            _scores("accuracy"),
            labels=("generated tokens, millions", ""),
        )
        right.legend(fontsize=8)

    return Findings(figures, directions, draw)


def read_overlong(runs: Runs) -> Findings:
    """Compare none, filtering and the soft punishment."""
    none, filtering = runs["none"], runs["filtering"]
    soft = runs["soft punishment"]
    directions = [
        Direction(
            "filtering - none in avg@8",
            "AIME 2024 30 -> 36",
            differences(filtering, none, accuracy),
        ),
        Direction("soft - none in avg@8", "AIME 2024 38 -> 41", differences(soft, none, accuracy)),
        Direction(
            "soft - none in truncated responses",
            "excessively long responses are discouraged (section 3.4); no figure",
            differences(soft, none, lambda run: run.final("truncated_fraction")),
            sign=-1,
        ),
    ]

    def draw(figure: Any) -> None:
        left, middle, right = figure.subplots(1, 3)
        curves(left, runs, Run.updates, _scores("accuracy"), labels=(UPDATES, ACCURACY))
        curves(
            *(middle, runs, Run.updates, _scores("truncated_fraction")),
            labels=(UPDATES, "truncated responses, share"),
        )
        curves(
            *(right, runs, Run.updates, _scores("response_length_mean")),
            labels=(UPDATES, "mean response, tokens"),
        )
        right.legend(fontsize=8)

    return Findings(facts(runs), directions, draw)


def read_token_level(runs: Runs) -> Findings:
    """Compare the two means of the loss in accuracy, length and entropy."""
    token, sample = runs["token-level"], runs["sample-level"]
    directions = [
        Direction(
            "token-level - sample-level in avg@8",
            "AIME 2024 41 -> 42",
            differences(token, sample, accuracy),
        ),
        Direction(
            "token-level - sample-level in mean response, tokens",
            "sample-level lets length grow unhealthily (figure 4)",
            differences(token, sample, lambda run: run.final("response_length_mean")),
            sign=-1,
        ),
        Direction(
            "token-level - sample-level in entropy, nats a token",
            "sample-level lets entropy grow unhealthily (figure 4)",
            differences(token, sample, lambda run: run.final("entropy")),
            sign=-1,
        ),
    ]

    def draw(figure: Any) -> None:
        names = (
            ("accuracy", ACCURACY),
            ("response_length_mean", "mean response, tokens"),
            ("entropy", "entropy, nats a token"),
        )
        for axes, (key, label) in zip(figure.subplots(1, 3), names, strict=True):
            curves(axes, runs, Run.updates, _scores(key), labels=(UPDATES, label))
        axes.legend(fontsize=8)

    return Findings(facts(runs), directions, draw)


STUDIES = (
    Study(
        "ladder",
        "From GRPO to DAPO, one change at a time",
        "DAPO, arXiv 2503.14476, table 1",
        read_ladder,
        dict(zip(STEPS, arms.LADDER, strict=True)),
    ),
    Study(
        "clip-higher",
        "E1: the upper clip, entropy and pass@8",
        "DAPO, arXiv 2503.14476, section 3.1",
        read_clip,
        {"clip-higher 0.28": arms.DAPO, "symmetric 0.2": arms.DAPO_SYMMETRIC},
    ),
    Study(
        "dynamic-sampling",
        "E2: dynamic sampling against iterations and generated tokens",
        "DAPO, arXiv 2503.14476, section 3.2",
        read_sampling,
        {"dynamic sampling": arms.LADDER[5], "every group": arms.LADDER[4]},
    ),
    Study(
        "overlong",
        "E3: what becomes of overlong responses",
        "DAPO, arXiv 2503.14476, section 3.4",
        read_overlong,
        {
            "none": arms.DAPO_NO_OVERLONG,
            "filtering": arms.DAPO_FILTERING,
            "soft punishment": arms.DAPO,
        },
    ),
    Study(
        "token-level",
        "E4: token-level and sample-level loss",
        "DAPO, arXiv 2503.14476, section 3.3",
        read_token_level,
        {"token-level": arms.DAPO, "sample-level": arms.DAPO_SAMPLE_LEVEL},
    ),
)
