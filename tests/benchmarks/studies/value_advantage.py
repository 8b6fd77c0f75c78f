"""E6: error of the advantage by response length, for decays that are fixed and that adapt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.algorithms.advantages import adaptive_lambda, gae, terminal_rewards
from planish.algorithms.base import TrainBatch
from tests.benchmarks.studies.pictures import COLOURS
from tests.benchmarks.studies.reading import Interval, Run, Runs, interval
from tests.benchmarks.studies.value_critics import Critics, pretrained
from tests.benchmarks.studies.value_lab import START, Floats, Lab, State, remembered
from tests.benchmarks.studies.writing import Direction, Findings, Study

PRETRAINED = (2, 16)
"""Rollout batches of value pretraining of the two critics."""
LENGTHS = (0, 12, 24, 48, 129)
"""Edges of the buckets of response length, tokens."""
PROMPTS = 16
"""Most responses of a bucket."""
TOKENS = 4
"""Tokens examined in each response."""
CONTINUATIONS = 64
FIXED = (0.9, 0.95, 0.99, 1.0)
ALPHAS = (0.05, 0.1, 0.25, 0.5, 1.0)

SETTINGS = {
    "pretrained": PRETRAINED,
    "length_edges": LENGTHS,
    "prompts": PROMPTS,
    "tokens": TOKENS,
    "continuations": CONTINUATIONS,
    "fixed": FIXED,
    "alphas": ALPHAS,
}

Decay = Callable[[Tensor], Tensor]
"""Response lengths [B] to decays [B]."""

LABELS = tuple(
    f"{'fixed' if k < len(FIXED) else 'adaptive'} {x}" for k, x in enumerate(FIXED + ALPHAS)
)
REFERENCE = "fixed 0.95"
ADAPTIVE = "adaptive 0.5"


def decays() -> dict[str, Decay]:
    """Return every decay by its label; the adaptive ones have no lower bound but 0."""

    def fixed(value: float) -> Decay:
        return lambda lengths: torch.full((len(lengths),), value)

    def adaptive(alpha: float) -> Decay:
        return lambda lengths: adaptive_lambda(lengths, alpha=alpha, minimum=0.0)

    made = [*(fixed(x) for x in FIXED), *(adaptive(x) for x in ALPHAS)]
    return dict(zip(LABELS, made, strict=True))


def choose(lab: Lab) -> tuple[list[State], list[State], Floats]:
    """Return states before and after some tokens, and the length of each token's response."""
    found = lab.respond(lab.held_out, 1, 600)
    lengths = found.response_tokens.lengths
    rng = np.random.default_rng([lab.seed, 78])
    rows: list[int] = []
    for low, high in pairwise(LENGTHS):
        inside = np.flatnonzero((lengths >= max(low, 2)) & (lengths < high))
        rows += rng.permutation(inside)[:PROMPTS].tolist()
    picked = found.take_groups(np.array(rows))
    cuts = [
        sorted(rng.choice(int(lengths[row]) - 1, min(TOKENS, int(lengths[row]) - 1), replace=False))
        for row in rows
    ]
    before = lab.states_of(picked, rows, lambda row, _: [int(t) for t in cuts[row]])
    behind = lab.states_of(picked, rows, lambda row, _: [int(t) + 1 for t in cuts[row]])
    sizes = [float(lengths[row]) for row, cut in zip(rows, cuts, strict=True) for _ in cut]
    return before, behind, np.array(sizes)


def estimates(
    critics: Critics, batch: TrainBatch, columns: Tensor, wanted: Mapping[str, Decay]
) -> dict[str, Floats]:
    """Return each decay's estimate at one token of each row, [B]."""
    mask = batch.value_mask
    values = critics.values(batch)
    rewards = terminal_rewards(batch.reward, mask, batch.is_finished)
    lengths = mask.sum(1)
    return {
        name: gae(rewards, values, mask, lam=decay(lengths))
        .gather(1, columns.unsqueeze(1))
        .squeeze(1)
        .double()
        .numpy()
        for name, decay in wanted.items()
    }


def compare(
    guesses: Floats, returns: Floats, values: Floats, noise: Floats, chosen: Any
) -> dict[str, float]:
    """Split the error of estimates into bias and variance.

    Args:
        guesses: [T, n] estimates at T tokens, one for each continuation.
        returns: [T, n] rewards of these continuations; their mean is the value after the token.
        values: [T] sampled value before the token.
        noise: [T] variance of `values`.
        chosen: [T] bool, tokens of the bucket.
    """
    # The same continuations stand in the estimate and in the truth, so that their noise cancels
    # where the estimate is the reward itself.
    gaps = (guesses - returns)[chosen]
    bias = gaps.mean(1) + values[chosen]
    spread = gaps.var(1, ddof=1) / gaps.shape[1] + noise[chosen]
    variance = float(guesses[chosen].var(1, ddof=1).mean())
    square = max(float(np.mean(bias**2 - spread)), 0.0)
    truth = np.repeat((returns.mean(1) - values)[chosen], guesses.shape[1])
    return {
        "rmse": (square + variance) ** 0.5,
        "bias_rms": square**0.5,
        "bias_mean": float(bias.mean()),
        "deviation": variance**0.5,
        "correlation": float(np.corrcoef(guesses[chosen].ravel(), truth)[0, 1]),
    }


def measure(run: Run) -> dict[str, Any]:
    """Return the errors by critic, decay and bucket of one seed."""
    lab = Lab(run)
    before, behind, lengths = choose(lab)
    here = lab.continue_all(before, CONTINUATIONS, 601)
    there = lab.continue_all(behind, CONTINUATIONS, 602)
    values, noise = here.values(), here.noise()
    returns, batch = there.returns(), there.batch()
    columns = torch.tensor(
        [len(s.prompt_tokens) + len(s.prefix) - 1 for s in behind for _ in range(CONTINUATIONS)]
    )
    snapshots = pretrained(lab)
    critics = Critics(lab)
    result: dict[str, Any] = {"num_tokens": [], "truth": []}
    buckets = [(lengths >= low) & (lengths < high) for low, high in pairwise(LENGTHS)]
    result["num_tokens"] = [int(inside.sum()) for inside in buckets]
    gain = there.values() - values
    doubt = noise + there.noise()
    result["truth_deviation"] = [
        max(float(np.mean(gain[inside] ** 2 - doubt[inside])), 0.0) ** 0.5 for inside in buckets
    ]
    everything = np.ones(len(lengths), bool)
    for batches in PRETRAINED:
        critics.use(snapshots[batches])
        found = estimates(critics, batch, columns, decays())
        result[str(batches)] = {
            name: [
                compare(guess.reshape(returns.shape), returns, values, noise, inside)
                for inside in (*buckets, everything)
            ]
            for name, guess in found.items()
        }
    critics.close()
    lab.close()
    return result


def value_of(found: Mapping[str, Any], batches: int, name: str, bucket: int, key: str) -> float:
    """Return one figure of one seed; bucket -1 is all lengths."""
    return float(found[str(batches)][name][bucket][key])


def contrast(
    found: Sequence[Mapping[str, Any]], names: tuple[str, str], bucket: int, key: str
) -> Interval:
    """Return the difference of two decays, seed by seed, with the briefly pretrained critic."""
    first, second = (
        [value_of(seed, PRETRAINED[0], name, bucket, key) for seed in found] for name in names
    )
    return interval(a - b for a, b in zip(first, second, strict=True))


def directions(found: Sequence[Mapping[str, Any]]) -> list[Direction]:
    """Return what the paper says of fixed decays, with what was seen."""
    longest = len(LENGTHS) - 2
    tail = f"responses of {LENGTHS[-2]} tokens and more"
    growth = interval(
        value_of(seed, PRETRAINED[0], REFERENCE, longest, "bias_rms")
        - value_of(seed, PRETRAINED[0], REFERENCE, 0, "bias_rms")
        for seed in found
    )
    pair = (ADAPTIVE, REFERENCE)
    return [
        Direction(
            f"bias of {REFERENCE}: longest responses - shortest",
            "a fixed decay accumulates bias over long responses (VAPO, section 4.2)",
            growth,
        ),
        Direction(
            f"bias, {tail}: {REFERENCE} - fixed 1.0",
            "the reward is discounted away over long responses (VAPO, section 4.2)",
            contrast(found, (REFERENCE, "fixed 1.0"), longest, "bias_rms"),
        ),
        Direction(
            f"standard deviation, {tail}: fixed 1.0 - {REFERENCE}",
            "a decay near 1 has high variance (VAPO, section 4.2)",
            contrast(found, ("fixed 1.0", REFERENCE), longest, "deviation"),
        ),
        Direction(
            f"RMSE, {tail}: {ADAPTIVE} - {REFERENCE}",
            "the adaptive decay balances both at every length (VAPO, table 1: AIME 2024 60 "
            "with it, 45 without)",
            contrast(found, pair, longest, "rmse"),
            sign=-1,
        ),
        Direction(
            f"correlation with the true advantage, all lengths: {ADAPTIVE} - {REFERENCE}",
            "the same; no figure",
            contrast(found, pair, -1, "correlation"),
        ),
    ]


def names_of_buckets() -> list[str]:
    """Return the buckets in words."""
    edges = pairwise(LENGTHS)
    return [f"{max(low, 2)}-{high - 1}" for low, high in edges]


def read(runs: Runs) -> Findings:
    """Measure the seeds that are not measured yet, and put them together."""
    found = [remembered("advantage", run, SETTINGS, measure) for run in runs["start"]]
    names = [*names_of_buckets(), "all"]

    def over(batches: int, name: str, bucket: int, key: str) -> Interval:
        return interval(value_of(seed, batches, name, bucket, key) for seed in found)

    keys = ("rmse", "bias_rms", "bias_mean", "deviation", "correlation")
    figures: dict[str, Any] = {
        f"critic after {batches} batches": {
            name: {
                words: {key: over(batches, name, bucket, key) for key in keys}
                for bucket, words in enumerate(names)
            }
            for name in LABELS
        }
        for batches in PRETRAINED
    }
    figures["tokens_examined"] = {
        words: [seed["num_tokens"][k] for seed in found] for k, words in enumerate(names[:-1])
    }
    figures["root_mean_square_of_true_advantage"] = {
        words: interval(seed["truth_deviation"][k] for seed in found)
        for k, words in enumerate(names[:-1])
    }
    figures["settings"] = SETTINGS

    def draw(figure: Any) -> None:
        shown = ("fixed 0.9", "fixed 0.95", "fixed 1.0", "adaptive 0.1", "adaptive 0.5")
        titles = {"rmse": "RMSE", "bias_rms": "bias (root mean square)", "deviation": "deviation"}
        rows = figure.subplots(len(PRETRAINED), len(titles), sharex=True, sharey="row")
        for line, batches in zip(rows, PRETRAINED, strict=True):
            for axes, (key, title) in zip(line, titles.items(), strict=True):
                for colour, name in zip(COLOURS, shown, strict=False):
                    points = [over(batches, name, k, key) for k in range(len(names) - 1)]
                    axes.plot(
                        [p.mean for p in points], "o-", color=colour, label=name, markersize=3
                    )
                    low, high = [p.low for p in points], [p.high for p in points]
                    axes.fill_between(range(len(points)), low, high, color=colour, alpha=0.1)
                axes.set_xticks(range(len(names) - 1), names[:-1])
                axes.set_ylim(bottom=0)
                axes.grid(alpha=0.3)
                axes.set_title(f"{title}, critic after {batches} batches", fontsize=9)
        for axes in rows[-1]:
            axes.set_xlabel("response, tokens")
        for line in rows:
            line[0].set_ylabel("error of the advantage")
        rows[0][-1].legend(fontsize=7)

    return Findings(figures, directions(found), draw, size=(10.5, 6.0))


STUDIES = (
    Study(
        "advantage-error",
        "E6: error of the advantage by response length, decay fixed and adaptive",
        "VAPO, arXiv 2504.05118, section 4.2",
        read,
        {"start": START},
    ),
)
