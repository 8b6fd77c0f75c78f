"""Numbers that were computed independently, in plain Python, to six decimals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from planish.algorithms.advantages import (
    adaptive_lambda,
    explained_variance,
    gae,
    group_advantages,
    last_value,
    monte_carlo_returns,
)
from planish.algorithms.base import Denominators
from planish.algorithms.losses import (
    aggregate,
    clipped_surrogate,
    loss_counts,
    negative_log_likelihood,
    policy_ratio,
    value_losses,
)
from planish.algorithms.masked import masked_mean, masked_whiten
from planish.evaluate.metrics import pass_at_k
from planish.shaping import overlong_penalty

NUMBERS = Path(__file__).parents[2] / "golden" / "numbers"


def golden(name):
    return json.loads((NUMBERS / f"{name}.json").read_text())


def close(seen, wanted, tolerance=1.5e-6):
    torch.testing.assert_close(
        torch.as_tensor(seen, dtype=torch.float64),
        torch.as_tensor(wanted, dtype=torch.float64),
        atol=tolerance,
        rtol=0,
    )


@pytest.mark.parametrize("case", golden("gae"))
def test_gae_gives_the_golden_advantages(case):
    values, rewards = torch.tensor([case["values"]]), torch.tensor([case["rewards"]])
    mask = torch.ones_like(values, dtype=torch.bool)
    bootstrap = None if case["finished"] else last_value(values, mask)
    seen = gae(rewards, values, mask, gamma=case["gamma"], lam=case["lam"], bootstrap=bootstrap)
    close(seen[0], case["advantages"])


def test_two_windows_have_the_same_return_at_every_token():
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 1]])
    close(monte_carlo_returns(rewards, torch.ones(1, 6))[0], [1.0] * 6)


@pytest.mark.parametrize("case", golden("group_advantages"))
def test_group_advantages_give_the_golden_numbers(case):
    rewards = torch.tensor(case["rewards"], dtype=torch.float32)
    seen = group_advantages(rewards, torch.zeros(8), std=case["std"], epsilon=case["epsilon"])
    close(seen, [case["right"] if r > 0 else case["wrong"] for r in case["rewards"]])


@pytest.mark.parametrize("case", golden("surrogate"))
def test_clipped_surrogate_gives_the_golden_loss(case):
    loss = clipped_surrogate(
        torch.tensor(float(case["ratio"])),
        torch.tensor(float(case["advantage"])),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=case["dual_clip"],
    )
    close(loss, case["loss"])


def microbatch():
    case = golden("microbatch")
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()

    def pad(rows):
        return torch.tensor([rows[0], [*rows[1], 0.0]])

    advantages = torch.tensor(case["advantages"], dtype=torch.float32)[:, None].expand(2, 3)
    return case, mask, pad(case["new"]), pad(case["old"]), advantages


def test_dapo_microbatch_gives_golden_ratios_losses_and_aggregates():
    case, mask, new, old, advantages = microbatch()
    ratio = policy_ratio(new, old)
    close(ratio[mask], [r for row in case["ratios"] for r in row])
    losses = clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.28)
    close(losses[mask], [x for row in case["losses"] for x in row])
    counts = loss_counts(mask)
    for mode, wanted in case["aggregated"].items():
        close(aggregate(losses, mask, mode, Denominators(counts, counts, 1)), wanted)
    symmetric = clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.2)
    close(masked_mean(symmetric, mask), case["symmetric_token_mean"])


def test_positive_example_loss_adds_to_the_golden_total():
    case, mask, new, old, advantages = microbatch()
    nll = negative_log_likelihood(new[:1], mask[:1]) / mask[:1].sum()
    close(nll, case["positive_nll"])
    losses = clipped_surrogate(policy_ratio(new, old), advantages, clip_low=0.2, clip_high=0.28)
    close(masked_mean(losses, mask) + case["nll_weight"] * nll, case["with_nll"])


def test_whitening_gives_the_golden_numbers():
    case = golden("whiten")
    x = torch.tensor([[*case["x"], 99.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    close(masked_whiten(x, mask)[0], [*case["whitened"], 0.0])


def test_value_loss_gives_the_golden_numbers_clipped_and_free():
    case = golden("value")
    new, old, returns = (
        torch.tensor(case[k], dtype=torch.float32) for k in ("new", "old", "returns")
    )
    clip = case["clip"]
    close(value_losses(new, old, returns, clip_low=clip, clip_high=clip).mean(), case["clipped"])
    close(value_losses(new, old, returns).mean(), case["unclipped"])


def test_explained_variance_gives_the_golden_number():
    case = golden("explained_variance")
    returns, values = torch.tensor([case["returns"]]).float(), torch.tensor([case["values"]])
    close(explained_variance(returns, values, torch.ones(1, 5)), case["explained"])


@pytest.mark.parametrize("case", golden("length_penalty"))
def test_overlong_penalty_gives_the_golden_number(case):
    seen = overlong_penalty(
        [case["length"]], max_tokens=case["max_tokens"], buffer_tokens=case["buffer_tokens"]
    )
    assert seen[0] == case["penalty"]


def test_pass_at_k_gives_the_golden_number():
    case = golden("pass_at_k")
    close(pass_at_k(case["n"], case["c"], case["k"]), case["value"])


def test_adaptive_lambda_gives_the_golden_numbers():
    lengths, wanted = zip(*golden("lambda_policy")["rows"], strict=True)
    close(adaptive_lambda(torch.tensor(lengths), alpha=0.05, minimum=0.0), wanted)
