"""Two gloo ranks against one: what a step measures, float32 kept, packed rows as padded ones."""

import numpy as np
import pytest
import torch

from planish.algorithms import build_algorithm
from planish.algorithms.base import Denominators
from planish.algorithms.dapo import Dapo, DapoConfig
from planish.base.parallel import Grid, Ranks, Share, data_mesh, neighbours
from planish.stages.train.batching import Movement, train_batch
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.trainer import STILL_ROWS, Trainer
from tests.golden.write import WIDE, ten_steps
from tests.integration.ckpt_forks import run_ranks
from tests.integration.test_megatron_training import CPU, Run, preload
from tests.rounding import STEPS
from tests.unit.algorithms.batches import make_batch, ragged_mask
from tests.unit.stages.train.runs import TINY, random_rollouts, rewards_for, start_run
from tests.unit.stages.train.test_trainer import policy_step, value_step

pytestmark = pytest.mark.slow
ALGORITHM = Dapo(DapoConfig())
VALUE = 1.0009765625
"""bfloat16 rounds it to 1."""
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


def constant_values(rank, size, folder, *, pin):
    """Return the values of a critic whose head is nothing but a bias."""
    trainer = Trainer(
        TrainConfig(**TINY, compute_dtype="bfloat16"), pin, temperature=1.0, seed=3,
        grid=Grid(Ranks(rank, size)), device=CPU, critic=CriticConfig(head_std=0.0),
    )  # fmt: skip
    with torch.no_grad():
        trainer.critic.parameters["head.bias"].fill_(VALUE)
    mask = ragged_mask([4, 6, 5], 6) & (torch.arange(6) > 1)
    return sorted(set(trainer.values(make_batch(mask))[mask].tolist()))


def half_of_a_step(rank, size, folder, *, pin):
    """Return the metrics of a step with ten rows that have an advantage and ten that have none."""
    trainer = Trainer(
        TrainConfig(**TINY), pin, temperature=1.0, seed=3, grid=Grid(Ranks(rank, size)), device=CPU
    )
    mask = ragged_mask([4 + row % 5 for row in range(20)], 9) & (torch.arange(9) > 1)
    old = torch.linspace(-2.0, -6.0, 20)[:, None].expand(20, 9)
    advantages = (torch.arange(20) % 2 * mask.T).T * torch.linspace(-1.0, 1.0, 20)[:, None]
    batch = make_batch(mask, old=old, advantages=advantages)
    counts = ALGORITHM.counts(batch)
    share = Share(20, torch.arange(rank, 20, size), trainer.grid)

    def loss_fn(logprobs, entropy, micro):
        return ALGORITHM.loss(logprobs, entropy, micro, Denominators(counts, counts, 1))

    own = batch.take(share.rows).updated(share=share)
    moving, still = Movement(own).split(np.arange(20), STILL_ROWS)
    assert share.sum(torch.tensor(len(moving))) == still.num_rows == 10
    return trainer.step(moving, loss_fn, learning_rate=5e-4, still=still)


def test_two_ranks_measure_rows_without_an_advantage_as_one_does(tmp_path):
    pin = start_run(f"file://{tmp_path}/root").policy_pin
    found = []
    for size in (1, 2):
        folder = tmp_path / f"ranks-{size}"
        found += run_ranks(f"{__name__}:half_of_a_step", size, folder, pin=pin)
    alone = found[0]
    assert alone["clipfrac_high"] > 0
    assert abs(alone["approx_kl"]) > 0.01
    for metrics in found[1:]:
        assert metrics == pytest.approx(alone, abs=STEPS, rel=STEPS)


@pytest.mark.parametrize("size", [1, 2])
def test_the_value_head_stays_in_float32_on_any_number_of_ranks(tmp_path, size):
    pin = start_run(f"file://{tmp_path}/root").policy_pin
    found = run_ranks(f"{__name__}:constant_values", size, tmp_path / "ranks", pin=pin)
    assert found == [[VALUE]] * size


def limits(rank, size, folder):
    """Return after how many seconds ranks of each group give each other up."""
    mesh = data_mesh(Grid(Ranks(rank, size)), CPU, 2, 77.0)
    groups = (neighbours(2, 77.0), *mesh.get_all_groups())
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def test_groups_of_a_grid_wait_as_long_as_the_run_says(tmp_path):
    assert run_ranks(f"{__name__}:limits", 4, tmp_path) == [[77.0] * 3] * 4


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
        alone = (
            build_algorithm({"name": "vapo"})
            .advantages(batch)
            .take(torch.tensor([3])[grid.dp_rank :])
        )
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
