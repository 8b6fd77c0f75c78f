"""Writes the golden files that tests compute: `make golden`, or `python -m tests.golden.write`.

The diff is part of the review of the change that caused it.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planish.algorithms import build_algorithm
from planish.base.parallel import Grid
from planish.records.rewards import RewardSet
from planish.records.rollouts import FinishReason, RolloutSet
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.progress import Progress
from planish.stages.train.trainer import Trainer
from planish.stages.train.update import run_update
from tests.unit.stages.train.runs import TINY, own_batch, random_rollouts, rewards_for, start_run

LOSSES = Path(__file__).parent / "losses"
COLUMNS = ("loss", "grad_norm", "value_loss", "value_grad_norm")
SCORES = ("accuracy", "outcome", "length_penalty", "reward")
WINDOW_TOKENS = 4
DECAY = {"lambda_alpha": 0.5, "lambda_min": 0.5}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dapo": {"name": "dapo"},
    "grpo": {"name": "grpo"},
    "grpo_penalty": {"name": "grpo", "kl_coefficient": 0.5},
    "vapo": {"name": "vapo", **DECAY},
    "tppo": {
        "name": "tppo",
        "window_tokens": WINDOW_TOKENS,
        "ignored_tail_tokens": 1,
        **DECAY,
    },
}
"""Raw `[algorithm]` tables; decays fit responses of 1 to 19 tokens."""


WIDE = {"num_heads": 4, "num_kv_heads": 2}
"""Sizes of a model whose matrices two ranks can share."""
WIDE_ALGORITHMS = ("dapo", "grpo_penalty", "vapo", "tppo")
EXPERTS = {**WIDE, "num_experts": 4, "expert_intermediate_size": 32}
"""Of one with experts, two of them for each token."""
EXPERT_ALGORITHMS = ("dapo", "vapo", "tppo")


def in_windows(rollouts: RolloutSet, rewards: RewardSet) -> tuple[RolloutSet, RewardSet]:
    """Put every response into its last window; those that fill it exactly go on."""
    lengths = rollouts.response_tokens.lengths
    cut = lengths % WINDOW_TOKENS == 0
    starts = (lengths - 1) // WINDOW_TOKENS * WINDOW_TOKENS
    finish = np.where(cut, FinishReason.WINDOW, rollouts.finish)
    rollouts = replace(
        rollouts, window_start=starts.astype(np.int32), finish=finish.astype(np.int8)
    )
    known = {name: np.where(cut, np.float32(0), getattr(rewards, name)) for name in SCORES}
    return rollouts, replace(rewards, has_reward=~cut, **known)


def ten_steps(
    algorithm: str, tiny: Any, config: TrainConfig, grid: Grid, state_pin: str = ""
) -> tuple[Trainer, list[list[float]]]:
    """Train ten steps from fixed weights and rollouts, or from those of a state.

    Returns:
        The trainer, and of each step its number, `loss` and `grad_norm`, and with a critic
        `value_loss` and `value_grad_norm`.
    """
    critic = CriticConfig(learning_rate=1e-3, warmup_iterations=0, pretrain_iterations=0)
    built = build_algorithm(ALGORITHMS[algorithm])
    trainer = Trainer(
        config,
        tiny.policy_pin,
        temperature=1.0,
        seed=7,
        grid=grid,
        device=torch.device("cpu"),
        critic=critic if built.needs_values else None,
    )
    if state_pin:
        trainer.load(state_pin)
    rollouts = random_rollouts(tiny.policy, 11, num_groups=20)
    rewards = rewards_for(rollouts, 12)
    if "window_tokens" in ALGORITHMS[algorithm]:
        rollouts, rewards = in_windows(rollouts, rewards)
    batch = own_batch(rollouts, rewards, config, grid)
    # Tokens of earlier windows were worth 0.25 when they were sampled.
    earlier = torch.where(batch.value_mask & ~batch.policy_mask, 0.25, torch.nan)
    result = run_update(
        trainer,
        built,
        batch,
        config=config,
        progress=Progress(),
        seed=(7, 1),
        critic=critic,
        earlier_values=earlier if built.needs_values else None,
        reference_pin=tiny.policy_pin,
    )
    names = [n for n in COLUMNS if n in result.minibatches[0]]
    return trainer, [
        [step, *(metrics[name] for name in names)]
        for step, metrics in enumerate(result.minibatches, start=1)
    ]


def golden_losses(algorithm: str, root: str, **model: int) -> str:
    """Return the lines of a golden file: the numbers of ten steps in one process."""
    trainer, steps = ten_steps(algorithm, start_run(root, **model), TrainConfig(**TINY), Grid())
    trainer.close()
    return "".join(" ".join(map(repr, step)) + "\n" for step in steps)


def main() -> None:
    LOSSES.mkdir(exist_ok=True)
    for algorithm in ALGORITHMS:
        with tempfile.TemporaryDirectory() as folder:
            text = golden_losses(algorithm, f"file://{folder}/root")
        (LOSSES / f"{algorithm}.txt").write_text(text)
    for kind, sizes, algorithms in (
        ("wide", WIDE, WIDE_ALGORITHMS),
        ("experts", EXPERTS, EXPERT_ALGORITHMS),
    ):
        for algorithm in algorithms:
            with tempfile.TemporaryDirectory() as folder:
                text = golden_losses(algorithm, f"file://{folder}/root", **sizes)
            (LOSSES / f"{kind}_{algorithm}.txt").write_text(text)


if __name__ == "__main__":
    main()
