"""Control arm of a finished run: further supervised training for the same time.

    python -m planish.stages.sft.control file:///runs/a 60

It is no task of the pipeline: the clock ends it, so it can not be repeated bit for bit.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from planish.base.config import parse_section
from planish.base.errors import PlanishError, exit_code
from planish.base.startup import spare_collections
from planish.models.config import ModelConfig
from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.prompts import PromptSet, TraceSet
from planish.run.stage import read_run
from planish.stages.sft.config import SftConfig
from planish.verifiers import VerifierOptions

logger = logging.getLogger(__name__)

LEARNING_RATE = 1e-3
"""Learning rate of the control; lower than in the cold start, since the policy now converges."""


def measure_control(root: str, seconds: float) -> dict[str, float]:
    """Train the first policy of a run further for some seconds, and measure on held-out prompts.

    `seconds` is wall time of training, without loading and measuring.

    Returns:
        `accuracy` (avg@n as the evaluate stage measures it), `greedy`, `steps`, `seconds`.
    """
    import torch

    from planish.base.parallel import pick_device
    from planish.engines.config import EngineConfig
    from planish.models.policy import DTYPES, load_policy
    from planish.stages.sft.probe import Probe
    from planish.stages.sft.traces import start_traces
    from planish.stages.sft.training import train_steps

    tables: dict[str, dict[str, Any]] = read_run(root)["config"]
    config = parse_section(SftConfig, tables.get("sft", {}), section="sft")
    engine = parse_section(EngineConfig, tables.get("engine", {}), section="engine")
    served = parse_section(ModelConfig, tables.get("model", {}), section="model").dtype
    seed, measured = int(tables["run"]["seed"]), tables["evaluate"]
    config = config.model_copy(update={"max_response_tokens": measured["max_response_tokens"]})
    torch.set_num_threads(config.num_threads)
    uri = layout.policy(root, 0)
    pin = read_manifest(uri).ref(uri).pin()
    policy = load_policy(pin, dtype=torch.float32, device=pick_device(config.device))
    learnt = read_set(PromptSet, layout.prompts(root))
    _, traces = start_traces(learnt, read_set(TraceSet, layout.traces(root)), policy, config)
    warmup = config.warmup_steps
    steps = train_steps(
        policy, traces, config, seed=seed, learning_rate=LEARNING_RATE, warmup_steps=warmup
    )
    begin, number = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        number = next(steps).number
    spent = time.monotonic() - begin
    prompts = read_set(PromptSet, layout.evaluation_prompts(root))
    judging = VerifierOptions.of(tables.get("reward", {}))
    dtype = DTYPES[served]
    with Probe(policy, config, engine, run_seed=seed, dtype=dtype, judging=judging) as probe:
        accuracy = probe.accuracy(
            prompts,
            num_samples=int(measured["num_samples"]),
            temperature=float(measured["temperature"]),
            top_p=float(measured["top_p"]),
        )
        greedy = probe.accuracy(prompts, num_samples=1, temperature=0.0)
    return {
        "accuracy": accuracy,
        "greedy": greedy,
        "learning_rate": LEARNING_RATE,
        "num_traces": float(len(traces.tokens)),
        "seconds": spent,
        "steps": float(number),
    }


def main(root: str, seconds: str) -> int:
    """Print the control as one line of JSON."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    try:
        measured = measure_control(root, float(seconds))
    except PlanishError as error:
        logger.error("failed error=%s", error)
        return exit_code(error)
    sys.stdout.write(json.dumps(measured, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    spare_collections()
    raise SystemExit(main(*sys.argv[1:]))
