"""Advantages and returns: group-relative, generalised advantage estimation, Monte-Carlo.

This module has no loss and no state.

Source: GRPO arXiv 2402.03300 section 4.1; DAPO arXiv 2503.14476 section 2; generalised advantage
estimation arXiv 1506.02438.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from planish.algorithms.masked import hidden, last_column, masked_whiten, spread_of
from planish.base.parallel import ALONE, Share

if TYPE_CHECKING:
    from torch import Tensor

StdKind = Literal["sample", "population"]


def group_advantages(
    rewards: Tensor,
    group_index: Tensor,
    *,
    std: StdKind = "sample",
    epsilon: float = 1e-6,
    in_stats: Tensor | None = None,
) -> Tensor:
    """Normalise each reward by the mean and standard deviation of its group.

    Args:
        rewards: [R] float32, one scalar per rollout.
        group_index: [R] int, rows of one group share a value; groups need not be contiguous.
        std: divide the squares by n - 1 ("sample") or by n ("population").
        epsilon: added to the standard deviation.
        in_stats: [R] bool, rows that count in mean and deviation; all when None.

    Returns:
        [R] float32. A group whose counted rewards are equal gives exactly 0. A group of one row
        gives its own reward. The mean and deviation leave out rows outside `in_stats`, so such a
        row may lie far away: its advantage is cut to at most twice the root of its group's size,
        with either sign. (A counted row never reaches the root.)

    Source: DAPO, arXiv 2503.14476, equation 9; the bound is ours.
    """
    inverse = group_index.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
    exact = rewards.double()
    counted = (rewards == rewards) if in_stats is None else in_stats
    weight = counted.double()
    num_groups = int(inverse.max()) + 1 if len(rewards) else 0
    empty = exact.new_zeros(num_groups)

    def per_group(x: Tensor) -> Tensor:
        return empty.index_add(0, inverse, x)

    size = per_group(weight)
    mean = per_group(hidden(exact, counted)) / size.clamp(min=1)
    centred = exact - mean[inverse]
    freedom = size - 1 if std == "sample" else size
    deviation = (per_group(hidden(centred**2, counted)) / freedom.clamp(min=1)).sqrt()
    scaled = centred / (deviation[inverse] + epsilon)
    num_rows = per_group(exact.new_ones(len(exact)))[inverse]
    most = 2 * num_rows.sqrt()
    scaled = scaled.where(counted, scaled.clamp(-most, most))
    # Rounding makes equal rewards differ from their mean; without this test, noise / 0 would train.
    # Rows that do not count have no influence on the deviation.
    rows = counted.nonzero().flatten()
    low, high = (
        empty.scatter_reduce(0, inverse[rows], exact[rows], end, include_self=False)
        for end in ("amin", "amax")
    )
    scaled = scaled.masked_fill((low == high)[inverse], 0.0)
    return exact.where(num_rows == 1, scaled).to(rewards.dtype)


def spread(per_row: Tensor, mask: Tensor) -> Tensor:
    """Give every masked token of a row the row's scalar: [B] and [B, S] -> [B, S]."""
    return hidden(per_row.unsqueeze(1).expand(mask.shape), mask)


def terminal_rewards(reward: Tensor, mask: Tensor, is_finished: Tensor) -> Tensor:
    """Put each row's reward on its last masked token.

    Args:
        reward: [B] float32.
        mask: [B, S] bool, response tokens.
        is_finished: [B] bool; an unfinished row gets no reward, whatever its verdict.

    Returns:
        [B, S] float32. A row with an empty mask stays 0.
    """
    paid = reward * is_finished * (mask != 0).any(1)
    column = last_column(mask).unsqueeze(1)
    return paid.new_zeros(mask.shape).scatter(1, column, paid.unsqueeze(1))


def last_value(values: Tensor, mask: Tensor) -> Tensor:
    """Return the value at each row's last masked token, [B]; 0 for rows with an empty mask."""
    picked = values.gather(1, last_column(mask).unsqueeze(1)).squeeze(1)
    return hidden(picked, (mask != 0).any(1))


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimation that skips tokens outside the mask.

    Args:
        token_rewards: [B, S] float32.
        values: [B, S] float32, value of the state before each token.
        mask: [B, S] bool, tokens of the response; the recursion skips all other tokens.
        gamma: discount.
        lam: decay of the estimator, a number or [B].
        bootstrap: [B] float32, value after the last token; 0 for finished rows (the default).

    Returns:
        [B, S] float32, 0 outside the mask. Advantage plus value is the return target of the same
        decay.

    Source: arXiv 1506.02438, equations 11 and 16.
    """
    # Tokens of one column are adjacent in memory, so a step reads whole cache lines.
    own, kept = hidden(values, mask).t().contiguous(), (mask != 0).t().contiguous()
    result = hidden(token_rewards, mask).to(own.dtype).t().contiguous()
    running = own.new_zeros(own.shape[1])
    following = running if bootstrap is None else bootstrap.to(own.dtype)
    # A column with only padding passes the recursion on unchanged; its rewards are 0.
    for t in kept.any(1).nonzero().flatten().flip(0).tolist():
        delta = result[t] + gamma * following - own[t]
        running = (delta + gamma * lam * running).where(kept[t], running)
        following = own[t].where(kept[t], following)
        result[t] = running.where(kept[t], 0.0)
    return result.t().contiguous()


def monte_carlo_returns(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of rewards from each token to the end of its row (gamma 1), 0 outside the
    mask.
    """
    rewards = hidden(token_rewards, mask)
    return hidden(rewards.flip(1).cumsum(1).flip(1), mask)


def return_targets(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor
) -> Tensor:
    """Return the critic's targets, [B, S] float32: value plus advantage under the critic's decay.

    Arguments are those of `gae`, with a mask of finished responses. With gamma and decay 1 the
    targets are the exact Monte-Carlo returns, which do not depend on the values.

    Source: VAPO, arXiv 2504.05118, section 4.1, decoupled GAE.
    """
    if gamma == 1 and isinstance(lam, float | int) and lam == 1:
        return monte_carlo_returns(token_rewards, mask)
    return gae(token_rewards, values, mask, gamma=gamma, lam=lam) + hidden(values, mask)


def scaled_advantages(
    advantages: Tensor, mask: Tensor, share: Share = ALONE, *, whiten: bool, clip: float | None
) -> Tensor:
    """Return the whitened and clipped advantages that train, [B, S], 0 outside the mask.

    Args:
        advantages: [B, S].
        mask: [B, S] bool, tokens in the policy loss; only these enter the mean.
        share: this rank's rows of the rollout batch; the mean is over the rows of all ranks.
        whiten: shift and scale to mean 0 and variance 1 over the mask.
        clip: bound after whitening; None is off.
    """
    scaled = masked_whiten(advantages, mask, share) if whiten else hidden(advantages, mask)
    return scaled if clip is None else scaled.clamp(-clip, clip)


def advantage_metrics(
    advantages: Tensor, mask: Tensor, decay: Tensor, share: Share = ALONE, *, whiten: bool
) -> dict[str, float]:
    """Return metrics of advantages [B, S] before they are scaled, and of the decay [B] of their
    rows.

    Returns:
        Mean and population deviation over the mask, and the mean decay of rows with a token in the
        mask, over the rows of all ranks. Empty if the mask is. If advantages are to be whitened,
        also `whiten_undefined`: 1 if there are fewer than two tokens, so that all become 0.
    """
    count, mean, squares = spread_of(advantages, mask, share)
    metrics = {"whiten_undefined": float(count < 2)} if whiten else {}
    if not count:
        return metrics
    return metrics | {
        "advantage_mean": float(mean),
        "advantage_std": float((squares / count).sqrt()),
        "lambda_mean": share.means(decay[mask.any(1)])[0],
    }


def adaptive_lambda(lengths: Tensor, *, alpha: float, minimum: float) -> Tensor:
    """Return the decay that makes the sum of lambda^t about alpha * length.

    Args:
        lengths: [B] response lengths in tokens.
        alpha: share of the length.
        minimum: lower bound, in [0, 1); it binds for short responses.

    Returns:
        [B] float32 in [minimum, 1).

    Source: VAPO, arXiv 2504.05118, section 4.2, length-adaptive GAE.
    """
    return (1 - 1 / (alpha * lengths.double())).clamp(min=minimum).float()


def explained_variance(
    returns: Tensor, values: Tensor, mask: Tensor, share: Share = ALONE
) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns) over the mask; NaN if Var(returns) is 0.

    The variances are over the rows of all ranks. The caller logs 0 and `ev_undefined` in place of
    NaN.
    """
    exact = returns.double()
    total, left = (spread_of(x, mask, share)[2] for x in (exact, exact - values))
    return (1 - left / total).where(total > 0, float("nan"))
