"""E5: how far a critic is from the truth, along the response, with and without pretraining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.benchmarks.studies.pictures import COLOURS
from tests.benchmarks.studies.reading import Interval, Run, Runs, interval
from tests.benchmarks.studies.value_critics import COUNTS, Critics, Weights, pretrained
from tests.benchmarks.studies.value_lab import START, Floats, Futures, Lab, State, remembered
from tests.benchmarks.studies.writing import Direction, Findings, Study

PRETRAINED = COUNTS[1:]
"""Rollout batches of value pretraining after which the critic is examined."""
REWARD_MODEL_BATCHES = 8
JOINT = 4
"""Iterations that train policy and critic together."""
FIRST_JOINT = 101
"""Number of the first of them: other prompts than those of pretraining."""
PLACES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Shares of the response before a state; 1 is the state before the last token."""
PROMPTS = 64
PROMPTS_MOVED = 32
"""Prompts with which critics of a moved policy are examined."""
CONTINUATIONS = 64

SETTINGS = {
    "pretrained": PRETRAINED,
    "reward_model_batches": REWARD_MODEL_BATCHES,
    "joint_iterations": JOINT,
    "places": PLACES,
    "prompts": PROMPTS,
    "prompts_moved": PROMPTS_MOVED,
    "continuations": CONTINUATIONS,
}

FROM_POLICY = "new head on the policy"
FROM_REWARD_MODEL = "reward model"
JOINT_COLD = f"{JOINT} joint iterations, no pretraining"
JOINT_WARM = f"{JOINT} joint iterations after {PRETRAINED[-1]} batches"


def after(batches: int) -> str:
    """Return the label of a critic after pretraining."""
    return f"{batches} batches" if batches > 1 else "1 batch"


def examine(lab: Lab, count: int) -> tuple[list[State], Futures]:
    """Return states along responses to held-out prompts, and what became of each."""
    rng = np.random.default_rng([lab.seed, 77])
    rows = rng.choice(lab.held_out.num_rows, count, replace=False).tolist()
    found = lab.respond(lab.held_out.take(rows), 1, 500)

    def cuts(_: int, length: int) -> list[int]:
        return [round(place * (length - 1)) for place in PLACES]

    states = lab.states_of(found, rows, cuts)
    return states, lab.continue_all(states, CONTINUATIONS, 501)


def errors(critics: Critics, states: Sequence[State], futures: Futures) -> dict[str, Any]:
    """Compare a critic with the truth at each place."""
    # One continuation of each state is enough to hold it: values look back only.
    first = np.arange(0, futures.rollouts.num_rows, CONTINUATIONS)
    batch = futures.batch()
    rows = batch.take(batch.input_ids.new_tensor(first))
    values = critics.values(rows)
    columns = [len(state.prompt_tokens) + len(state.prefix) for state in states]
    seen = values[range(len(states)), columns].double().numpy()
    places = np.arange(len(states)) % len(PLACES)
    return value_errors(seen, futures.values(), futures.noise(), places, len(PLACES))


def value_errors(
    seen: Floats, truth: Floats, noise: Floats, places: npt.NDArray[np.int64], num_places: int
) -> dict[str, Any]:
    """Compare values with sampled ones, at each place and over all of them.

    Args:
        seen: [S] values of the critic.
        truth: [S] sampled values.
        noise: [S] variances of the sampled values; taken out of the squared errors.
        places: [S] in 0 .. num_places - 1.
        num_places: number of places.
    """
    gap = seen - truth
    square = gap**2 - noise
    inside = [places == place for place in range(num_places)]
    signal = float(truth.var() - noise.mean())
    return {
        "bias": [float(gap[here].mean()) for here in inside],
        "rmse": [max(float(square[here].mean()), 0.0) ** 0.5 for here in inside],
        "value": [float(seen[here].mean()) for here in inside],
        "truth": [float(truth[here].mean()) for here in inside],
        "bias_all": float(gap.mean()),
        "rmse_all": max(float(square.mean()), 0.0) ** 0.5,
        "explained": 1 - float(gap.var() - noise.mean()) / signal if signal > 0 else 0.0,
    }


def joint(lab: Lab, start: Weights) -> dict[str, Any]:
    """Train policy and critic together from a critic's weights, then examine both."""
    critics = Critics(lab)
    critics.use(start)
    model = critics.trainer.policy
    for number in range(FIRST_JOINT, FIRST_JOINT + JOINT):
        critics.train(lab.rollout_batch(number), number)
        lab.follow(model.weights(), number)
    states, futures = examine(lab, PROMPTS_MOVED)
    found = errors(critics, states, futures)
    begin = np.arange(len(states)) % len(PLACES) == 0
    found["accuracy"] = float(futures.values()[begin].mean())
    critics.close()
    return found


def measure(run: Run) -> dict[str, Any]:
    """Return the errors of every critic of one seed."""
    lab = Lab(run)
    states, futures = examine(lab, PROMPTS)
    snapshots = pretrained(lab)
    critics = Critics(lab)
    result: dict[str, Any] = {}
    for batches, weights in snapshots.items():
        critics.use(weights)
        label = after(batches) if batches else FROM_POLICY
        result[label] = errors(critics, states, futures)
    critics.use(snapshots[0])
    for number in range(1, REWARD_MODEL_BATCHES + 1):
        critics.train_as_reward_model(lab.rollout_batch(number), number)
    result[FROM_REWARD_MODEL] = errors(critics, states, futures)
    critics.close()
    lab.close()
    for label, start in ((JOINT_COLD, snapshots[0]), (JOINT_WARM, snapshots[PRETRAINED[-1]])):
        # A lab of its own: the engine follows the policy as it moves.
        lab = Lab(run)
        result[label] = joint(lab, start)
        lab.close()
    return result


def over(found: Sequence[Mapping[str, Any]], label: str, key: str, place: int | None) -> Interval:
    """Return mean and interval over seeds of one figure."""
    rows = (seed[label][key] for seed in found)
    return interval(row if place is None else row[place] for row in rows)


def contrast(found: Sequence[Mapping[str, Any]], label: str, other: str, key: str) -> Interval:
    """Return the difference of two critics, seed by seed, of absolute values."""
    return interval(abs(seed[label][key]) - abs(seed[other][key]) for seed in found)


def directions(found: Sequence[Mapping[str, Any]]) -> list[Direction]:
    """Return what the papers say of the bias, with what was seen."""
    last = after(PRETRAINED[-1])
    slope = interval(
        seed[FROM_REWARD_MODEL]["bias"][0] - seed[FROM_REWARD_MODEL]["bias"][-1] for seed in found
    )
    return [
        Direction(
            "reward model as critic: error at the first token - at the last",
            "a reward model scores early tokens too low (VC-PPO, section 3.1)",
            slope,
            sign=-1,
        ),
        Direction(
            f"|bias| after {last} of pretraining - |bias| of a new head on the policy",
            "pretraining removes the bias of value initialisation (VC-PPO, section 3.1)",
            contrast(found, last, FROM_POLICY, "bias_all"),
            sign=-1,
        ),
        Direction(
            f"|bias| after {last} of pretraining - |bias| of a reward model as critic",
            "pretraining removes the bias of value initialisation (VC-PPO, section 3.1)",
            contrast(found, last, FROM_REWARD_MODEL, "bias_all"),
            sign=-1,
        ),
        Direction(
            f"RMSE after {JOINT} joint iterations: with pretraining - without",
            "without it the critic stays behind (VAPO, table 1: AIME 2024 60 with, 11 without)",
            contrast(found, JOINT_WARM, JOINT_COLD, "rmse_all"),
            sign=-1,
        ),
    ]


def read(runs: Runs) -> Findings:
    """Measure the seeds that are not measured yet, and put them together."""
    found = [remembered("bias", run, SETTINGS, measure) for run in runs["start"]]
    figures: dict[str, Any] = {
        label: {
            "bias_by_place": [over(found, label, "bias", p) for p in range(len(PLACES))],
            "rmse_by_place": [over(found, label, "rmse", p) for p in range(len(PLACES))],
            "bias": over(found, label, "bias_all", None),
            "rmse": over(found, label, "rmse_all", None),
            "explained_variance_of_truth": over(found, label, "explained", None),
        }
        for label in found[0]
    }
    for label in (JOINT_COLD, JOINT_WARM):
        figures[label]["accuracy_of_the_moved_policy"] = over(found, label, "accuracy", None)
    figures["truth_by_place"] = [over(found, FROM_POLICY, "truth", p) for p in range(len(PLACES))]
    figures["settings"] = SETTINGS

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        shown = [
            FROM_POLICY,
            FROM_REWARD_MODEL,
            after(1),
            after(4),
            after(16),
            JOINT_COLD,
            JOINT_WARM,
        ]
        for colour, label in zip(COLOURS, shown, strict=False):
            rows = figures[label]["bias_by_place"]
            left.plot(PLACES, [r.mean for r in rows], "o-", color=colour, label=label, markersize=3)
            left.fill_between(
                PLACES, [r.low for r in rows], [r.high for r in rows], color=colour, alpha=0.08
            )
        left.axhline(0, color="grey", linewidth=0.8)
        left.set_xlabel("share of the response before the state")
        left.set_ylabel("bias: value - chance to be right")
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)
        left.grid(alpha=0.3)
        steps = (0, *PRETRAINED)
        rows = [figures[after(n) if n else FROM_POLICY]["rmse"] for n in steps]
        right.plot(range(len(steps)), [r.mean for r in rows], "o-", color=COLOURS[0])
        right.fill_between(
            range(len(steps)),
            [r.low for r in rows],
            [r.high for r in rows],
            color=COLOURS[0],
            alpha=0.15,
        )
        right.set_xticks(range(len(steps)), [str(n) for n in steps])
        right.set_xlabel("rollout batches of value pretraining")
        right.set_ylabel("RMSE of the critic")
        right.set_ylim(bottom=0)
        right.grid(alpha=0.3)

    return Findings(figures, directions(found), draw, size=(10.0, 4.4))


STUDIES = (
    Study(
        "value-bias",
        "E5: error of the critic against sampled truth, with and without value pretraining",
        "VC-PPO, arXiv 2503.01491, section 3.1; VAPO, arXiv 2504.05118, section 4.1",
        read,
        {"start": START},
    ),
)
