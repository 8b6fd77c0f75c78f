"""A process in which vLLM guesses tokens by n-grams, for `test_vllm_guesses.py`.

Once numba is loaded, which guesses, this vLLM starts no second time on the CPU: it asks each object
of each module for its `kernel`, and llvmlite's library answers to every name.

python -m tests.contract.engines.guessing KIND
"""

import json
import sys
from dataclasses import replace

from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef, Request, Sampling
from planish.engines.vllm.engine import VllmEngine
from tests.contract.engines.conftest import FAMILIES
from tests.unit.engines.tiny import prompt, qwen3_policy, request

GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
LAWS = ({"temperature": 0.0}, {}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 1.5})
REQUESTS = [replace(request(i, 40, **LAWS[i % 4]), prompt_ids=prompt(i, 6) * 3) for i in range(8)]
REPEATED = prompt(3, 4) * 3
DRAWS = 4000
PAIRS = [
    Request(f"p{i}", REPEATED, Sampling(max_new_tokens=2, ignore_eos=True, seed=i))
    for i in range(DRAWS)
]


def main(kind: str) -> None:
    """Print what is sampled: of `REQUESTS` and one that is refused, and of `PAIRS`."""
    options = {"speculative_config": GUESSES}
    config = EngineConfig(name="vllm", cache_bytes=64 << 20, vllm=options)
    with VllmEngine(max_rows=256, config=config) as engine:
        engine.start(ModelRef(policy=qwen3_policy(**FAMILIES[kind])))
        # Steps without a guess end vLLM where any row has top-k.
        *outputs, alone = engine.generate([*REQUESTS, request(8, 3, top_k=5)])
        stats = engine.stats()
        pairs = [output.token_ids for output in engine.generate(PAIRS)]
    sampled = [[output.token_ids, output.logprobs] for output in outputs]
    rate = stats["tokens"] / stats["row_steps"]
    print(json.dumps({"sampled": sampled, "alone": alone.error, "rate": rate, "pairs": pairs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
