"""Dynamic sampling over responses with a heavy tail of lengths, without a model.

A prompt is solved always, never or sometimes; the lengths of responses are log-normal, as those of
reasoning models are. What is real: the rounds, their order, the engine's queue and rows.
"""

import itertools
import statistics
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef, Request
from planish.models.config import ModelConfig
from planish.models.policy import build_policy
from planish.records.prompts import PromptSet, prompt_id
from planish.stages.rollout.commits import Commits
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.generate import GroupSampler
from planish.stages.rollout.sampler import Batch, LookAhead, draw_batch
from planish.verifiers import VERIFIERS
from planish.verifiers.judging import Judging
from planish.verifiers.verdict import Verdict, VerifierOptions
from tests.unit.stages.rollout.scripted_engine import EOS, ScriptedEngine, scripted_token

LONGEST = 512
MEDIAN = 40
SIGMA = 1.0
FATES = ("all", "none", "some")


def verify_fate(response: str, answer: str, options: VerifierOptions) -> Verdict:
    """Right always, never, or for half of the texts."""
    is_right = answer == "all" or (answer == "some" and zlib.crc32(response.encode()) % 2 == 0)
    return Verdict(accuracy=float(is_right), extracted=response[:8])


def tail_length(seed: int) -> int:
    """Length of a response in tokens: log-normal, the same for a seed."""
    quantile = (seed % 999_983 + 0.5) / 999_983
    drawn = statistics.NormalDist().inv_cdf(quantile)
    return int(min(LONGEST, max(2, round(MEDIAN * float(np.exp(SIGMA * drawn))))))


def tail_token(seed: int, position: int) -> int:
    return EOS if position + 1 == tail_length(seed) else max(4, scripted_token(seed, position))


class TailEngine(ScriptedEngine):
    """Responses of `tail_length`."""

    token = staticmethod(tail_token)

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.max_model_len = 4096

    def _load(self, model: ModelRef) -> int:
        return 0

    def _check(self, request: Request) -> str:
        return ""


@dataclass
class Drawn:
    """One batch."""

    batch: Batch
    steps: int
    """Decode steps of the engine."""
    row_steps: int
    """Living rows, summed over the steps."""
    num_used_tokens: int
    """Tokens of the groups of the batch's own rounds."""


def draw(
    folder: Path,
    *,
    look_ahead: bool,
    seed: int = 0,
    num_groups: int = 16,
    group_size: int = 8,
    factor: float = 1.5,
    max_rows: int = 64,
    shrink_rounds: bool = True,
) -> Drawn:
    """Draw one batch, with the next round's prompts in free rows or without."""
    config = RolloutConfig(
        prompts_per_iteration=num_groups,
        group_size=group_size,
        max_response_tokens=LONGEST,
        generation_prompts_factor=factor,
        shrink_rounds=shrink_rounds,
        max_generation_rounds=0,
        max_rows=max_rows,
        commit_steps=0,
    )
    asks = [[{"role": "user", "content": f"{k}"}] for k in range(300)]
    answers = [FATES[(7 * k + k // 3) % 3] for k in range(300)]
    prompts = PromptSet(
        prompt_id=[prompt_id(m, a) for m, a in zip(asks, answers, strict=True)],
        messages=asks,
        answer=answers,
        verifier=["fate"] * 300,
        source=["tails"] * 300,
        pass_rate=np.full(300, np.nan, np.float32),
    )
    tokenizer = build_policy(ModelConfig(num_layers=1), 0).tokenizer
    engine = TailEngine(max_rows=max_rows, device="cpu", config=EngineConfig())
    engine.start(ModelRef())
    commits = Commits((folder / "commits").as_uri(), parents={}, facts={})
    sampler = GroupSampler(
        engine,
        tokenizer,
        prompts,
        config,
        commits,
        seed=seed,
        iteration=1,
        judging=Judging(VerifierOptions()),
    )
    sampler.go_on(num_groups)

    def sample(ordinals, ahead):
        return sampler(ordinals, ahead if look_ahead else LookAhead([], lambda ended: 0))

    VERIFIERS["fate"] = "tests.unit.stages.rollout.tails:verify_fate"
    try:
        batch = draw_batch(itertools.count(), sample, num_groups, config)
    finally:
        del VERIFIERS["fate"]
    num_used = sum(group.num_tokens for group in batch.generated())
    counts = engine.counts
    engine.close()
    return Drawn(batch, counts["steps"], counts["row_steps"], num_used)
