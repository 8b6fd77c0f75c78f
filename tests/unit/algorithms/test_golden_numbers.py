"""Numbers that were computed independently, in plain Python, to six decimals."""

import json
from pathlib import Path

import pytest
import torch

from planish.algorithms import build_algorithm
from planish.algorithms.advantages import (
    adaptive_lambda,
    explained_variance,
    gae,
    group_advantages,
    last_value,
)
from planish.algorithms.base import Denominators
from planish.algorithms.losses import (
    aggregate,
    clipped_surrogate,
    kl_estimate,
    loss_counts,
    policy_ratio,
)
from planish.algorithms.masked import masked_mean, masked_whiten
from planish.algorithms.tppo import Tppo, TppoConfig, expected_lengths
from planish.algorithms.vapo import Vapo, VapoConfig
from tests.rounding import VALUES
from tests.unit.algorithms.batches import make_batch, ragged_mask, value_step, whole_step

NUMBERS = Path(__file__).parents[2] / "golden" / "numbers"


def golden(name):
    return json.loads((NUMBERS / f"{name}.json").read_text())


def close(seen, wanted, tolerance=VALUES):
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


WINDOWS = golden("windows")


def tppo(window_tokens=WINDOWS["window_tokens"], **changes):
    """T-PPO with the decay of the golden windows, every token trained and nothing scaled."""
    plain = {"lambda_alpha": 0.0, "whiten_advantages": False, "ignored_tail_tokens": 0}
    lam = {"lambda_policy": WINDOWS["lam"], "window_tokens": window_tokens}
    return Tppo(TppoConfig(**(plain | lam | changes)))


def six_tokens(start, stop):
    """The response as it is after the window that generated tokens `start` to `stop`."""
    column = torch.arange(6)[None]
    return make_batch(
        (column >= start) & (column < stop),
        response=column < stop,
        values=torch.tensor([WINDOWS["values"]]),
        reward=[WINDOWS["reward"]],
        finished=[stop == 6],
    )


def test_tppo_gives_the_golden_advantages_of_two_windows():
    first = tppo().advantages(six_tokens(0, 4))
    close(first.advantages[0, :4], WINDOWS["first_window"])
    close(first.returns[0, :4], WINDOWS["first_window_returns"])
    assert not first.value_mask.any()
    second = tppo().advantages(six_tokens(4, 6))
    close(second.advantages[0], [0.0] * 4 + WINDOWS["second_window"])
    close(second.returns[0], WINDOWS["returns"])
    assert second.value_mask.all()


def test_tppo_gives_the_golden_advantages_of_one_window_that_holds_the_response():
    whole = tppo(window_tokens=6).advantages(six_tokens(0, 6))
    close(whole.advantages[0], WINDOWS["one_window"])
    close(whole.returns[0], WINDOWS["returns"])


def test_an_unfinished_response_of_one_long_window_has_the_golden_decay():
    batch = make_batch(torch.ones(1, 8192), finished=[False])
    assert expected_lengths(batch, 8192).tolist() == [12288]
    algorithm = Tppo(TppoConfig(lambda_min=0.0))
    close(algorithm.describe(batch)["lambda_mean"], dict(golden("lambda_policy")["rows"])[12288])


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


@pytest.mark.parametrize("case", golden("kl"))
def test_the_estimators_of_kl_give_the_golden_numbers(case):
    policy, reference = torch.tensor(case["logprob"]), torch.tensor(case["reference"])
    for estimator in ("k1", "k2", "k3"):
        # The squares go up to 450, where float32 has four decimals.
        wanted = case[estimator]
        close(kl_estimate(policy, reference, estimator), wanted, 1.5e-6 * max(1.0, abs(wanted)))


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


def test_vapo_adds_the_golden_positive_loss_to_the_golden_policy_loss():
    case, mask, new, old, advantages = microbatch()
    batch = make_batch(mask, old=old, reward=[1.0, -1.0], advantages=advantages)
    algorithm = Vapo(VapoConfig(positive_coefficient=case["nll_weight"]))
    batch = algorithm.advantages(batch).updated(advantages=advantages)
    step = whole_step(algorithm, batch)
    assert step.minibatch == {"tokens": 5.0, "sequences": 2.0, "positive_tokens": 3.0}
    output = algorithm.loss(new, torch.zeros_like(new), batch, step)
    total, count = output.means["nll_loss"]
    close(total / count, case["positive_nll"])
    close(output.loss, case["with_nll"])


@pytest.mark.parametrize("case", golden("ratio_losses"), ids=lambda case: case["name"])
def test_gspo_and_cispo_give_the_loss_and_the_gradient_of_verl_and_trl(case):
    mask = ragged_mask(case["lengths"], len(case["new"][0]))
    advantages = torch.tensor(case["advantages"])[:, None].expand(mask.shape)
    batch = make_batch(mask, old=case["old"], advantages=advantages)
    constants = {"clip_low": case["clip_low"], "clip_high": case["clip_high"]}
    algorithm = build_algorithm({"name": case["name"], **constants})
    new = torch.tensor(case["new"], requires_grad=True)
    step = whole_step(algorithm, batch)
    output = algorithm.loss(new, torch.zeros_like(new), batch, step)
    output.loss.backward()
    close(output.loss, case["loss"])
    close(new.grad, case["gradient"])
    low, high = (output.means[f"clipfrac_{end}"] for end in ("low", "high"))
    close([low[0] / low[1], high[0] / high[1]], case["clipped"])


def test_whitening_gives_the_golden_numbers():
    case = golden("whiten")
    x = torch.tensor([[*case["x"], 99.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    close(masked_whiten(x, mask)[0], [*case["whitened"], 0.0])


@pytest.mark.parametrize(("clip", "wanted"), [(True, "clipped"), (False, "unclipped")])
def test_value_loss_gives_the_golden_numbers_clipped_and_free(clip, wanted):
    case = golden("value")
    old, returns = [case["old"]], [case["returns"]]
    batch = make_batch(torch.ones(1, 2), values=old, returns=returns)
    clips = {"value_clip_low": case["clip"], "value_clip_high": case["clip"]} if clip else {}
    algorithm = Vapo(VapoConfig(**clips))
    output = algorithm.value_loss(torch.tensor([case["new"]]), batch, value_step(algorithm, batch))
    close(output.loss, case[wanted])


def test_explained_variance_gives_the_golden_number():
    case = golden("explained_variance")
    returns, values = torch.tensor([case["returns"]]).float(), torch.tensor([case["values"]])
    close(explained_variance(returns, values, torch.ones(1, 5)), case["explained"])


def test_adaptive_lambda_gives_the_golden_numbers():
    lengths, wanted = zip(*golden("lambda_policy")["rows"], strict=True)
    close(adaptive_lambda(torch.tensor(lengths), alpha=0.05, minimum=0.0), wanted)
