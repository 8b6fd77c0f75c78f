"""Two gloo ranks against one: what a step measures, and what stays in float32."""

import pytest
import torch

from planish.algorithms.base import Denominators
from planish.algorithms.dapo import Dapo, DapoConfig
from planish.base.parallel import Grid, Ranks
from planish.stages.train.batching import split_by_gradient
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.trainer import Trainer
from tests.integration.ckpt_forks import run_ranks
from tests.unit.algorithms.batches import make_batch, ragged_mask
from tests.unit.stages.train.runs import TINY, start_run

CPU = torch.device("cpu")
ALGORITHM = Dapo(DapoConfig())
VALUE = 1.0009765625
"""bfloat16 rounds it to 1."""


def preload():
    """Import what loads a policy, which takes long, before ranks are forked."""
    from transformers import Qwen3ForCausalLM  # noqa: F401


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

    def loss_fn(logprobs, entropy, micro):
        return ALGORITHM.loss(logprobs, entropy, micro, Denominators(counts, counts, 1))

    moving, still = split_by_gradient(batch)
    assert len(moving) == len(still) == 10
    return trainer.step(moving, loss_fn, learning_rate=5e-4, still=still)


@pytest.mark.slow
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
        assert metrics == pytest.approx(alone, abs=1e-6, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_the_value_head_stays_in_float32_on_any_number_of_ranks(tmp_path, size):
    pin = start_run(f"file://{tmp_path}/root").policy_pin
    found = run_ranks(f"{__name__}:constant_values", size, tmp_path / "ranks", pin=pin)
    assert found == [[VALUE]] * size
