"""Supervised training on worked traces, one optimizer step at a time.

This module uses no store and no clock; the caller decides when the steps end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from planish.base import telemetry
from planish.base.errors import ConfigError
from planish.models.logprobs import TokenScorer
from planish.models.policy import Policy
from planish.stages.sft.config import SftConfig
from planish.stages.sft.traces import EncodedTraces, minibatches

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3
"""Optimizer steps in a row, skipped for numbers that are not finite, that end the training."""


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    number: int
    loss: float
    """Mean negative log-probability of the response tokens, natural log."""
    grad_norm: float
    """Global norm before clipping."""
    num_tokens: int
    skipped: bool
    """True if the loss or the gradient was not finite, so that no weight changed."""


def train_steps(
    policy: Policy,
    traces: EncodedTraces,
    config: SftConfig,
    *,
    seed: int,
    learning_rate: float,
    warmup_steps: int,
) -> Iterator[Step]:
    """Train `policy` in place, in its own type and on its own device; yield after each step.

    The loss is the mean over response tokens of a mini-batch. `seed` gives the order of the traces;
    the warm-up to `learning_rate` is linear.

    Raises:
        ConfigError: loss or gradient were not finite in `MAX_SKIPPED_IN_A_ROW` steps in a row.
    """
    device = next(policy.model.parameters()).device
    scorer = TokenScorer(policy.model)
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=(0.9, 0.95),
        weight_decay=config.weight_decay,
        fused=True,
    )
    skipped = 0
    batches = minibatches(traces.lengths, config.traces_per_minibatch, seed)
    for number, rows in enumerate(batches, start=1):
        ids, select = (torch.from_numpy(part).to(device) for part in traces.batch(rows))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, number / max(1, warmup_steps))
        optimizer.zero_grad(set_to_none=True)
        logprobs, _ = scorer(ids, None, select, temperature=1.0, with_entropy=False)
        loss = -logprobs.mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or math.inf)
        is_finite = math.isfinite(loss.item()) and math.isfinite(norm.item())
        step = Step(number, loss.item(), norm.item(), len(logprobs), not is_finite)
        skipped = 0 if is_finite else skipped + 1
        if is_finite:
            optimizer.step()
        elif skipped >= MAX_SKIPPED_IN_A_ROW:
            raise ConfigError(
                f"the loss of supervised training must be finite, got {step.loss} with a "
                f"gradient norm of {step.grad_norm} in {skipped} steps up to step {number}; "
                f"lower the learning rate, now {learning_rate}"
            )
        telemetry.mark_progress()
        yield step


def train_until(
    policy: Policy,
    traces: EncodedTraces,
    config: SftConfig,
    *,
    seed: int,
    measure: Callable[[], float],
) -> dict[str, float]:
    """Train in place until `measure` returns the target accuracy, or to the cap in steps.

    Returns:
        `accuracy` after the last step, `steps`, `loss` (mean since the last measurement but one),
        `num_trained_tokens` and `skipped_steps`.
    """
    losses: list[float] = []
    num_tokens = skipped = 0
    for step in train_steps(
        policy,
        traces,
        config,
        seed=seed,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
    ):
        num_tokens += step.num_tokens
        skipped += step.skipped
        losses += [] if step.skipped else [step.loss]
        at_end = step.number == config.max_steps
        is_due = step.number % config.measure_every == 0 and step.number >= config.measure_after
        if not (at_end or is_due):
            continue
        accuracy = measure()
        loss = sum(losses) / max(1, len(losses))
        losses = []
        logger.info("trained step=%d loss=%.4f accuracy=%.4f", step.number, loss, accuracy)
        if at_end or accuracy >= config.target_accuracy:
            break
    return {
        "accuracy": accuracy,
        "loss": loss,
        "num_trained_tokens": float(num_tokens),
        "skipped_steps": float(skipped),
        "steps": float(step.number),
    }
