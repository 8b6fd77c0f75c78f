"""Training on packed rows against training on padded ones, by both trainers on two ranks."""

import numpy as np
import pytest
import torch

from planish.algorithms import build_algorithm
from planish.base.parallel import Ranks
from planish.stages.train.batching import train_batch
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.trainer import Trainer
from tests.golden.write import WIDE, ten_steps
from tests.integration.ckpt_forks import run_ranks
from tests.integration.test_megatron_training import CPU, Run, preload
from tests.unit.stages.train.runs import TINY, random_rollouts, rewards_for, start_run
from tests.unit.stages.train.test_trainer import policy_step, value_step

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
LAYOUTS = {
    "fsdp2": {"trainer": "fsdp2", "activation_checkpointing": True},
    "megatron-tp2": {
        "trainer": "megatron",
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "activation_checkpointing": True,
    },
    "megatron-dp2": {"trainer": "megatron"},
}


def steps(rank, size, folder, *, pin, settings):
    """Ten steps on padded and on packed rows, then steps on one row, which one rank has alone."""
    preload()
    run = Run(pin)
    rollouts = random_rollouts(run.policy, 5)
    batch = train_batch(rollouts, rewards_for(rollouts, 6))
    found = {}
    for packing in (False, True):
        config = TrainConfig(**TINY, **settings, packing=packing)
        grid = config.grid(Ranks(rank, size))
        numbers = []
        for algorithm in ("dapo", "tppo"):
            trainer, rows = ten_steps(algorithm, run, config, grid)
            assert trainer.policy.sharding.packs is packing
            trainer.close()
            numbers += [x for row in rows for x in row]
        trainer = Trainer(
            config, pin, temperature=1.0, seed=3, grid=grid, device=CPU, critic=CriticConfig()
        )
        alone = build_algorithm({"name": "vapo"}).advantages(batch).take(torch.tensor([3]))
        for step in (policy_step, value_step):
            metrics = step(trainer, alone)
            numbers += [metrics["loss"], metrics["grad_norm"]]
        numbers.append(float(trainer.values(alone).sum() + trainer.logprobs(alone)[0].sum()))
        trainer.close()
        found[str(packing)] = numbers
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_have_the_losses_and_gradients_of_padded_ones(tmp_path, layout):
    pin = start_run(f"file://{tmp_path}/root", **WIDE).policy_pin
    for found in run_ranks(f"{__name__}:steps", 2, tmp_path, pin=pin, settings=LAYOUTS[layout]):
        padded, packed = np.array(found["False"]), np.array(found["True"])
        print(f"{layout}: largest difference {np.abs(padded - packed).max():.1e}")
        np.testing.assert_allclose(packed, padded, atol=TOLERANCE, rtol=TOLERANCE)
