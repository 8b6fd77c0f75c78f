"""Measure how often a reference policy solves each problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planish.engines.config import EngineConfig
from planish.records.prompts import PromptSet, prompt_id
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.problem import Problem
from planish.verifiers import VerifierOptions


def prompt_set(problems: Sequence[Problem]) -> PromptSet:
    """Return problems as a PromptSet."""
    return PromptSet(
        prompt_id=[prompt_id(p.messages, p.answer) for p in problems],
        messages=[p.messages for p in problems],
        answer=[p.answer for p in problems],
        verifier=[p.verifier for p in problems],
        source=[p.source for p in problems],
        pass_rate=np.array([p.pass_rate for p in problems], dtype=np.float32),
        extra=[p.extra for p in problems] if any(p.extra for p in problems) else None,
    )


def measure_pass_rates(
    problems: Sequence[Problem],
    config: CurateConfig,
    engine_config: EngineConfig,
    seed: int,
    judging: VerifierOptions | None = None,
) -> list[Problem]:
    """Return the problems with `pass_rate` set: the mean accuracy of sampled responses.

    The engine samples at temperature 1 and top-p 1, as in training. A request that it refuses is
    counted as wrong; requests that fail with a lost rank are submitted again.

    Raises:
        EngineError: the reference policy cannot be loaded or sampled.
    """
    from planish.base.parallel import pick_device
    from planish.engines import open_engine
    from planish.engines.measure import generate_rollouts, judge
    from planish.engines.requests import ModelRef, Sampling
    from planish.models.policy import policy_tokenizer

    count = config.pass_rate_samples
    tokenizer = policy_tokenizer(config.pass_rate_policy)
    with open_engine(
        engine_config,
        ModelRef(pin=config.pass_rate_policy),
        max_rows=config.pass_rate_max_rows,
        device=str(pick_device(config.pass_rate_device)),
    ) as engine:
        rollouts = generate_rollouts(
            engine,
            tokenizer,
            prompt_set(problems),
            num_samples=count,
            sampling=Sampling(max_new_tokens=config.pass_rate_max_tokens),
            run_seed=seed,
        )
    verdicts = judge(rollouts, judging or VerifierOptions(), max_error_rate=1.0)
    rates = np.array([verdict.accuracy for verdict in verdicts]).reshape(-1, count).mean(axis=1)
    return [replace(p, pass_rate=float(rate)) for p, rate in zip(problems, rates, strict=True)]
