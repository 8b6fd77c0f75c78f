"""Properties on random inputs, in float64 where rounding would hide a fault."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.algorithms.advantages import (
    adaptive_lambda,
    gae,
    group_advantages,
    monte_carlo_returns,
    terminal_rewards,
)
from planish.algorithms.base import Denominators
from planish.algorithms.cispo import Cispo, CispoConfig
from planish.algorithms.dapo import Dapo, DapoConfig
from planish.algorithms.grpo import GrpoConfig
from planish.algorithms.gspo import Gspo, GspoConfig
from planish.algorithms.losses import aggregate, clipped_surrogate, loss_counts, policy_ratio
from planish.algorithms.tppo import Tppo, TppoConfig
from planish.algorithms.vapo import Vapo, VapoConfig
from tests.rounding import VALUES
from tests.thin import examples
from tests.unit.algorithms.batches import make_batch, ragged_mask, value_step, whole_step

SEEDS = st.integers(0, 2**32 - 1)
FAST = settings(max_examples=examples(40), deadline=None)


def random_batch(seed, rows=6, width=7):
    g = torch.Generator().manual_seed(seed)
    mask = ragged_mask(torch.randint(1, width + 1, (rows,), generator=g).tolist(), width)
    old = -torch.rand(rows, width, generator=g) * 3
    new = (old + torch.randn(rows, width, generator=g) * 0.4).clamp(max=0)
    reward = torch.randint(0, 2, (rows,), generator=g).float() * 2 - 1
    batch = make_batch(
        mask,
        old=old,
        reward=reward,
        group=[0] * (rows // 2) + [1] * (rows - rows // 2),
        values=torch.rand(rows, width, generator=g),
        finished=(torch.rand(rows, generator=g) < 0.7).tolist(),
        reference=old + torch.randn(rows, width, generator=g) * 0.4,
    )
    return batch, new


def loss_and_gradient(loss, batch, new, parts, step):
    """Loss and gradient of an optimizer step that is split into the given rows."""
    scores = new.clone().requires_grad_()
    total = 0.0
    for rows in parts:
        output = loss(scores[rows], batch.take(torch.tensor(rows)), step)
        output.loss.backward()
        total += output.loss.item()
    return total, scores.grad


def check_split_order_and_padding(loss, batch, new, step, seed):
    value, gradient = loss_and_gradient(loss, batch, new, [list(range(6))], step)
    order = np.random.default_rng(seed).permutation(6)
    parts = [part.tolist() for part in np.split(order, [1, 3])]
    split_value, split_gradient = loss_and_gradient(loss, batch, new, parts, step)
    assert split_value == pytest.approx(value, abs=VALUES)
    torch.testing.assert_close(split_gradient, gradient, atol=VALUES, rtol=0)
    per_token = [name for name, tensor in batch.tensors().items() if tensor.dim() == 2]
    wide = {name: torch.nn.functional.pad(getattr(batch, name), (0, 3)) for name in per_token}
    garbage = torch.nn.functional.pad(new, (0, 3), value=float("nan"))
    padded_value, padded_gradient = loss_and_gradient(
        loss, batch.updated(**wide), garbage, [list(range(6))], step
    )
    assert padded_value == pytest.approx(value, abs=VALUES)
    torch.testing.assert_close(padded_gradient[:, :-3], gradient, atol=VALUES, rtol=0)


TPPO = Tppo(TppoConfig(window_tokens=7, ignored_tail_tokens=1))
GSPO = Gspo(GspoConfig(clip_low=0.1, clip_high=0.1))
CISPO = Cispo(CispoConfig(clip_high=0.2))
PENALISED = [
    Dapo(GrpoConfig(kl_coefficient=0.5, kl_estimator="k1")),
    Dapo(DapoConfig(kl_coefficient=0.5, kl_estimator="k2", correction="token_truncate")),
    Dapo(GrpoConfig(kl_coefficient=0.5)),
    Vapo(VapoConfig(kl_coefficient=0.5)),
    Tppo(TppoConfig(window_tokens=7, ignored_tail_tokens=1, kl_coefficient=0.5)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [Dapo(DapoConfig()), Dapo(GrpoConfig()), Vapo(VapoConfig()), TPPO, GSPO, CISPO, *PENALISED],
)
@given(seed=SEEDS)
@FAST
def test_i1_micro_batch_split_order_and_padding_change_neither_loss_nor_gradient(algorithm, seed):
    batch, new = random_batch(seed)
    batch = algorithm.advantages(batch)

    def loss(logprobs, part, step):
        return algorithm.loss(logprobs, torch.zeros_like(logprobs), part, step)

    check_split_order_and_padding(loss, batch, new, whole_step(algorithm, batch), seed)


@pytest.mark.parametrize("algorithm", [Vapo(VapoConfig()), TPPO])
@given(seed=SEEDS)
@FAST
def test_i1_holds_for_the_value_loss_too(algorithm, seed):
    batch, new = random_batch(seed)
    batch = algorithm.advantages(batch)
    step = value_step(algorithm, batch)
    check_split_order_and_padding(algorithm.value_loss, batch, new, step, seed)


@pytest.mark.parametrize("algorithm", [Vapo(VapoConfig()), TPPO])
@given(seed=SEEDS)
@FAST
def test_i1_advantages_do_not_depend_on_padding_or_order(algorithm, seed):
    batch, _ = random_batch(seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(6))
    per_token = [name for name, tensor in batch.tensors().items() if tensor.dim() == 2]
    wide = {name: torch.nn.functional.pad(getattr(batch, name), (2, 3)) for name in per_token}
    seen, wanted = (
        algorithm.advantages(batch.updated(**wide).take(order)),
        algorithm.advantages(batch),
    )
    for name in ("advantages", "returns", "policy_mask", "value_mask", "positive_mask"):
        inner = getattr(seen, name)[:, 2:-3]
        torch.testing.assert_close(inner, getattr(wanted, name)[order], atol=VALUES, rtol=0)


@given(seed=SEEDS, gamma=st.floats(0.5, 1.0))
@FAST
def test_i2_lambda_one_is_the_monte_carlo_return_and_lambda_zero_the_td_error(seed, gamma):
    g = torch.Generator().manual_seed(seed)
    values, rewards = torch.rand(3, 6, generator=g), torch.rand(3, 6, generator=g)
    mask = torch.rand(3, 6, generator=g) > 0.3
    returns = monte_carlo_returns(rewards, mask)
    seen = gae(rewards, values, mask, lam=1.0) + values
    torch.testing.assert_close(seen[mask], returns[mask], atol=1e-5, rtol=0)
    full = torch.ones(3, 6, dtype=torch.bool)
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    error = rewards + gamma * following - values
    torch.testing.assert_close(gae(rewards, values, full, gamma=gamma, lam=0.0), error)


@given(seed=SEEDS, lam=st.floats(0, 1), scale=st.floats(-3, 3), shift=st.floats(-2, 2))
@FAST
def test_i3_gae_is_linear_and_blind_to_a_common_shift(seed, lam, scale, shift):
    g = torch.Generator().manual_seed(seed)
    v1, v2, r1, r2 = (torch.rand(2, 5, generator=g, dtype=torch.float64) for _ in range(4))
    mask = ragged_mask([5, 3], 5)
    mixed = gae(r1 + scale * r2, v1 + scale * v2, mask, lam=lam)
    apart = gae(r1, v1, mask, lam=lam) + scale * gae(r2, v2, mask, lam=lam)
    torch.testing.assert_close(mixed, apart)
    finished = torch.ones(2, dtype=torch.bool)
    bonus = terminal_rewards(torch.full((2,), shift, dtype=torch.float64), mask, finished)
    shifted = gae(r1 + bonus, v1 + shift, mask, lam=lam)
    torch.testing.assert_close(shifted, gae(r1, v1, mask, lam=lam))


@given(seed=SEEDS, scale=st.floats(0.1, 10), shift=st.floats(-5, 5))
@FAST
def test_i4_group_advantages_are_centred_unit_and_blind_to_affine_maps(seed, scale, shift):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(12, generator=g, dtype=torch.float64)
    group = torch.arange(12) % 3
    for std in ("population", "sample"):
        seen = group_advantages(rewards, group, std=std)
        for k in range(3):
            assert seen[group == k].sum().abs() < 1e-9
        mapped = group_advantages(scale * rewards + shift, group, std=std)
        torch.testing.assert_close(mapped, seen, atol=1e-3, rtol=1e-3)
    unit = group_advantages(rewards, group, std="population", epsilon=0.0)
    for k in range(3):
        assert unit[group == k].var(correction=0).item() == pytest.approx(1.0)


@given(seed=SEEDS, clip=st.floats(0.01, 0.9))
@FAST
def test_i5_equal_clips_are_symmetric_and_infinite_clips_leave_minus_advantage_times_ratio(
    seed, clip
):
    g = torch.Generator().manual_seed(seed)
    ratio, advantage = torch.rand(20, generator=g) * 3, torch.randn(20, generator=g)
    symmetric = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    seen = clipped_surrogate(ratio, advantage, clip_low=clip, clip_high=clip)
    torch.testing.assert_close(seen, symmetric)
    infinite = float("inf")
    free = clipped_surrogate(ratio, advantage, clip_low=infinite, clip_high=infinite)
    torch.testing.assert_close(free, -advantage * ratio)


@given(seed=SEEDS)
@FAST
def test_i6_gradient_is_zero_exactly_where_the_clip_bites(seed):
    g = torch.Generator().manual_seed(seed)
    logprobs = (torch.randn(50, generator=g)).requires_grad_()
    advantage = torch.randn(50, generator=g)
    ratio = policy_ratio(logprobs, torch.zeros(50))
    clipped_surrogate(ratio, advantage, clip_low=0.2, clip_high=0.28).sum().backward()
    bites = ((advantage > 0) & (ratio > 1.28)) | ((advantage < 0) & (ratio < 0.8))
    assert torch.equal(logprobs.grad == 0, bites)


@given(seed=SEEDS)
@FAST
def test_i7_token_mean_ignores_duplication_and_equals_seq_mean_at_equal_lengths(seed):
    batch, x = random_batch(seed)
    mask = batch.policy_mask

    def aggregated(losses, mask, mode):
        counts = loss_counts(mask)
        return aggregate(losses, mask, mode, Denominators(counts, counts, 1)).item()

    once = aggregated(x, mask, "token-mean")
    twice = aggregated(torch.cat([x, x]), torch.cat([mask, mask]), "token-mean")
    assert twice == pytest.approx(once, abs=VALUES)
    full = torch.ones_like(mask)
    assert aggregated(x, full, "token-mean") == pytest.approx(
        aggregated(x, full, "seq-mean-token-mean"), abs=VALUES
    )


@given(seed=SEEDS, width=st.integers(2, 6))
@FAST
def test_i9_a_group_trains_exactly_when_its_accuracies_are_mixed(seed, width):
    g = torch.Generator().manual_seed(seed)
    accuracy = torch.randint(0, 2, (4 * width,), generator=g).float()
    group = torch.arange(4).repeat_interleave(width)
    seen = group_advantages(2 * accuracy - 1, group)
    for k in range(4):
        mixed = 0 < accuracy[group == k].sum() < width
        assert bool((seen[group == k] != 0).any()) is bool(mixed)


@given(
    lengths=st.lists(st.integers(1, 30_000), min_size=2, unique=True),
    alpha=st.floats(0.01, 2.0),
    minimum=st.floats(0.0, 0.999),
)
@FAST
def test_i10_policy_decay_rises_with_the_length_where_the_bound_does_not_hold_it(
    lengths, alpha, minimum
):
    lengths = sorted(lengths)
    decay = adaptive_lambda(torch.tensor(lengths), alpha=alpha, minimum=minimum)
    assert (decay >= np.float32(minimum)).all()
    assert (decay < 1).all()
    assert (decay.diff() >= 0).all()
    # Two neighbouring lengths of 30,000 differ by less than float32 can tell.
    apart = torch.tensor([1 - 1 / (alpha * n) for n in lengths], dtype=torch.float64)
    free = apart[:-1] > minimum + 1e-6
    assert (decay.diff()[free & (apart.diff() > 2e-7)] > 0).all()
