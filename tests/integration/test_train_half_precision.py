"""Half-precision compute on two gloo ranks: what stays in float32."""

from __future__ import annotations

import pytest
import torch

from planish.parallel import Ranks
from planish.train.config import CriticConfig, TrainConfig
from planish.train.trainer import open_trainer
from tests.integration import ckpt_ranks
from tests.unit.algorithms.batches import make_batch, ragged_mask
from tests.unit.train.runs import TINY, start_run

VALUE = 1.0009765625
"""bfloat16 rounds it to 1."""


def constant_values(rank, size, folder, *, pin):
    """Return the values of a critic whose head is nothing but a bias."""
    trainer = open_trainer(
        TrainConfig(**TINY, compute_dtype="bfloat16"), pin, temperature=1.0, seed=3,
        ranks=Ranks(rank, size), device=torch.device("cpu"), critic=CriticConfig(head_std=0.0),
    )  # fmt: skip
    with torch.no_grad():
        trainer.critic.parameters["head.bias"].fill_(VALUE)
    mask = ragged_mask([4, 6, 5], 6) & (torch.arange(6) > 1)
    return sorted(set(trainer.values(make_batch(mask))[mask].tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_the_value_head_stays_in_float32_on_any_number_of_ranks(tmp_path, size):
    pin = start_run(f"file://{tmp_path}/root").policy_pin
    scenario = f"{__name__}:constant_values"
    with ckpt_ranks.Ranks(scenario, size, tmp_path / "ranks", pin=pin) as ranks:
        outcomes = ranks.wait()
    assert [outcome.error for outcome in outcomes] == [""] * size
    assert [outcome.value for outcome in outcomes] == [[VALUE]] * size
