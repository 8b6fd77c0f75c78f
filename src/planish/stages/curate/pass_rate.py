"""Measure how often a reference policy solves each problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planish.records.io import fetch_files
from planish.records.prompts import prompt_id
from planish.records.refs import parse_pin
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.problem import Problem
from planish.verifiers import verify_many


def measure_pass_rates(
    problems: Sequence[Problem], config: CurateConfig, seed: int
) -> list[Problem]:
    """Return the problems with `pass_rate` set: the mean accuracy of sampled responses.

    Temperature 1 and no cut of the distribution, as in training. A response that the engine could
    not finish counts as wrong.

    Raises:
        EngineError: the reference policy cannot be loaded or sampled.
    """
    from planish.engines import open_engine
    from planish.engines.requests import Request, Sampling
    from planish.engines.sampling import request_seed
    from planish.models.tokens import load_tokenizer

    count = config.pass_rate_samples
    uri, digest = parse_pin(config.pass_rate_policy)
    tokenizer = load_tokenizer(fetch_files(uri, sha256=digest, schema="policy/1"))
    with open_engine(config.pass_rate_engine, config.pass_rate_policy) as engine:
        requests = []
        for problem in problems:
            tokens = tuple(tokenizer.encode_prompt(problem.messages))
            name = prompt_id(problem.messages, problem.answer)
            for sample in range(count):
                sampling = Sampling(
                    seed=request_seed(seed, 0, name, sample),
                    max_new_tokens=config.pass_rate_max_tokens,
                )
                requests.append(Request(f"{name}-{sample:03d}", name, tokens, sampling))
        texts = [tokenizer.decode(output.token_ids) for output in engine.generate(requests)]
    verdicts = verify_many(
        (problem.verifier, texts[number * count + sample], problem.answer)
        for number, problem in enumerate(problems)
        for sample in range(count)
    )
    right = [verdict.accuracy for verdict in verdicts]
    return [
        replace(problem, pass_rate=sum(right[n * count : (n + 1) * count]) / count)
        for n, problem in enumerate(problems)
    ]
