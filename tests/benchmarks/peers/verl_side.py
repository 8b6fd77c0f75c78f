"""What verl computes on the inputs of `equality.py`; run by the Python of verl's environment.

`python verl_side.py INPUTS.safetensors OUTPUTS.safetensors`
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl
from exchange import Tensors, serve
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import torch_functional
from verl.workers.config import ActorConfig
from verl.workers.reward_manager.dapo import DAPORewardManager

NO_DUAL_CLIP = 1e30


def gae(x: Tensors, s: dict[str, Any]) -> Tensors:
    advantages, returns = core_algos.compute_gae_advantage_return(
        x["token_rewards"], x["values"], x["mask"], s["gamma"], s["lam"]
    )
    # Outside the mask verl repeats the next token's; only masked tokens are compared.
    return {"whitened": advantages * x["mask"], "returns": returns * x["mask"]}


def group_advantages(x: Tensors, s: dict[str, Any]) -> Tensors:
    found = {}
    for name, function in (
        ("loop", core_algos.compute_grpo_outcome_advantage),
        ("vectorized", core_algos.compute_grpo_vectorized_outcome_advantage),
    ):
        found[name], _ = function(
            x["token_rewards"].clone(), x["mask"], x["group_index"].numpy().astype(np.int64)
        )
    return found


def policy_loss(x: Tensors, s: dict[str, Any]) -> Tensors:
    logprobs = x["logprobs"].clone().requires_grad_(True)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=s["clip_low"],
        clip_ratio_high=s["clip_high"],
        clip_ratio_c=s["dual_clip"] or NO_DUAL_CLIP,
    )
    config.global_batch_info.update(s["global_batch_info"])
    weights = x.get("weights")
    loss, _ = core_algos.compute_policy_loss_vanilla(
        x["old_logprobs"],
        logprobs,
        x["advantages"],
        x["mask"],
        loss_agg_mode=s["mode"],
        config=config,
        rollout_is_weights=weights,
    )
    found = {}
    if s.get("kl_coefficient"):
        # As `ppo_loss` of verl's workers adds it.
        divergence = core_algos.kl_penalty(logprobs, x["reference"], s["kl_estimator"])
        penalty = core_algos.agg_loss(divergence, x["mask"], s["mode"], **config.global_batch_info)
        loss = loss + s["kl_coefficient"] * penalty
        found["reference_kl"] = core_algos.agg_loss(divergence.detach(), x["mask"], "token-mean")
    loss.backward()
    return {**found, "loss": loss.detach(), "gradient": logprobs.grad}


def value_loss(x: Tensors, s: dict[str, Any]) -> Tensors:
    values = x["values"].clone().requires_grad_(True)
    loss, _ = core_algos.compute_value_loss(
        values,
        x["returns"],
        x["old_values"],
        x["mask"],
        cliprange_value=s["clip"],
        loss_agg_mode=s["mode"],
    )
    loss.backward()
    return {"loss": loss.detach(), "gradient": values.grad}


def kl(x: Tensors, s: dict[str, Any]) -> Tensors:
    return {"kl": core_algos.kl_penalty(x["logprobs"], x["reference"], s["estimator"])}


def whiten(x: Tensors, s: dict[str, Any]) -> Tensors:
    return {"whitened": torch_functional.masked_whiten(x["x"], x["mask"]) * x["mask"]}


def logprobs(x: Tensors, s: dict[str, Any]) -> Tensors:
    scores = x["logits"] / s["temperature"]
    return {
        "logprobs": torch_functional.logprobs_from_logits(scores, x["labels"]),
        "entropy": torch_functional.entropy_from_logits(scores),
    }


def correction(x: Tensors, s: dict[str, Any]) -> Tensors:
    weights, _ = compute_rollout_correction_weights(
        x["old_logprobs"] - x["rollout_logprobs"],
        x["mask"],
        rollout_is=s["level"],
        rollout_is_threshold=s["threshold"],
    )
    return {"weights": weights * x["mask"]}


class NoText:
    """A tokenizer for a reward that reads no text."""

    eos_token = "</s>"

    def decode(self, ids: Tensor, skip_special_tokens: bool) -> str:
        return ""


def overlong(x: Tensors, s: dict[str, Any]) -> Tensors:
    lengths, longest = x["lengths"], s["max_tokens"]
    manager = DAPORewardManager(
        NoText(),
        num_examine=0,
        compute_score=lambda **_: 0.0,
        max_resp_len=longest,
        overlong_buffer_cfg=SimpleNamespace(
            enable=True, len=s["buffer_tokens"], penalty_factor=1.0, log=False
        ),
    )
    rows, width = len(lengths), int(lengths.max())
    responses = torch.zeros(rows, width, dtype=torch.int64)
    mask = (torch.arange(width) < lengths[:, None]).long()
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(rows, 1, dtype=torch.int64),
            "responses": responses,
            "attention_mask": torch.cat([torch.ones(rows, 1, dtype=torch.int64), mask], 1),
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": ""}] * rows, dtype=object),
            "data_source": np.array(["none"] * rows, dtype=object),
        },
    )
    return {"penalty": manager(data).sum(1)}


FUNCTIONS = {
    f.__name__: f
    for f in (
        gae,
        group_advantages,
        policy_loss,
        value_loss,
        kl,
        whiten,
        logprobs,
        correction,
        overlong,
    )
}

if __name__ == "__main__":
    serve(FUNCTIONS, {"verl": verl.__version__, "torch": torch.__version__})
