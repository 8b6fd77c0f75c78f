"""Rollout tokens per second of our engine against `generate` of transformers, on the same model.

`python -m tests.benchmarks.bench_rollout` lets the systems take turns and writes
`results/rollout.json`. Ratios are medians over rounds of ours / `generate` within one round.

Every response has a forced length (log-normal, or all equal), end tokens are ignored, both sides
sample at temperature 1 from the whole vocabulary. `generate` gets a stopping criterion per row, so
it ends with its longest row, and need not return log-probabilities; ours does. The third system is
transformers' own continuous batching, timed once on the equal lengths, greedy.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from planish.engines.requests import ModelRef, Request, Sampling
from planish.engines.transformers.engine import TransformersEngine
from planish.models.config import ModelConfig
from planish.models.logprobs import TokenScorer
from planish.models.policy import Policy, build_policy
from tests.benchmarks.facts import write_result

MU, SIGMA, CAP = 3.2, 1.0, 384
"""Log-normal response lengths in tokens."""
EQUAL = 40
PROMPT = 12
TARGETS = {"heavy_tail_256": 6.0, "heavy_tail_64": 2.0, "equal_256": 1.0, "equal_64": 1.0}
LARGEST_GAP = 2e-4


@dataclass(frozen=True)
class Load:
    """One batch of work."""

    prompts: np.ndarray
    """[rows, PROMPT] int64."""
    lengths: np.ndarray
    """[rows] int64, forced response lengths."""

    def requests(self, temperature: float) -> list[Request]:
        return [
            Request(
                str(row),
                tuple(self.prompts[row].tolist()),
                Sampling(int(length), temperature=temperature, ignore_eos=True, seed=row),
            )
            for row, length in enumerate(self.lengths)
        ]


def make_load(case: str, seed: int, vocab_size: int) -> Load:
    rows = int(case.rsplit("_", 1)[1])
    rng = np.random.default_rng(seed)
    lengths = np.full(rows, EQUAL)
    if case.startswith("heavy_tail"):
        lengths = np.clip(rng.lognormal(MU, SIGMA, rows).astype(np.int64), 1, CAP)
    return Load(rng.integers(4, vocab_size, (rows, PROMPT)), lengths)


def run_generate(policy: Policy, load: Load, temperature: float) -> list[list[int]]:
    """transformers' `generate`, each row ending at its own length."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    ends = torch.from_numpy(load.lengths + PROMPT)

    class OwnLength(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids.shape[1] >= ends

    ids = torch.from_numpy(load.prompts)
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": temperature}
    with torch.inference_mode():
        output = policy.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=int(load.lengths.max()),
            stopping_criteria=StoppingCriteriaList([OwnLength()]),
            pad_token_id=0,
            **(sampling if temperature else {"do_sample": False}),
        )
    pairs = zip(output.tolist(), load.lengths.tolist(), strict=True)
    return [row[PROMPT : PROMPT + length] for row, length in pairs]


def run_continuous_batching(policy: Policy, load: Load) -> None:
    """transformers' own continuous batching over a paged cache, greedy."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    config = GenerationConfig(
        max_new_tokens=int(load.lengths.max()), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    policy.model.generate_batch(
        load.prompts.tolist(),
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=1024, num_blocks=256),
        progress_bar=False,
    )


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(case: str, policy: Policy, rounds: int) -> dict[str, Any]:
    """Return tokens per second of both systems and their ratio."""
    rows = int(case.rsplit("_", 1)[1])
    vocab_size = int(policy.model.config.vocab_size)
    engine = TransformersEngine(max_rows=rows)
    engine.start(ModelRef(policy=policy))
    rates: dict[str, list[float]] = {"ours": [], "generate": []}
    for number in range(rounds + 1):
        load = make_load(case, number, vocab_size)
        requests = load.requests(1.0)
        work = {
            "ours": lambda requests=requests: engine.generate(requests),
            "generate": lambda load=load: run_generate(policy, load, 1.0),
        }
        order = sorted(work, reverse=bool(number % 2))
        seconds = {name: timed(work[name]) for name in order}
        if number:  # the first round warms up
            for name, value in seconds.items():
                rates[name].append(int(load.lengths.sum()) / value)
    ratios = [a / b for a, b in zip(rates["ours"], rates["generate"], strict=True)]
    return {
        "tokens_per_second": {k: round(statistics.median(v), 1) for k, v in rates.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_each_round": [round(r, 3) for r in ratios],
        "target": TARGETS[case],
        "met": statistics.median(ratios) >= TARGETS[case],
    }


def check_equality(policy: Policy) -> dict[str, Any]:
    """Compare greedy tokens with `generate`, and sampled log-probabilities with the trainer's."""
    load = make_load("heavy_tail_64", 0, int(policy.model.config.vocab_size))
    engine = TransformersEngine(max_rows=64)
    engine.start(ModelRef(policy=policy))
    greedy = [output.token_ids for output in engine.generate(load.requests(0.0))]
    expected = run_generate(policy, load, 0.0)
    scorer = TokenScorer(policy.model)
    largest = 0.0
    for prompt, output in zip(load.prompts, engine.generate(load.requests(1.0)), strict=True):
        ids = torch.tensor([[*prompt.tolist(), *output.token_ids]])
        select = (torch.arange(ids.shape[1]) >= PROMPT)[None]
        with torch.inference_mode():
            logprobs, _ = scorer(ids, None, select, temperature=1.0, with_entropy=False)
        gap = np.abs(logprobs.numpy() - np.array(output.logprobs)).max()
        largest = max(largest, float(gap))
    return {
        "greedy_rows_equal": sum(a == b for a, b in zip(greedy, expected, strict=True)),
        "greedy_rows": len(greedy),
        "largest_logprob_gap": largest,
        "allowed_logprob_gap": LARGEST_GAP,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each case, >= 3")
    parser.add_argument("--cases", nargs="*", default=sorted(TARGETS), choices=sorted(TARGETS))
    parser.add_argument("--dry", action="store_true", help="print, but write no result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = build_policy(ModelConfig(), 0)
    policy.model.generation_config.eos_token_id = None
    result: dict[str, Any] = {
        "lengths": {"mu": MU, "sigma": SIGMA, "cap": CAP, "equal": EQUAL, "prompt": PROMPT},
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "rounds": arguments.rounds,
        "threads": 1,
        "cases": {},
    }
    for case in arguments.cases:
        result["cases"][case] = measure(case, policy, arguments.rounds)
        print(case, result["cases"][case], flush=True)
    result["equality"] = check_equality(policy)
    print(result["equality"], flush=True)
    load = make_load("equal_64", 0, int(policy.model.config.vocab_size))
    seconds = [timed(lambda: run_continuous_batching(policy, load)) for _ in range(2)]
    result["transformers_continuous_batching"] = {
        "case": "equal_64",
        "tokens_per_second": round(int(load.lengths.sum()) / min(seconds), 1),
    }
    print(result["transformers_continuous_batching"], flush=True)
    equality = result["equality"]
    good = (
        all(case["met"] for case in result["cases"].values())
        and equality["greedy_rows_equal"] == equality["greedy_rows"]
        and equality["largest_logprob_gap"] < LARGEST_GAP
    )
    result["all_met"] = good
    if not arguments.dry:
        print(write_result("rollout", "measured-cpu", result, "tests.benchmarks.bench_rollout"))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
