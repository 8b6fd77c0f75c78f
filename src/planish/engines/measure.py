"""Measurement of a policy's accuracy: sample responses to prompts and verify them.

It is used outside training: it filters no group and shapes no reward.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from planish.base.errors import EngineError, VerifierFailure
from planish.engines.requests import Request, Sampling
from planish.engines.sampling import request_seed
from planish.models.tokens import Tokenizer
from planish.records.prompts import PromptSet
from planish.records.ragged import Ragged
from planish.records.rollouts import RolloutSet
from planish.verifiers import Verdict, VerifierOptions, verify_many

if TYPE_CHECKING:
    from planish.engines.base import BaseEngine

logger = logging.getLogger(__name__)

MEASURING = 0
"""Value that replaces the iteration in seeds; no training iteration has this number."""

MOST_REPEATS = 3
"""Most repetitions of a response that was lost with a part of the engine."""


def generate_rollouts(
    engine: BaseEngine,
    tokenizer: Tokenizer,
    prompts: PromptSet,
    *,
    num_samples: int,
    sampling: Sampling,
    run_seed: int,
) -> RolloutSet:
    """Sample `num_samples` responses to each of P prompts, as P groups.

    The noise of a response depends only on (run seed, prompt id, sample index), so two policies get
    the same noise; the seed of `sampling` is replaced. Requests that the engine refuses have no
    tokens and finish as ABORT. Requests that are lost with a part of the engine are repeated.

    Raises:
        EngineError: requests were lost too often; the message names them.
    """
    prompt_tokens = [tokenizer.encode_prompt(messages) for messages in prompts.messages]
    requests = [
        Request(
            request_id=f"{prompt}-{sample:03d}",
            prompt_ids=tuple(tokens),
            sampling=replace(sampling, seed=request_seed(run_seed, MEASURING, prompt, sample)),
        )
        for tokens, prompt in zip(prompt_tokens, prompts.prompt_id, strict=True)
        for sample in range(num_samples)
    ]
    outputs = engine.generate(requests)
    for repeat in range(MOST_REPEATS + 1):
        lost = [row for row, output in enumerate(outputs) if output.is_lost]
        if not lost:
            break
        reason = outputs[lost[0]].error
        if repeat == MOST_REPEATS:
            raise EngineError(
                f"every response of a measurement must be sampled, got {len(lost)} of "
                f"{len(outputs)} lost after {MOST_REPEATS} repeats ({reason}); mend the engine's "
                "ranks and measure again"
            )
        logger.warning("asking again num_requests=%d reason=%s", len(lost), reason)
        again = engine.generate([requests[row] for row in lost])
        for row, output in zip(lost, again, strict=True):
            outputs[row] = output
    groups = np.repeat(np.arange(prompts.num_rows, dtype=np.int32), num_samples)
    return RolloutSet(
        group_index=groups,
        sample_index=np.tile(np.arange(num_samples, dtype=np.int32), prompts.num_rows),
        prompt_tokens=Ragged.from_lists(prompt_tokens, np.int32),
        response_tokens=Ragged.from_lists([o.token_ids for o in outputs], np.int32),
        rollout_logprobs=Ragged.from_lists([o.logprobs for o in outputs], np.float32),
        policy_version=Ragged.from_lists([o.versions for o in outputs], np.int32),
        window_start=np.zeros(len(outputs), dtype=np.int32),
        finish=np.array([o.finish_reason for o in outputs], dtype=np.int8),
        rollout_id=[o.request_id for o in outputs],
        prompt_id=[prompts.prompt_id[group] for group in groups],
        response=[
            tokenizer.opened_thought(prompt_tokens[group]) + tokenizer.decode(output.token_ids)
            for group, output in zip(groups, outputs, strict=True)
        ],
        answer=[prompts.answer[group] for group in groups],
        verifier=[prompts.verifier[group] for group in groups],
        extra=[prompts.extra[group] for group in groups] if prompts.extra else None,
    )


def judge(
    rollouts: RolloutSet, options: VerifierOptions, *, max_error_rate: float = 0.01
) -> list[Verdict]:
    """Return the verdict on every rollout; if a verifier fails, the rollout counts as wrong.

    Raises:
        VerifierFailure: more rows failed than `max_error_rate` allows, or a verifier hangs.
    """
    verdicts = verify_many(rollouts.to_verify(), options)
    check_errors(verdicts, max_error_rate)
    return verdicts


def check_errors(verdicts: Sequence[Verdict], max_error_rate: float) -> None:
    """Raise VerifierFailure if more verdicts are failures of verifiers than allowed."""
    errors = [verdict for verdict in verdicts if verdict.error]
    if len(errors) > max_error_rate * len(verdicts):
        raise VerifierFailure(
            f"at most {max_error_rate:.1%} of verifications may fail, got {len(errors)} of "
            f"{len(verdicts)}; "
            + (errors[0].reason or "check the answers of these prompts, and their `verifier`")
        )
