"""I-T6 on a real model: windows that hold every response train exactly what VAPO trains."""

import torch

from planish.algorithms import build_algorithm
from planish.base.parallel import Grid
from planish.stages.train.batching import train_batch
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.progress import Progress
from planish.stages.train.trainer import Trainer
from planish.stages.train.update import run_update
from tests.unit.stages.train.runs import TINY, random_rollouts, rewards_for, start_run

DECAY = {"lambda_alpha": 0.5, "lambda_min": 0.5}
# As wide as never to bite: `None` cannot be said in a configuration file.
WIDE = dict.fromkeys(("dual_clip", "advantage_clip", "value_clip_low", "value_clip_high"), 1e9)
SAME_LOSSES = {**DECAY, "aggregation": "token-mean", "value_aggregation": "token-mean", **WIDE}
VAPO = {"name": "vapo", **DECAY}
TPPO = {"name": "tppo", "window_tokens": 19, "ignored_tail_tokens": 3, **SAME_LOSSES}


def trained(table, root):
    """Update four times from fixed weights; every weight and moment, and every metric."""
    tiny = start_run(root)
    config, critic = TrainConfig(**TINY), CriticConfig(learning_rate=1e-3, pretrain_iterations=0)
    trainer = Trainer(
        config, tiny.policy_pin, temperature=1.0, seed=7, grid=Grid(),
        device=torch.device("cpu"), critic=critic,
    )  # fmt: skip
    rollouts = random_rollouts(tiny.policy, 11, num_groups=8)
    result = run_update(
        trainer, build_algorithm(table), train_batch(rollouts, rewards_for(rollouts, 12)),
        config=config, progress=Progress(), seed=(7, 1), critic=critic,
    )  # fmt: skip
    state = {
        f"{part}.{name}": tensor.detach().clone()
        for part, tensors in trainer.state().parts.items()
        for name, tensor in tensors.items()
    }
    trainer.close()
    return state, result


def test_a_window_longer_than_every_response_leaves_the_weights_of_vapo(tmp_path):
    wanted, by_vapo = trained(VAPO, f"file://{tmp_path}/vapo")
    seen, by_tppo = trained(TPPO, f"file://{tmp_path}/tppo")
    assert set(seen) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(seen[name], tensor), name
    assert by_tppo.scalars["num_ignored_tokens"] == 0.0
    for name in ("loss", "value_loss", "lambda_mean", "advantage_mean", "nll_loss"):
        assert by_tppo.scalars[name] == by_vapo.scalars[name], name
    assert by_tppo.progress == by_vapo.progress
