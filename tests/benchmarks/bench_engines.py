"""Tokens per second of the rollout engines against each other and against plain vLLM, on one model.

`python -m tests.benchmarks.bench_engines` runs in the environment of `make engines`. The systems
take turns; ratios are medians over rounds of one round's. All get the same forced lengths and
seeds, ignore end tokens, sample at temperature 1 and return log-probabilities. Plain vLLM is
`LLM.generate` with the settings of our engine; it is asked for whole responses, ours takes each
token as it comes.

Beside that: seconds from the start of a process to the first token, and (`--part weights`) seconds
to put new weights into a running engine against those of reading their file. The digest of the file
is checked before the engine stands still; its seconds are told apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef, Request
from planish.engines.transformers.engine import TransformersEngine
from planish.engines.vllm.engine import VllmEngine
from planish.models.config import ModelConfig
from planish.models.policy import Policy, build_policy, save_policy
from tests.benchmarks.bench_rollout import CAP, EQUAL, MU, PROMPT, SIGMA, make_load, timed
from tests.benchmarks.facts import require_idle_machine, write_result
from tests.unit.engines.pinned import PinnedWeights

CASES = ("heavy_tail_256", "heavy_tail_64")
CACHE_BYTES = 1 << 28
LARGE = {"num_layers": 17, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
"""Of a model with a gigabyte of float32 weights, with `num_kv_heads` 4 and `head_dim` 64."""


def plain_vllm(folder: Path, rows: int) -> Any:
    """vLLM's own class for batches, with the settings of our engine."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=rows,
        max_num_batched_tokens=4096,
        enable_chunked_prefill=False,
        kv_cache_memory_bytes=CACHE_BYTES,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )


def run_plain(llm: Any, requests: list[Request]) -> None:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests]
    sampling = [
        SamplingParams(
            max_tokens=r.sampling.max_new_tokens,
            ignore_eos=True,
            seed=r.sampling.seed,
            logprobs=0,
            detokenize=False,
        )
        for r in requests
    ]
    llm.generate(prompts, sampling, use_tqdm=False)


def measure(case: str, policy: Policy, folder: Path, rounds: int) -> dict[str, Any]:
    """Return tokens per second of each system and the ratios."""
    rows = int(case.rsplit("_", 1)[1])
    ours = TransformersEngine(max_rows=rows)
    ours.start(ModelRef(policy=policy))
    engine = VllmEngine(max_rows=rows, config=EngineConfig(name="vllm", cache_bytes=CACHE_BYTES))
    engine.start(ModelRef(policy=policy))
    llm = plain_vllm(folder, rows)
    rates: dict[str, list[float]] = {"transformers": [], "vllm": [], "plain vllm": []}
    for number in range(rounds + 1):
        load = make_load(case, number, int(policy.model.config.vocab_size))
        requests = load.requests(1.0)
        work = {
            "transformers": lambda requests=requests: ours.generate(requests),
            "vllm": lambda requests=requests: engine.generate(requests),
            "plain vllm": lambda requests=requests: run_plain(llm, requests),
        }
        names = list(work)
        order = names[number % 3 :] + names[: number % 3]
        seconds = {name: timed(work[name]) for name in order}
        if number:  # the first round warms up
            for name, value in seconds.items():
                rates[name].append(int(load.lengths.sum()) / value)
    engine.close()
    ours.close()
    return {
        "tokens_per_second": {k: round(statistics.median(v), 1) for k, v in rates.items()},
        "transformers_over_vllm": ratio(rates["transformers"], rates["vllm"]),
        "vllm_over_plain_vllm": ratio(rates["vllm"], rates["plain vllm"]),
    }


def ratio(above: list[float], below: list[float]) -> dict[str, Any]:
    each = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": round(statistics.median(each), 3), "rounds": [round(r, 3) for r in each]}


_FIRST_TOKEN = {
    "vllm": (
        "from planish.engines import open_engine\n"
        "from planish.engines.config import EngineConfig\n"
        "from planish.engines.requests import ModelRef, Request, Sampling\n"
        "config = EngineConfig(name='vllm', cache_bytes={cache})\n"
        "with open_engine(config, ModelRef(pin={pin!r}), max_rows=64) as engine:\n"
        "    engine.generate([Request('a', 'a', (5, 6), Sampling(1))])\n"
    ),
    "plain vllm": (
        "from pathlib import Path\n"
        "from tests.benchmarks.bench_engines import plain_vllm\n"
        "from vllm import SamplingParams\n"
        "llm = plain_vllm(Path({folder!r}), 64)\n"
        "prompts, one = [dict(prompt_token_ids=[5, 6])], SamplingParams(max_tokens=1)\n"
        "llm.generate(prompts, one, use_tqdm=False)\n"
    ),
}


def first_token(pin: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Return seconds from the start of a process to its first token."""
    seconds: dict[str, list[float]] = {name: [] for name in _FIRST_TOKEN}
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for number in range(rounds + 1):
        for name, code in _FIRST_TOKEN.items():
            text = code.format(cache=CACHE_BYTES, pin=pin, folder=str(folder))
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", text], check=True, env=environment, capture_output=True
            )
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return {
        "seconds": {k: round(statistics.median(v), 2) for k, v in seconds.items()},
        "vllm_over_plain_vllm": ratio(seconds["vllm"], seconds["plain vllm"]),
    }


def new_weights(scratch: Path, rounds: int) -> dict[str, Any]:
    """Return how long a gigabyte of weights takes into a running engine."""
    sizes = ModelConfig(num_kv_heads=4, head_dim=64, **LARGE)
    pins = [
        save_policy(
            (scratch / f"large-{seed}").as_uri(),
            build_policy(sizes, seed),
            version=seed,
            parents={},
            attributes={},
        ).pin()
        for seed in (0, 1)
    ]
    config = EngineConfig(name="vllm", cache_bytes=CACHE_BYTES)
    engine = VllmEngine(max_rows=4, config=config)
    engine.start(ModelRef(pin=pins[0]))
    files = sorted((scratch / "large-1").glob("*.safetensors"))
    update: list[float] = []
    read: list[float] = []
    check: list[float] = []
    for number in range(rounds + 1):
        source = PinnedWeights(pins[1])
        seconds_of_check = timed(source.fetch)
        seconds = timed(lambda source=source, number=number: engine.update_weights(source, number))
        plain = timed(lambda: [path.read_bytes() for path in files])
        if number:
            update.append(seconds)
            read.append(plain)
            check.append(seconds_of_check)
    engine.close()
    return {
        "bytes": sum(path.stat().st_size for path in files),
        "seconds": {
            "update": round(statistics.median(update), 3),
            "read": round(statistics.median(read), 3),
            "check of the digest": round(statistics.median(check), 3),
        },
        "update_over_read": ratio(update, read),
    }


def speed(scratch: Path, rounds: int) -> dict[str, Any]:
    """Return tokens per second, and seconds to the first token, on the demo's model."""
    policy, folder = build_policy(ModelConfig(), 0), scratch / "policy"
    ref = save_policy(folder.as_uri(), policy, version=0, parents={}, attributes={})
    result: dict[str, Any] = {
        "lengths": {"mu": MU, "sigma": SIGMA, "cap": CAP, "equal": EQUAL, "prompt": PROMPT},
        "first_token": first_token(ref.pin(), folder, 3),
        "cases": {},
    }
    print(result["first_token"], flush=True)
    for case in CASES:
        result["cases"][case] = measure(case, policy, folder, rounds)
        print(case, result["cases"][case], flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each case, >= 3")
    parser.add_argument("--part", choices=("speed", "weights"), help="both when absent")
    parser.add_argument("--dry", action="store_true", help="print, but write no result")
    arguments = parser.parse_args()
    require_idle_machine()
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="planish-bench-") as name:
        if arguments.part != "weights":
            results["engines"] = speed(Path(name), arguments.rounds)
        if arguments.part != "speed":
            results["engine_weights"] = new_weights(Path(name), arguments.rounds)
            print(results["engine_weights"], flush=True)
    if not arguments.dry:
        for stored, result in results.items():
            result |= {"rounds": arguments.rounds, "threads": 1}
            print(write_result(stored, "measured-cpu", result, "tests.benchmarks.bench_engines"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
