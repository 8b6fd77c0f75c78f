"""Rows of a batch on several ranks: what is made of all of them is what one process makes."""

import numpy as np
import pytest
import torch

from planish.algorithms import build_algorithm
from planish.algorithms.mismatch import mismatch_metrics
from planish.base.parallel import Grid, Ranks
from planish.models.config import ModelConfig
from planish.models.policy import build_policy
from planish.records.rollouts import FinishReason
from planish.records.values import ValueSet
from planish.records.waiting import WaitingSet
from planish.stages.train.batching import Movement, split_minibatches
from planish.stages.train.config import TrainConfig
from planish.stages.train.metrics import batch_metrics, group_metrics, mask_metrics, value_metrics
from planish.stages.train.selection import select_groups
from planish.stages.train.wait import plan_steps
from planish.stages.train.window_values import earlier_values, row_keys, values_to_store
from tests.golden.write import ALGORITHMS, in_windows
from tests.integration.ckpt_forks import run_ranks
from tests.rounding import VALUES
from tests.unit.records.samples import rows_of
from tests.unit.stages.train.runs import TINY, own_batch, random_rollouts, rewards_for

pytestmark = pytest.mark.slow
CONFIG = TrainConfig(**TINY, selection="mixed_first", max_groups=2)
KINDS = ("dapo", "vapo", "tppo")


def numbers_of(batch):
    """Numbers that tell a token of a row, whoever has it."""
    ids = batch.input_ids.float()
    return torch.sin(ids + ids.cumsum(1)) * batch.value_mask


def found_by(rank, size, folder, *, groups, keep):
    """Return what a rank makes of its rows."""
    policy = build_policy(ModelConfig(num_layers=1, hidden_size=16, head_dim=8), seed=0)
    found = {}
    for kind in KINDS:
        algorithm = build_algorithm(ALGORITHMS[kind])
        rollouts = random_rollouts(policy, 5, num_groups=groups)
        rewards = rewards_for(rollouts, 6, keep=np.arange(rollouts.num_rows) % keep == 0)
        if kind == "tppo":
            rollouts, rewards = in_windows(rollouts, rewards)
        batch = own_batch(rollouts, rewards, CONFIG, Grid(Ranks(rank, size)))
        share, numbers = batch.share, numbers_of(batch)
        batch = batch.updated(old_logprobs=batch.rollout_logprobs + 0.1 * numbers, values=numbers)
        selection = select_groups(batch, CONFIG)
        scalars = batch_metrics(batch) | selection.metrics(batch)
        mask = batch.policy_mask
        scalars |= mismatch_metrics(batch.old_logprobs, batch.rollout_logprobs, mask, share)
        if algorithm.needs_values:
            scalars |= algorithm.describe(batch)
        made = selection.apply(algorithm.advantages(batch))
        has_values = algorithm.needs_values
        scalars |= group_metrics(made, selection.chosen, has_values=has_values)
        scalars |= mask_metrics(made, has_values=has_values) | value_metrics(made)
        tokens = share.join(made.advantages, batch.attention_mask)[0]
        count = int(rewards.keep.sum())
        parts = split_minibatches(count, 8, 1, seed=(7, 1))
        moving, still = Movement(made).split(parts[0], 3)
        kept = still and (numbers_of(still.batch).sum(), *still[1:])
        kept = kept and (share.sum(kept[0]), *kept[1:])
        moved = share.sum(torch.tensor(len(moving)))
        options = {"min_finished": 100, "num_passes": 1, "seed": (7, 1)}
        left = plan_steps(made, parts, WaitingSet.empty(), **options).waiting
        again = plan_steps(made, parts, left, **options)
        keys = row_keys(rollouts, list(range(groups)))
        cut = rollouts.finish == FinishReason.WINDOW
        stored = values_to_store(batch, numbers, keys, cut, rewards, ValueSet.from_rows({}))
        back = earlier_values(batch, keys, rewards, stored).nan_to_num()
        found[kind] = {
            "own": len(batch),
            "scalars": scalars,
            "tokens": tokens.tolist(),
            "still": [int(moved), *map(float, kept or ())],
            "waiting": [
                [list(map(float, row)) for row in rows_of(getattr(again.waiting, name))]
                for name in ("prompt_tokens", "response_tokens", "values")
            ],
            "stored": {str(k): v.tolist() for k, v in stored.to_rows().items()},
            "back": share.join(back, batch.value_mask)[0].tolist(),
        }
    return found


@pytest.mark.parametrize(
    ("size", "groups", "keep"),
    [(2, 4, 1), (3, 4, 1), (3, 2, 3), (4, 1, 2), (3, 3, 1000), (2, 2, 5)],
    ids=["even", "uneven", "few", "no row on some", "one row", "two"],
)
def test_all_that_is_made_of_all_rows_is_that_of_one_process(tmp_path, size, groups, keep):
    settings = {"groups": groups, "keep": keep}
    alone = found_by(0, 1, tmp_path, **settings)
    ranks = run_ranks(f"{__name__}:found_by", size, tmp_path, **settings)
    for kind in KINDS:
        wanted = alone[kind]
        assert sum(found[kind].pop("own") for found in ranks) == wanted.pop("own")
        for found in ranks:
            for name, right in wanted.items():
                if name in ("scalars", "tokens", "still"):
                    assert found[kind][name] == pytest.approx(right, abs=VALUES, rel=VALUES)
                else:
                    assert found[kind][name] == right
