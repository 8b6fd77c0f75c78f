"""Our functions against those of verl and TRL on random inputs.

Each peer lives in an environment of its own, made once outside the repository:

    uv venv --python 3.11 VERL && uv pip install -p VERL --no-deps verl==0.9.1
    uv pip install -p VERL torch==2.13.0 transformers==5.19.0 numpy pandas safetensors tensordict \
        ray omegaconf hydra-core codetiming packaging orjson
    uv venv --python 3.11 TRL
    uv pip install -p TRL trl==1.16.0 torch==2.13.0 transformers==5.19.0

With `VERL_PYTHON=VERL/bin/python` and `TRL_PYTHON=TRL/bin/python` in the environment,
`python -m tests.benchmarks.peers.equality` prints the largest difference of each function and
writes `results/peers.json`. It fails where one exceeds 1e-6 in float32, relative to the value where
that is above 1.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planish.algorithms.advantages import gae, group_advantages, terminal_rewards
from planish.algorithms.base import Denominators
from planish.algorithms.clipped_policy import ClippedPolicyConfig, clipped_policy_loss
from planish.algorithms.losses import (
    aggregate,
    kl_estimate,
    loss_counts,
    value_losses,
)
from planish.algorithms.masked import masked_whiten
from planish.algorithms.mismatch import correction_weights
from planish.models.config import ModelConfig
from planish.models.logprobs import TokenScorer
from planish.models.policy import build_policy
from planish.verifiers.shaping import overlong_penalty
from tests.benchmarks.facts import write_result
from tests.benchmarks.peers.exchange import Case, Tensors, ask
from tests.unit.algorithms.batches import make_batch

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-6
ROWS, COLUMNS, GROUP, DRAWS = 32, 48, 8, 5
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
STEPS = 4
"""Mini-batches that share a rollout batch."""
VERL_MODES = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-sum-norm": "seq-mean-token-sum-norm",
    "batch-token": "token-mean",
}
TRL_MODES = {
    "batch-token": "dapo",
    "token-mean": "bnpo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-sum-norm": "dr_grpo",
}
BY_DESIGN = {
    "verl": [
        "group advantages: a group of equal rewards gives exactly 0 here; there rounding remains "
        "divided by 1e-6",
        "whitening: a mask of fewer than two tokens gives 0 here, an error there",
        "overlong punishment: stays at -1 beyond the longest response here, goes on falling there",
        "dual clip: off unless configured here, always on with 3.0 by default there",
        "value clip: two bounds here, one there",
        "sequence_mask correction and length-adaptive GAE: no such function there",
    ],
    "trl": [
        "loss_type dapo divides by the tokens of the whole generation batch: `batch-token` here; "
        "the paper's and our default is the mini-batch (`token-mean`), loss_type bnpo there",
        "group advantages are not a function there; they divide by std + 1e-4, here + 1e-6",
        "the log ratio is cut to +-20 here, not there, nor are the estimates of KL to +-10",
        "a sequence without a trained token counts in the averages over sequences there, not here",
        "no dynamic sampling, value model or GAE in version 1.16",
    ],
}


class Comparison(NamedTuple):
    case: Case
    ours: Tensors


def random_batch(seed: int, dtype: torch.dtype, *, holes: bool) -> Tensors:
    """Inputs with ragged responses; with holes also masked tokens inside, and one empty row."""
    random = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(ROWS, COLUMNS, generator=random, dtype=torch.float64).to(dtype)

    lengths = torch.randint(2, COLUMNS + 1, (ROWS,), generator=random)
    mask = torch.arange(COLUMNS) < lengths[:, None]
    if holes:
        mask &= torch.rand(ROWS, COLUMNS, generator=random) > 0.1
        mask[3] = False
    old = -normal().abs()
    advantages = normal()[:, :1].expand(ROWS, COLUMNS).contiguous()
    return {
        "mask": mask.to(dtype),
        "old_logprobs": old,
        "logprobs": old + normal(0.4),
        "reference": old + normal(0.4),
        "rollout_logprobs": old + normal(0.4),
        "advantages": advantages,
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "reward": normal()[:, 0].contiguous(),
        "lengths": lengths,
    }


def pick(batch: Tensors, *names: str) -> Tensors:
    return {name: batch[name] for name in names}


def denominators(mask: Tensor) -> Denominators:
    """Counts of a mini-batch that is one of `STEPS`; the whole batch has some tokens more."""
    counts = loss_counts(mask)
    return Denominators(counts, {"tokens": STEPS * counts["tokens"] + 77}, STEPS)


def with_gradient(loss: Tensor, leaf: Tensor) -> Tensors:
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {"loss": loss.detach(), "gradient": gradient}


def our_loss(x: Tensors, mode: str, *, weights: bool = False, **changes: Any) -> Tensors:
    """The loss that recipes train on, with a penalty where `changes` asks for one."""
    logprobs = x["logprobs"].clone().requires_grad_(True)
    names = ("old_logprobs", "rollout_logprobs", "advantages")
    batch = make_batch(x["mask"] != 0).updated(**pick(x, *names), reference_logprobs=x["reference"])
    config = ClippedPolicyConfig(
        aggregation=mode, norm_tokens=COLUMNS, **CLIP, **changes,
        correction="token_truncate" if weights else "off",
    )  # fmt: skip
    entropy = torch.zeros_like(logprobs)
    output = clipped_policy_loss(logprobs, entropy, batch, denominators(x["mask"]), config)
    found = with_gradient(output.loss, logprobs)
    if config.kl_coefficient:
        total, count = output.means["reference_kl"]
        found["reference_kl"] = total / count
    return found


def verl_penalties(x: Tensors, info: dict[str, dict[str, Any]]) -> dict[str, Comparison]:
    found = {}
    names = ("old_logprobs", "logprobs", "advantages", "mask", "reference")
    weights = correction_weights(
        x["old_logprobs"], x["rollout_logprobs"], x["mask"] != 0, mode="token_truncate"
    )
    for mode, theirs in VERL_MODES.items():
        for estimator in ("k1", "k2", "k3"):
            settings = {
                "mode": theirs, "dual_clip": None, **CLIP, "kl_coefficient": 0.04,
                "kl_estimator": estimator, "global_batch_info": info.get(mode, {}),
            }  # fmt: skip
            for weighted in (False, True):
                inputs = pick(x, *names) | ({"weights": weights} if weighted else {})
                ours = our_loss(x, mode, weights=weighted, kl_coefficient=0.04,
                                kl_estimator=estimator)  # fmt: skip
                name = f"policy loss, {mode}, {estimator} penalty 0.04"
                found[name + (", importance weights" if weighted else "")] = Comparison(
                    Case("policy_loss", inputs, settings), ours
                )
    return found


def verl_policy_losses(x: Tensors) -> dict[str, Comparison]:
    found = {}
    inputs = pick(x, "old_logprobs", "logprobs", "advantages", "mask")
    counts = denominators(x["mask"])
    info = {"seq-sum-norm": {"loss_scale_factor": COLUMNS},
            "batch-token": {"batch_num_tokens": counts.batch["tokens"] / STEPS}}  # fmt: skip
    for mode, theirs in VERL_MODES.items():
        for dual_clip in (None, 3.0, 10.0):
            settings = {"mode": theirs, "dual_clip": dual_clip, **CLIP,
                        "global_batch_info": info.get(mode, {})}  # fmt: skip
            found[f"policy loss, {mode}, dual clip {dual_clip}"] = Comparison(
                Case("policy_loss", inputs, settings), our_loss(x, mode, dual_clip=dual_clip)
            )
    weights = correction_weights(
        x["old_logprobs"], x["rollout_logprobs"], x["mask"] != 0, mode="token_truncate"
    )
    settings = {"mode": "token-mean", "dual_clip": None, **CLIP, "global_batch_info": {}}
    found["policy loss, token-mean, truncated importance weights"] = Comparison(
        Case("policy_loss", {**inputs, "weights": weights}, settings),
        our_loss(x, "token-mean", weights=True),
    )
    return {**found, **verl_penalties(x, info)}


def value_comparisons(x: Tensors) -> dict[str, Comparison]:
    found = {}
    for mode in ("token-mean", "seq-mean-token-mean"):
        for clip in (0.5, 1e30):
            values = x["values"].clone().requires_grad_(True)
            losses = value_losses(
                values, x["old_values"], x["returns"], clip_low=clip, clip_high=clip
            )
            mask = x["mask"]
            ours = with_gradient(aggregate(losses, mask != 0, mode, denominators(mask)), values)
            case = Case(
                "value_loss",
                pick(x, "values", "returns", "old_values", "mask"),
                {"clip": clip, "mode": mode},
            )
            found[f"value loss, {mode}, clip {clip if clip < 1e9 else None}"] = Comparison(
                case, ours
            )
    return found


def gae_comparisons(x: Tensors) -> dict[str, Comparison]:
    found = {}
    mask = x["mask"]
    finished = torch.ones(ROWS, dtype=torch.bool)
    rewards = terminal_rewards(x["reward"], mask, finished)
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (1.0, 0.0)):
        advantages = gae(rewards, x["values"], mask, gamma=gamma, lam=lam)
        ours = {
            "whitened": masked_whiten(advantages, mask),
            "returns": (advantages + x["values"]) * mask,
        }
        inputs = {"token_rewards": rewards, **pick(x, "values", "mask")}
        case = Case("gae", inputs, {"gamma": gamma, "lam": lam})
        found[f"GAE and whitening, gamma {gamma}, lambda {lam}"] = Comparison(case, ours)
    return found


def group_comparison(x: Tensors, seed: int) -> Comparison:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    index = (torch.arange(ROWS) // GROUP)[order]
    mask = torch.arange(COLUMNS) < x["lengths"][:, None]
    rewards = terminal_rewards(x["reward"], mask, torch.ones(ROWS, dtype=torch.bool))
    ours = group_advantages(x["reward"], index)[:, None] * mask
    case = Case(
        "group_advantages",
        {"token_rewards": rewards, "mask": mask.to(x["reward"].dtype), "group_index": index},
    )
    return Comparison(case, {"loop": ours, "vectorized": ours})


def score_comparison(seed: int, temperature: float) -> Comparison:
    """Log-probabilities and entropies of a real model, from its logits there."""
    policy = build_policy(ModelConfig(), seed=seed)
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 50, (8, COLUMNS), generator=random)
    select = torch.ones(ids.shape, dtype=torch.bool)
    select[:, 0] = False
    with torch.no_grad():
        chosen, entropy = TokenScorer(policy.model)(ids, None, select, temperature)
        logits = policy.model(ids, use_cache=False).logits[:, :-1].contiguous()
    shape = (8, COLUMNS - 1)
    ours = {"logprobs": chosen.reshape(shape), "entropy": entropy.reshape(shape)}
    inputs = {"logits": logits, "labels": ids[:, 1:]}
    return Comparison(Case("logprobs", inputs, {"temperature": temperature}), ours)


def verl_comparisons(seed: int, dtype: torch.dtype) -> dict[str, Comparison]:
    x = random_batch(seed, dtype, holes=True)
    mask = x["mask"]
    found = {**verl_policy_losses(x), **value_comparisons(x), **gae_comparisons(x)}
    found["group advantages"] = group_comparison(x, seed)
    found["masked whitening"] = Comparison(
        Case("whiten", {"x": x["values"], "mask": mask}),
        {"whitened": masked_whiten(x["values"], mask)},
    )
    for name in ("k1", "k2", "k3"):
        found[f"KL estimator {name}"] = Comparison(
            Case("kl", pick(x, "logprobs", "reference"), {"estimator": name}),
            {"kl": kl_estimate(x["logprobs"], x["reference"], name)},
        )
    for mode, level, threshold, band in (
        ("token_truncate", "token", 2.0, {}),
        ("sequence_truncate", "sequence", 2.0, {}),
        ("token_mask", "token", "0.5_2.0", {"minimum": 0.5}),
    ):
        weights = correction_weights(
            x["old_logprobs"], x["rollout_logprobs"], mask != 0, mode=mode, **band
        )
        found[f"mismatch correction, {mode}"] = Comparison(
            Case(
                "correction",
                pick(x, "old_logprobs", "rollout_logprobs", "mask"),
                {"level": level, "threshold": threshold},
            ),
            {"weights": weights * mask},
        )
    return found


def trl_comparisons(seed: int, dtype: torch.dtype) -> dict[str, Comparison]:
    x = random_batch(seed, dtype, holes=False)
    inputs = pick(x, "old_logprobs", "logprobs", "reference", "advantages", "mask")
    counts = denominators(x["mask"])
    found = {}
    for mode, loss_type in TRL_MODES.items():
        for dual_clip, beta in ((None, 0.0), (3.0, 0.0), (None, 0.04), (3.0, 0.5)):
            settings = {
                "loss_type": loss_type, "dual_clip": dual_clip, "beta": beta, "steps": STEPS,
                "norm_tokens": COLUMNS, "batch_tokens": counts.batch["tokens"], **CLIP,
            }  # fmt: skip
            name = f"policy loss, {mode} (loss_type {loss_type}), dual clip {dual_clip}"
            found[f"{name}, k3 penalty {beta}"] = Comparison(
                Case("policy_loss", inputs, settings),
                our_loss(x, mode, dual_clip=dual_clip, kl_coefficient=beta),
            )
    return found


def once(peer: str) -> dict[str, Comparison]:
    """Comparisons that are of one type only."""
    found = {
        f"log-probabilities and entropy, temperature {t}": score_comparison(7, t)
        for t in (1.0, 0.7)
    }
    for longest, buffer in ((64, 16), (20480, 4096)):
        last = longest if peer == "verl" else longest + 20
        lengths = torch.tensor(sorted({1, longest - buffer, longest - buffer + 1,
                                       longest - buffer // 2, longest - 1, last}))  # fmt: skip
        ours = overlong_penalty(lengths.numpy(), max_tokens=longest, buffer_tokens=buffer)
        settings = {"max_tokens": longest, "buffer_tokens": buffer}
        found[f"overlong punishment, {longest}/{buffer}"] = Comparison(
            Case("overlong", {"lengths": lengths}, settings), {"penalty": torch.from_numpy(ours)}
        )
    return found


def difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Largest absolute difference, and the largest one over max(1, |value|)."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    gap = (ours.double() - theirs.double()).abs()
    return float(gap.max()), float((gap / theirs.double().abs().clamp(min=1)).max())


def compare(peer: str, python: str) -> dict[str, Any]:
    """Run all comparisons with one peer."""
    build = verl_comparisons if peer == "verl" else trl_comparisons
    plan = {("float32", 0, name): c for name, c in once(peer).items()}
    for dtype in ("float32", "float64"):
        for draw in range(DRAWS):
            found = build(draw, getattr(torch, dtype))
            plan |= {(dtype, draw, name): c for name, c in found.items()}
    cases = {json.dumps(key): c.case for key, c in plan.items()}
    outputs, versions = ask(python, HERE / f"{peer}_side.py", cases)
    functions: dict[str, dict[str, float]] = {}
    for key, comparison in plan.items():
        dtype, _, name = key
        theirs = outputs[json.dumps(key)]
        assert sorted(theirs) == sorted(comparison.ours), name
        for output, value in comparison.ours.items():
            absolute, scaled = difference(value, theirs[output])
            row = functions.setdefault(f"{name}: {output}", {})
            for kind, seen in ((dtype, absolute), (f"{dtype}_scaled", scaled)):
                row[kind] = max(row.get(kind, 0.0), seen)
    worst = max(row["float32_scaled"] for row in functions.values())
    return {
        "versions": versions,
        "differ_by_design": BY_DESIGN[peer],
        "largest_difference": functions,
        "largest_scaled_difference_float32": worst,
    }


def main() -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {"random_draws": DRAWS, "tolerance": TOLERANCE}
    for peer in ("verl", "trl"):
        result[peer] = compare(peer, os.environ[f"{peer.upper()}_PYTHON"])
        for name, row in sorted(result[peer]["largest_difference"].items()):
            print(f"{peer:5}{name:95}", *(f"{k} {v:.1e}" for k, v in row.items()))
    print(write_result("peers", "measured-cpu", result, "tests.benchmarks.peers.equality"))
    worst = {p: result[p]["largest_scaled_difference_float32"] for p in ("verl", "trl")}
    print("largest scaled difference", worst)
    if max(worst.values()) > TOLERANCE:
        raise SystemExit("a function differs from its peer by more than the tolerance")


if __name__ == "__main__":
    main()
