"""VAPO with each of its seven changes to PPO left out in turn, on column arithmetic."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.studies.arms import Arm
from tests.benchmarks.studies.column_arms import TASK
from tests.benchmarks.studies.group_relative import ACCURACY, UPDATES, accuracy, facts
from tests.benchmarks.studies.pictures import curves, dots
from tests.benchmarks.studies.reading import Run, Runs, differences, over_seeds
from tests.benchmarks.studies.writing import Direction, Findings, Study

VAPO = (
    "algorithm.name=vapo",
    "algorithm.lambda_alpha=1.0",
    "algorithm.lambda_min=0.5",
    "critic.learning_rate=3e-3",
    "critic.warmup_iterations=0",
    "critic.pretrain_iterations=2",
    "critic.pretrain_passes=4",
    "rollout.dynamic_sampling=false",
    "rollout.max_generation_rounds=1",
    "reward.keep_uniform_groups=true",
    "reward.reward_wrong=0.0",
    "reward.overlong_buffer_tokens=0",
    "reward.overlong_penalty_factor=0.0",
)
"""The settings of the preset vapo-tiny."""

FULL = "VAPO"
WITHOUT: dict[str, tuple[int, tuple[str, ...]]] = {
    "value pretraining": (11, ("critic.pretrain_iterations=0",)),
    "decoupled GAE": (33, ("algorithm.decoupled_gae=false",)),
    "length-adaptive GAE": (45, ("algorithm.lambda_alpha=0.0",)),
    "clip-higher": (46, ("algorithm.clip_high=0.2",)),
    "token-level loss": (53, ('algorithm.aggregation="seq-mean-token-mean"',)),
    "positive-example loss": (54, ("algorithm.positive_coefficient=0.0",)),
    "group sampling": (
        55,
        ("rollout.group_size=1", "rollout.prompts_per_iteration=1024"),
    ),
}
"""Change to the AIME score without it (VAPO, table 1) and to what switches it off here."""
AIME = 60
"""AIME 2024 avg@32 of the whole recipe."""


def _label(change: str) -> str:
    return f"without {change}"


ARMS = {
    FULL: Arm(TASK, "vapo", VAPO),
    **{
        _label(change): Arm(TASK, f"vapo-without-{change.replace(' ', '-').lower()}", VAPO + off)
        for change, (_, off) in WITHOUT.items()
    },
}


def read_ablation(runs: Runs) -> Findings:
    """Compare the whole recipe with each that lacks one change."""
    directions = [
        Direction(
            f"VAPO - without {change} in avg@8",
            f"AIME 2024 {score} -> {AIME}",
            differences(runs[FULL], runs[_label(change)], accuracy),
        )
        for change, (score, _) in WITHOUT.items()
    ]
    published = [AIME, *(score for score, _ in WITHOUT.values())]
    figures = facts(runs)
    for label, row in runs.items():
        figures[label]["explained_variance_at_first_policy_update"] = over_seeds(
            row, lambda run: run.trained("train", "explained_variance")[0]
        )

    def draw(figure: Any) -> None:
        left, middle, right = figure.subplots(1, 3, width_ratios=(3, 2, 3))
        dots(left, {k: over_seeds(v, accuracy) for k, v in runs.items()}, label=ACCURACY)
        middle.barh(range(len(published)), published, color="#bbbbbb")
        middle.set_yticks([])
        middle.set_ylim(len(published) - 0.5, -0.5)
        for row, score in enumerate(published):
            middle.text(score + 1, row, str(score), va="center", fontsize=9)
        middle.set_xlim(0, 70)
        middle.set_xlabel("AIME 2024 avg@32, 32B (published)")
        curves(
            *(right, runs, Run.updates, lambda run: run.scores("accuracy")),
            labels=(f"{UPDATES} that train the policy", ACCURACY),
            seeds=False,
        )
        right.legend(fontsize=7)

    return Findings(figures, directions, draw, size=(13.0, 4.0))


STUDIES = (
    Study(
        "vapo-minus-one",
        "VAPO without each of its seven changes",
        "VAPO, arXiv 2504.05118, table 1",
        read_ablation,
        ARMS,
    ),
)
