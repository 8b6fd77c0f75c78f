"""Plans of tiny models, written by the command that people use."""

import json
from pathlib import Path

from planish.__main__ import main

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 54,
}
"""The model of `instances.moe_policy("Qwen3Moe")`, as far as plans ask."""


def tiny_plan(folder: Path, *options: str) -> Path:
    """Return the document of a plan of two replicas, two expert nodes and three micro-batches."""
    config, path = folder / "config.json", folder / "plan.json"
    config.write_text(json.dumps(CONFIG))
    words = ["--model", config, "--attention-gpus", "h100", "--expert-gpus", "h100"]
    sizes = "--tp-a 1 --tp-e 1 --expert-nodes 2 --replicas 2 --micro-batches 3 --batch 12"
    arguments = [*map(str, words), *sizes.split(), *options, "--json", str(path)]
    assert main(["rollout", "plan", *arguments]) == 0
    return path
