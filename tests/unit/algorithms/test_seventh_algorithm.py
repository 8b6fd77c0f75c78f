"""A new algorithm is one file and one line in the table: no other file knows its name."""

import json
from typing import Literal

import pytest
import torch

from planish import store
from planish.algorithms import ALGORITHMS, build_algorithm
from planish.algorithms.advantages import spread
from planish.algorithms.base import LossOutput, Recipe
from planish.algorithms.losses import aggregate, loss_counts
from planish.algorithms.masked import hidden
from planish.base.config import Section, load_preset, merge, resolve_config
from planish.base.errors import ConfigError
from planish.records import layout
from tests.unit.algorithms.batches import make_batch, ragged_mask, whole_step
from tests.unit.stages.train.runs import add_iteration, start_run, tiny_config, train_once

OVERRIDES = ["algorithm.name=leave_one_out", "algorithm.scale=0.5"]


@pytest.fixture(autouse=True)
def _in_the_table(monkeypatch):
    monkeypatch.setitem(
        ALGORITHMS, "leave_one_out", "tests.unit.algorithms.test_seventh_algorithm:RECIPE"
    )


def test_its_constants_are_checked_with_the_rest_of_the_configuration():
    preset = {**load_preset("dapo-tiny"), "algorithm": {}}
    resolved = resolve_config(merge(preset, overrides=OVERRIDES))
    assert resolved["algorithm"] == {"name": "leave_one_out", "scale": 0.5}
    with pytest.raises(ConfigError, match="did you mean `leave_one_out`"):
        resolve_config(merge(preset, overrides=["algorithm.name=leave_one_in"]))
    with pytest.raises(ConfigError, match="did you mean `scale`"):
        resolve_config(merge(preset, overrides=[OVERRIDES[0], "algorithm.scales=1.0"]))


def test_its_loss_is_the_one_by_hand():
    algorithm = build_algorithm({"name": "leave_one_out"})
    batch = make_batch(ragged_mask([1, 2, 1], 2), reward=[1.0, 0.0, 0.0])
    filled = algorithm.advantages(batch)
    # Rewards 1, 0, 0: 1 - 0, 0 - 1/2, 0 - 1/2.
    assert filled.advantages[:, 0].tolist() == pytest.approx([1.0, -0.5, -0.5])
    logprobs = torch.tensor([[-1.0, 9.0], [-2.0, -3.0], [-4.0, 9.0]])
    output = algorithm.loss(logprobs, torch.zeros(3, 2), filled, whole_step(algorithm, filled))
    assert output.loss.item() == pytest.approx((1.0 - 2.5 - 2.0) / 3)


def test_the_train_stage_runs_it(tmp_path):
    root = f"file://{tmp_path}/root"
    tiny = start_run(root, tiny_config("leave_one_out"))
    pin = train_once(tiny, 1, "", add_iteration(tiny, 1), tmp_path)
    assert pin
    report = json.loads(store.read(layout.update(root, 1)))
    losses = [step["loss"] for step in report["minibatches"]]
    assert len(losses) == 4
    assert all(loss != 0 for loss in losses)
    assert report["scalars"]["updates"] == 4


class LeaveOneOutConfig(Section):
    """Constants of the recipe."""

    name: Literal["leave_one_out"] = "leave_one_out"
    """Key in the table of algorithms."""
    scale: float = 1.0
    """Factor of every advantage."""


class LeaveOneOut:
    """Advantage n / (n - 1) * (reward - mean of the group), loss -advantage * log p."""

    needs_values = False
    needs_old_logprobs = True
    needs_reference = False

    def __init__(self, config):
        self.config = config

    def advantages(self, batch):
        rewards, groups = batch.share.every(batch.reward, batch.group_index)
        same = (groups[:, None] == groups[None]).double()
        size = same.sum(1)
        centred = rewards - same @ rewards / size
        per_row = self.config.scale * centred * size / (size - 1).clamp(min=1)
        per_token = spread(batch.share.own(per_row).float(), batch.policy_mask)
        return batch.updated(advantages=per_token)

    def counts(self, batch):
        return loss_counts(batch.policy_mask)

    def loss(self, logprobs, entropy, batch, denominators):
        losses = -batch.advantages * hidden(logprobs, batch.policy_mask)
        return LossOutput(aggregate(losses, batch.policy_mask, "seq-mean-token-sum", denominators))


RECIPE = Recipe(LeaveOneOutConfig, LeaveOneOut)
