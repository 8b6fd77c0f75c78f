"""What TRL computes on the inputs of `equality.py`; run by the Python of TRL's environment.

`python trl_side.py INPUTS.safetensors OUTPUTS.safetensors`
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from exchange import Tensors, serve
from torch import Tensor
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import entropy_from_logits, selective_log_softmax


def logprobs(x: Tensors, s: dict[str, Any]) -> Tensors:
    return {
        "logprobs": selective_log_softmax(x["logits"], x["labels"], s["temperature"]),
        "entropy": entropy_from_logits(x["logits"] / s["temperature"]),
    }


def overlong(x: Tensors, s: dict[str, Any]) -> Tensors:
    punish = get_soft_overlong_punishment(s["max_tokens"], s["buffer_tokens"])
    found = punish(completion_ids=[[0] * n for n in x["lengths"].tolist()])
    return {"penalty": torch.tensor(found, dtype=torch.float64)}


class OneProcess:
    """What `_compute_loss` asks of accelerate."""

    num_processes = 1

    def reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x


def policy_loss(x: Tensors, s: dict[str, Any]) -> Tensors:
    """`GRPOTrainer._compute_loss` itself, with given log-probabilities in place of a model."""
    given = x["logprobs"].clone().requires_grad_(True)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=OneProcess(),
        args=SimpleNamespace(
            delta=s["dual_clip"],
            steps_per_generation=s["steps"],
            use_bias_correction_kl=False,
        ),
        aux_loss_enabled=False,
        beta=s["beta"],
        current_gradient_accumulation_steps=1,
        epsilon_low=s["clip_low"],
        epsilon_high=s["clip_high"],
        importance_sampling_level="token",
        loss_type=s["loss_type"],
        max_completion_length=s["norm_tokens"],
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (given, given.detach(), None),
    )
    ones = torch.ones(len(given), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.zeros(given.shape, dtype=torch.int64),
        "completion_mask": x["mask"],
        "advantages": x["advantages"][:, 0],
        "old_per_token_logps": x["old_logprobs"],
        "num_items_in_batch": torch.tensor(s["batch_tokens"]),
    }
    if s["beta"]:
        inputs["ref_per_token_logps"] = x["reference"]
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    found = {"loss": loss.detach(), "gradient": given.grad}
    if s["beta"]:
        found["reference_kl"] = given.new_tensor(trainer._metrics["train"]["kl"][0])
    return found


FUNCTIONS = {f.__name__: f for f in (logprobs, overlong, policy_loss)}

if __name__ == "__main__":
    serve(
        FUNCTIONS,
        {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    )
