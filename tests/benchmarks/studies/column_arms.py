"""Arms on column arithmetic: the steps from GRPO to DAPO, and DAPO with one thing changed."""

from __future__ import annotations

from tests.benchmarks.studies.arms import Arm

TASK = "column_arithmetic"

GRPO = (
    "algorithm.name=grpo",
    "rollout.dynamic_sampling=false",
    "rollout.max_generation_rounds=1",
    "reward.keep_uniform_groups=true",
    "reward.overlong_penalty_factor=0.0",
)
"""The naive baseline: symmetric clip, loss averaged within each response, no shaping."""
FILTERING = "algorithm.overlong_filtering=true"
CLIP_HIGHER = "algorithm.clip_high=0.28"
SOFT_OVERLONG = "reward.overlong_penalty_factor=1.0"
TOKEN_LEVEL = 'algorithm.aggregation="token-mean"'
SAMPLE_LEVEL = 'algorithm.aggregation="seq-mean-token-mean"'
DYNAMIC_SAMPLING = (
    "rollout.dynamic_sampling=true",
    "rollout.max_generation_rounds=4",
    "reward.keep_uniform_groups=false",
)

LADDER = (
    Arm(TASK, "grpo", GRPO),
    Arm(TASK, "ladder-overlong-filtering", (*GRPO, FILTERING)),
    Arm(TASK, "ladder-clip-higher", (*GRPO, FILTERING, CLIP_HIGHER)),
    Arm(TASK, "ladder-soft-overlong", (*GRPO, FILTERING, CLIP_HIGHER, SOFT_OVERLONG)),
    Arm(
        *(TASK, "ladder-token-level"),
        (*GRPO, FILTERING, CLIP_HIGHER, SOFT_OVERLONG, TOKEN_LEVEL),
    ),
    Arm(
        *(TASK, "ladder-dynamic-sampling"),
        (*GRPO, FILTERING, CLIP_HIGHER, SOFT_OVERLONG, TOKEN_LEVEL, *DYNAMIC_SAMPLING),
    ),
)
"""Each arm has one change more than the one before, in the order of DAPO's table 1."""

DAPO = Arm(TASK, "dapo")
"""The full recipe of the preset: soft overlong punishment, no overlong filtering."""
DAPO_SYMMETRIC = Arm(TASK, "dapo-symmetric-clip", ("algorithm.clip_high=0.2",))
DAPO_SAMPLE_LEVEL = Arm(TASK, "dapo-sample-level", (SAMPLE_LEVEL,))
DAPO_NO_OVERLONG = Arm(TASK, "dapo-no-overlong", ("reward.overlong_penalty_factor=0.0",))
DAPO_FILTERING = Arm(TASK, "dapo-filtering", ("reward.overlong_penalty_factor=0.0", FILTERING))
