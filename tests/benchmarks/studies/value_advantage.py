"""E6: error of the advantage by response length, for decays that are fixed and that adapt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
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
PROMPTS = 24
"""Most responses of a bucket."""
TOKENS = 6
"""Tokens examined in each response, drawn by their weight in the policy gradient: 1 - p for a token
of probability p. A token that was certain has no gradient and nothing to learn from."""
SMALLEST_WEIGHT = 1e-3
"""Of certain tokens, so that every response has enough to draw from."""
CONTINUATIONS = 64
FIXED = (0.9, 0.95, 0.99, 1.0)
ALPHAS = (0.05, 0.1, 0.25, 0.5, 1.0)

SETTINGS = {
    "pretrained": PRETRAINED,
    "length_edges": LENGTHS,
    "prompts": PROMPTS,
    "tokens": TOKENS,
    "weight_of_a_token": f"1 - p, at least {SMALLEST_WEIGHT}",
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
    cuts = [_draw(rng, found.rollout_logprobs.row(row)) for row in rows]
    before = lab.states_of(picked, rows, lambda row, _: cuts[row])
    behind = lab.states_of(picked, rows, lambda row, _: [t + 1 for t in cuts[row]])
    sizes = [float(lengths[row]) for row, cut in zip(rows, cuts, strict=True) for _ in cut]
    return before, behind, np.array(sizes)


def _draw(rng: np.random.Generator, logprobs: npt.NDArray[np.float32]) -> list[int]:
    """Return places in a response; never the last, behind which nothing is left to sample."""
    weights = np.maximum(1.0 - np.exp(logprobs[:-1].astype(np.float64)), SMALLEST_WEIGHT)
    count = min(TOKENS, len(weights))
    drawn = rng.choice(len(weights), count, replace=False, p=weights / weights.sum())
    return sorted(drawn.tolist())


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


@dataclass(frozen=True)
class Outcomes:
    """Estimates of one decay at T tokens, and the rewards that followed.

    Where a mean over `n` continuations is compared with the mean reward of the same ones, their
    common noise cancels.
    """

    guesses: Floats
    """[T, n] estimates where the token was taken."""
    returns: Floats
    """[T, n] rewards of these continuations."""
    guesses_before: Floats
    """[T, n] estimates at the same place for whatever tokens the policy takes there."""
    returns_before: Floats
    """[T, n] rewards of these continuations."""

    def take(self, chosen: Any) -> Outcomes:
        """Return the chosen tokens."""
        return Outcomes(*(getattr(self, field.name)[chosen] for field in fields(self)))


def compare(outcomes: Outcomes) -> dict[str, float]:
    """Split the error of estimates into bias, variance and what is no error for a policy gradient.

    The mean of the estimates over all tokens that may be taken in a state is a baseline: it moves
    no gradient. `bias` is what is wrong besides it, `baseline` is what the critic says too little
    or too much of the state. Squares are free of the noise of sampling the truth.
    """
    gaps = outcomes.guesses - outcomes.returns
    base = outcomes.guesses_before - outcomes.returns_before
    count = gaps.shape[1]
    noise = (gaps.var(1, ddof=1) + base.var(1, ddof=1)) / count
    bias = gaps.mean(1) - base.mean(1)
    exact = float(np.mean(bias**2 - noise))
    square = max(exact, 0.0)
    level = outcomes.guesses_before.mean(1)
    level_noise = outcomes.guesses_before.var(1, ddof=1) / count
    variance = float(outcomes.guesses.var(1, ddof=1).mean())
    truth = outcomes.returns.mean(1) - outcomes.returns_before.mean(1)
    centred = outcomes.guesses - level[:, None]
    return {
        "rmse": (square + variance) ** 0.5,
        "bias": square**0.5,
        "bias_square": exact,
        "deviation": variance**0.5,
        "baseline": max(float(np.mean(level**2 - level_noise)), 0.0) ** 0.5,
        "correlation": correlation(centred.ravel(), np.repeat(truth, count)),
    }


def correlation(first: Floats, second: Floats) -> float:
    """Return Pearson's correlation; 0 where one of them is constant."""
    spread = float(first.std() * second.std())
    return (
        float(np.mean((first - first.mean()) * (second - second.mean()))) / spread
        if spread
        else 0.0
    )


def measure(run: Run) -> dict[str, Any]:
    """Return the errors by critic, decay and bucket of one seed."""
    lab = Lab(run)
    before, behind, lengths = choose(lab)
    here = lab.continue_all(before, CONTINUATIONS, 601)
    there = lab.continue_all(behind, CONTINUATIONS, 602)
    columns = torch.tensor(
        [len(s.prompt_tokens) + len(s.prefix) for s in before for _ in range(CONTINUATIONS)]
    )
    buckets = [(lengths >= low) & (lengths < high) for low, high in pairwise(LENGTHS)]
    gain, doubt = there.values() - here.values(), there.noise() + here.noise()
    result: dict[str, Any] = {
        "num_tokens": [int(inside.sum()) for inside in buckets],
        "truth": [
            max(float(np.mean(gain[inside] ** 2 - doubt[inside])), 0.0) ** 0.5 for inside in buckets
        ],
    }
    snapshots = pretrained(lab)
    critics = Critics(lab)
    everything = np.ones(len(lengths), bool)
    for batches in PRETRAINED:
        critics.use(snapshots[batches])
        taken = estimates(critics, there.batch(), columns, decays())
        free = estimates(critics, here.batch(), columns, decays())
        result[str(batches)] = {}
        for name in LABELS:
            shape = (len(before), CONTINUATIONS)
            outcomes = Outcomes(
                taken[name].reshape(shape),
                there.returns(),
                free[name].reshape(shape),
                here.returns(),
            )
            result[str(batches)][name] = [
                compare(outcomes.take(inside)) for inside in (*buckets, everything)
            ]
    critics.close()
    lab.close()
    return result


def value_of(found: Mapping[str, Any], batches: int, name: str, bucket: int, key: str) -> float:
    """Return one figure of one seed; bucket -1 is all lengths."""
    return float(found[str(batches)][name][bucket][key])


def contrast(
    found: Sequence[Mapping[str, Any]], names: tuple[str, str], bucket: int, key: str
) -> Interval:
    """Return the difference of two decays, seed by seed, with the critic that is pretrained."""
    first, second = (
        [value_of(seed, PRETRAINED[-1], name, bucket, key) for seed in found] for name in names
    )
    return interval(a - b for a, b in zip(first, second, strict=True))


def directions(found: Sequence[Mapping[str, Any]]) -> list[Direction]:
    """Return what the paper says of fixed decays, with what was seen."""
    short, *_, long = names_of_buckets()
    last, pair = len(LENGTHS) - 2, (ADAPTIVE, REFERENCE)
    growth = interval(
        value_of(seed, PRETRAINED[-1], REFERENCE, last, "bias_square")
        - value_of(seed, PRETRAINED[-1], REFERENCE, 0, "bias_square")
        for seed in found
    )
    return [
        Direction(
            f"squared bias of {REFERENCE}: {long} tokens - {short} tokens",
            "a fixed decay accumulates bias along long responses",
            growth,
        ),
        Direction(
            f"squared bias, {long} tokens: {ADAPTIVE} - {REFERENCE}",
            "a decay that grows with the length lets the reward through",
            contrast(found, pair, last, "bias_square"),
            sign=-1,
        ),
        Direction(
            "deviation, all lengths: fixed 1.0 - fixed 0.95",
            "a decay near 1 has high variance",
            contrast(found, ("fixed 1.0", REFERENCE), -1, "deviation"),
        ),
        Direction(
            f"deviation, {short} tokens: {ADAPTIVE} - {REFERENCE}",
            "short responses need no decay near 1",
            contrast(found, pair, 0, "deviation"),
            sign=-1,
        ),
        Direction(
            f"RMSE, all lengths: {ADAPTIVE} - {REFERENCE}",
            "AIME 2024 60 with the adaptive decay, 45 with a fixed one (table 1)",
            contrast(found, pair, -1, "rmse"),
            sign=-1,
        ),
        Direction(
            f"correlation with the true advantage, all lengths: {ADAPTIVE} - {REFERENCE}",
            "the same",
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

    keys = ("rmse", "bias", "bias_square", "deviation", "baseline", "correlation")
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
        words: interval(seed["truth"][k] for seed in found) for k, words in enumerate(names[:-1])
    }
    figures["settings"] = SETTINGS

    def draw(figure: Any) -> None:
        shown = ("fixed 0.9", "fixed 0.95", "fixed 1.0", "adaptive 0.1", "adaptive 0.5")
        titles = {"rmse": "RMSE", "bias": "bias", "deviation": "standard deviation"}
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
