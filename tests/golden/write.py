"""Writes the golden files that tests compute: `make golden`, or `python -m tests.golden.write`.

The diff is part of the review of the change that caused it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from planish.algorithms import build_algorithm
from planish.parallel import SINGLE
from planish.train.batching import train_batch
from planish.train.config import TrainConfig
from planish.train.progress import Progress
from planish.train.trainer import open_trainer
from planish.train.update import run_update
from tests.unit.train.runs import TINY, random_rollouts, rewards_for, start_run

LOSSES = Path(__file__).parent / "losses"
ALGORITHMS = ("dapo", "grpo")


def golden_losses(algorithm: str, root: str) -> str:
    """Train ten steps from fixed weights and rollouts: lines of `step loss grad_norm`."""
    tiny = start_run(root)
    config = TrainConfig(**TINY)
    trainer = open_trainer(
        config,
        tiny.policy_pin,
        temperature=1.0,
        seed=7,
        ranks=SINGLE,
        device=torch.device("cpu"),
    )
    rollouts = random_rollouts(tiny.policy, 11, num_groups=20)
    result = run_update(
        trainer,
        build_algorithm({"name": algorithm}),
        train_batch(rollouts, rewards_for(rollouts, 12)),
        config=config,
        progress=Progress(),
        seed=(7, 1),
    )
    trainer.close()
    return "".join(
        f"{step} {m['loss']!r} {m['grad_norm']!r}\n"
        for step, m in enumerate(result.minibatches, start=1)
    )


def main() -> None:
    LOSSES.mkdir(exist_ok=True)
    for algorithm in ALGORITHMS:
        with tempfile.TemporaryDirectory() as folder:
            text = golden_losses(algorithm, f"file://{folder}/root")
        (LOSSES / f"{algorithm}.txt").write_text(text)


if __name__ == "__main__":
    main()
