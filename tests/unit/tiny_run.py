"""A run root with a few digit sums, as curation would leave it, for the tests of stages."""

import numpy as np

from planish.base.config import config_sha256, resolve_config
from planish.models.config import ModelConfig
from planish.records import layout
from planish.records.io import write_set
from planish.records.prompts import PromptSet, TraceSet, prompt_id
from planish.run.stage import PathArtifact
from planish.store.documents import write_json

TINY_MODEL = {
    "num_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "head_dim": 8,
    "max_model_tokens": 64,
    "alphabet": "0123456789+-=",
}


def tiny_model() -> ModelConfig:
    return ModelConfig(**TINY_MODEL)


def sums(pairs, source="sums"):
    """Prompts `a+b=` whose worked trace is `=<sum>`."""
    messages = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in pairs]
    answers = [str(a + b) for a, b in pairs]
    ids = [prompt_id(m, a) for m, a in zip(messages, answers, strict=True)]
    count = len(ids)
    prompts = PromptSet(
        prompt_id=ids,
        messages=messages,
        answer=answers,
        verifier=["trace"] * count,
        source=[source if a < 5 else f"{source}-high" for a, _ in pairs],
        pass_rate=np.full(count, np.nan, np.float32),
    )
    return prompts, TraceSet(ids, messages, [f"={a}" for a in answers], [source] * count)


def make_run(root, *, initial=None, **tables):
    """Write run.json, prompts and traces; return the digest of the configuration."""
    raw = {
        "model": TINY_MODEL,
        "sft": {
            "max_steps": 6,
            "measure_every": 3,
            "target_accuracy": 1.0,
            "probe_prompts": 4,
            "probe_samples": 2,
            "max_response_tokens": 6,
            "warmup_steps": 2,
            "traces_per_minibatch": 8,
        },
        "evaluate": {
            "num_samples": 3,
            "top_p": 1.0,
            "max_response_tokens": 6,
            "pass_at": [1, 2, 8],
            "num_resamples": 20,
        },
    }
    for name, table in tables.items():
        raw[name] = {**raw.get(name, {}), **table}
    config = resolve_config(raw)
    digest = config_sha256(config)
    empty = {"policy": "", "state": ""}
    run = {"config": config, "config_sha256": digest, "code_version": "0"}
    write_json(layout.run_file(root), {**run, "initial": initial or empty})
    return digest


def write_data(root):
    """Write 36 training prompts with their traces and 12 held-out prompts."""
    train, traces = sums([(a, b) for a in range(1, 7) for b in range(6)])
    held_out, _ = sums([(a, b) for a in range(2, 8) for b in (7, 8)])
    facts = {"parents": {}, "attributes": {"config_sha256": "c"}}
    ref = write_set(layout.prompts(root), train, **facts)
    write_set(layout.evaluation_prompts(root), held_out, **facts)
    write_set(layout.traces(root), traces, **facts)
    return ref


def artifact(tmp_path, name, ref=None):
    """An artifact file; with `ref`, one that an earlier stage has written."""
    path = tmp_path / "artifacts" / name
    path.parent.mkdir(exist_ok=True)
    if ref is not None:
        path.write_text(ref.to_json())
    return PathArtifact(str(path))
