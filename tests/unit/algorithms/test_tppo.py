"""T-PPO: constants, numbers by hand, the invariants of its windows, edge cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.algorithms import build_algorithm
from planish.algorithms.masked import without_last
from planish.algorithms.tppo import Tppo, TppoConfig, expected_lengths, trained_tokens
from planish.algorithms.vapo import Vapo, VapoConfig
from planish.base.config import parse_section
from planish.base.errors import ConfigError
from planish.base.parallel import Grid
from planish.stages.train.batching import train_batch
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.progress import Progress
from planish.stages.train.trainer import Trainer
from planish.stages.train.update import run_update
from tests.thin import examples
from tests.unit.algorithms.batches import make_batch, ragged_mask, value_step, whole_step
from tests.unit.stages.train.runs import TINY, random_rollouts, rewards_for, start_run

SEEDS = st.integers(0, 2**32 - 1)
FAST = settings(max_examples=examples(40), deadline=None)
RAW = {"whiten_advantages": False, "advantage_clip": None, "ignored_tail_tokens": 0}
SAME_LOSSES = {
    "dual_clip": None,
    "advantage_clip": None,
    "value_clip_low": None,
    "value_clip_high": None,
    "aggregation": "token-mean",
    "value_aggregation": "token-mean",
}


def tppo(window_tokens, **changes):
    return Tppo(TppoConfig(window_tokens=window_tokens, **changes))


def random_rows(seed, *, window_tokens=6, rows=5, num_prompt=2):
    """Responses in their first, second or third window, most of them unfinished."""
    g = torch.Generator().manual_seed(seed)
    windows = torch.randint(0, 3, (rows,), generator=g)
    finished = torch.rand(rows, generator=g) < 0.4
    fresh = torch.randint(1, window_tokens + 1, (rows,), generator=g)
    fresh = torch.where(finished, fresh, torch.tensor(window_tokens))
    start, stop = windows * window_tokens, windows * window_tokens + fresh
    column = torch.arange(3 * window_tokens + num_prompt) - num_prompt
    response = (column >= 0) & (column < stop[:, None])
    shape = tuple(response.shape)
    return make_batch(
        response & (column >= start[:, None]),
        response=response,
        finished=finished.tolist(),
        old=-torch.rand(shape, generator=g) * 2,
        values=torch.rand(shape, generator=g),
        reward=torch.randint(0, 2, (rows,), generator=g).tolist(),
    )


def test_defaults_are_those_of_the_authors_public_code():
    config = TppoConfig()
    assert (config.window_tokens, config.ignored_tail_tokens) == (8192, 8)
    assert (config.clip_low, config.clip_high, config.dual_clip) == (0.2, 0.28, 10.0)
    assert (config.value_clip_low, config.value_clip_high) == (0.5, 0.6)
    assert (config.whiten_advantages, config.advantage_clip) == (True, 10.0)
    assert (config.lambda_alpha, config.lambda_min, config.lambda_critic) == (0.05, 0.95, 1.0)
    assert (config.gamma, config.positive_coefficient) == (1.0, 0.1)
    assert (config.aggregation, config.value_aggregation) == ("batch-token", "seq-mean-token-mean")


@given(seed=SEEDS)
@FAST
def test_it2_undiscounted_unfinished_rows_see_the_rise_of_the_value_to_the_cut(seed):
    batch = random_rows(seed)
    config = {"lambda_alpha": 0.0, "lambda_policy": 1.0}
    seen = tppo(6, **RAW, **config).advantages(batch).advantages
    for row in (~batch.is_finished).nonzero().flatten().tolist():
        window = batch.policy_mask[row]
        values = batch.values[row, window]
        torch.testing.assert_close(seen[row, window], values[-1] - values, atol=1e-6, rtol=0)


@given(seed=SEEDS, level=st.floats(-2, 2), alpha=st.floats(0.05, 2))
@FAST
def test_it3_unfinished_rows_under_a_constant_critic_have_no_advantage(seed, level, alpha):
    batch = random_rows(seed)
    batch = batch.updated(values=torch.full_like(batch.values, level))
    seen = tppo(6, **RAW, lambda_alpha=alpha, lambda_min=0.0).advantages(batch).advantages
    assert (seen[~batch.is_finished] == 0).all()


@given(seed=SEEDS, whiten=st.booleans())
@FAST
def test_it4_values_outside_the_window_do_not_reach_its_advantages(seed, whiten):
    batch = random_rows(seed)
    algorithm = tppo(6, **{**RAW, "whiten_advantages": whiten})
    elsewhere = batch.values.masked_fill(~batch.policy_mask, float("nan"))
    seen = algorithm.advantages(batch.updated(values=elsewhere)).advantages
    assert torch.equal(seen, algorithm.advantages(batch).advantages)


@given(seed=SEEDS, alpha=st.floats(0.0, 2.0))
@FAST
def test_it6_a_window_that_holds_every_response_makes_it_vapo(seed, alpha):
    batch = random_rows(seed)
    batch = batch.updated(
        is_finished=torch.ones(len(batch), dtype=torch.bool), policy_mask=batch.value_mask
    )
    g = torch.Generator().manual_seed(seed)
    new = batch.old_logprobs + torch.randn(batch.old_logprobs.shape, generator=g) * 0.3
    decay = {"lambda_alpha": alpha, "lambda_min": 0.1}
    pair = (tppo(18, **SAME_LOSSES, **decay), Vapo(VapoConfig(**decay)))
    seen, wanted = (algorithm.advantages(batch) for algorithm in pair)
    for name, tensor in wanted.tensors().items():
        assert torch.equal(getattr(seen, name), tensor), name
    losses = []
    for algorithm, filled in zip(pair, (seen, wanted), strict=True):
        assert algorithm.counts(filled) == pair[1].counts(wanted)
        policy = algorithm.loss(new, torch.zeros_like(new), filled, whole_step(algorithm, filled))
        value = algorithm.value_loss(new, filled, value_step(algorithm, filled))
        losses.append((policy.loss.item(), value.loss.item()))
    assert losses[0] == losses[1]
    assert pair[0].describe(batch) == pair[1].describe(batch) | {"num_ignored_tokens": 0.0}


@given(seed=SEEDS, tail=st.integers(0, 5))
@FAST
def test_every_window_token_trains_except_the_last_ones_before_a_cut(seed, tail):
    batch = random_rows(seed)
    algorithm = tppo(6, ignored_tail_tokens=tail)
    filled = algorithm.advantages(batch)
    left_out = (batch.policy_mask & ~filled.policy_mask).sum(1)
    assert left_out.tolist() == [0 if done else tail for done in batch.is_finished.tolist()]
    assert not (filled.policy_mask & ~batch.policy_mask).any()
    assert (filled.advantages[~filled.policy_mask] == 0).all()
    assert algorithm.describe(batch)["num_ignored_tokens"] == left_out.sum().item()


def test_the_tail_is_cut_from_the_mask_not_from_the_row():
    mask = torch.tensor([[0, 1, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0]])
    assert without_last(mask, 2).tolist() == [[0, 1, 0, 0, 0, 0], [0] * 6]
    assert torch.equal(without_last(mask, 0), mask.bool())


def window_of_four(finished, **more):
    """A prompt of one token and four response tokens, all of this window."""
    mask = torch.tensor([[0, 1, 1, 1, 1]] * len(finished))
    return make_batch(mask, finished=finished, **more)


def test_an_end_token_on_the_last_place_of_the_window_finishes_the_response():
    batch = window_of_four([True], reward=[1.0], values=[[0, 0.5, 0.5, 0.5, 0.25]])
    filled = tppo(4, lambda_alpha=0.0, lambda_policy=0.0, **RAW).advantages(batch)
    # The last error is reward - value, not 0; no token is left out.
    assert filled.advantages[0].tolist() == [0, 0, 0, -0.25, 0.75]
    assert filled.returns[0].tolist() == [0, 1, 1, 1, 1]
    filtered = tppo(4, ignored_tail_tokens=3).advantages(batch)
    assert filtered.policy_mask.tolist() == [[False, True, True, True, True]]


def test_the_last_window_without_an_end_token_is_finished_and_truncated():
    batch = window_of_four([True], truncated=[True], reward=[-1.0], accuracy=[0.0])
    filled = tppo(4, ignored_tail_tokens=3).advantages(batch)
    assert filled.policy_mask.sum() == 4
    assert filled.value_mask.sum() == 4
    assert filled.returns[0].tolist() == [0, -1, -1, -1, -1]
    assert not filled.positive_mask.any()


def test_fewer_fresh_tokens_than_the_ignored_tail_train_nothing_and_divide_by_nothing():
    mask = torch.tensor([[0, 0, 0, 1, 1]])
    batch = make_batch(mask, response=[[0, 1, 1, 1, 1]], finished=[False], values=torch.rand(1, 5))
    algorithm = tppo(4, ignored_tail_tokens=3)
    filled = algorithm.advantages(batch)
    assert not filled.policy_mask.any()
    assert not any(algorithm.counts(filled).values())
    assert not any(algorithm.value_counts(filled).values())
    new = torch.zeros(1, 5, requires_grad=True)
    output = algorithm.loss(new, torch.zeros(1, 5), filled, whole_step(algorithm, filled))
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert (new.grad == 0).all()


def test_a_slot_that_generated_nothing_in_this_iteration_takes_no_part():
    mask = torch.tensor([[0, 0, 0, 0, 0], [0, 1, 1, 0, 0]])
    batch = make_batch(
        mask, response=[[0, 1, 1, 1, 1], [0, 1, 1, 0, 0]], finished=[False, True],
        values=torch.rand(2, 5), reward=[0.0, 1.0],
    )  # fmt: skip
    filled = tppo(4, **RAW).advantages(batch)
    assert filled.policy_mask.any(1).tolist() == [False, True]
    assert not filled.advantages[0].any()


def test_a_reward_of_an_unfinished_response_is_never_used():
    batch = window_of_four([False, False], reward=[9.0, -9.0], values=torch.rand(2, 5))
    without = batch.updated(reward=torch.zeros(2))
    seen, wanted = (tppo(4, **RAW).advantages(b) for b in (batch, without))
    assert torch.equal(seen.advantages, wanted.advantages)
    assert torch.equal(seen.returns, wanted.returns)


def test_an_unfinished_response_is_expected_to_go_on_for_half_a_window():
    mask = ragged_mask([8, 8, 3], 9)
    batch = make_batch(mask, finished=[False, True, False])
    assert expected_lengths(batch, 5).tolist() == [10, 8, 5]
    # Decays 1 - 1/l at alpha 1.
    lam = tppo(5, lambda_alpha=1.0, lambda_min=0.0, ignored_tail_tokens=0).describe(batch)
    assert lam["lambda_mean"] == pytest.approx((0.9 + 0.875 + 0.8) / 3)


def test_whitening_sees_trained_tokens_only_and_the_clamp_comes_last():
    g = torch.Generator().manual_seed(1)
    batch = window_of_four([False, True], values=torch.rand(2, 5, generator=g), reward=[0.0, 1.0])
    algorithm = tppo(4, ignored_tail_tokens=2, advantage_clip=0.9)
    filled = algorithm.advantages(batch)
    trained = trained_tokens(batch, 2)
    raw = tppo(4, **RAW).advantages(batch).advantages[trained]
    white = (raw - raw.mean()) / raw.std()
    torch.testing.assert_close(
        filled.advantages[trained], white.clamp(-0.9, 0.9), atol=1e-5, rtol=0
    )
    assert filled.advantages.abs().max().item() == pytest.approx(0.9)


def test_an_ignored_tail_as_long_as_the_window_is_refused():
    with pytest.raises(ConfigError, match="`ignored_tail_tokens` must be below `window_tokens`"):
        parse_section(
            TppoConfig, {"window_tokens": 4, "ignored_tail_tokens": 4}, section="algorithm"
        )


DECAY = {"lambda_alpha": 0.5, "lambda_min": 0.5}
# As wide as never to bite: `None` cannot be said in a configuration file.
WIDE = dict.fromkeys(("dual_clip", "advantage_clip", "value_clip_low", "value_clip_high"), 1e9)
MEAN_LOSSES = {**DECAY, "aggregation": "token-mean", "value_aggregation": "token-mean", **WIDE}
VAPO_TABLE = {"name": "vapo", **DECAY}
TPPO_TABLE = {"name": "tppo", "window_tokens": 19, "ignored_tail_tokens": 3, **MEAN_LOSSES}


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
    wanted, by_vapo = trained(VAPO_TABLE, f"file://{tmp_path}/vapo")
    seen, by_tppo = trained(TPPO_TABLE, f"file://{tmp_path}/tppo")
    assert set(seen) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(seen[name], tensor), name
    assert by_tppo.scalars["num_ignored_tokens"] == 0.0
    for name in ("loss", "value_loss", "lambda_mean", "advantage_mean", "nll_loss"):
        assert by_tppo.scalars[name] == by_vapo.scalars[name], name
    assert by_tppo.progress == by_vapo.progress
