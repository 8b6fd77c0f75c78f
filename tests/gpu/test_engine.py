"""The embedded engine on an accelerator: its log-probabilities, new weights in place, memory."""

import time

import numpy as np
import pytest
import torch

from planish.base.config import load_preset, merge, parse_settings, resolve_config
from planish.base.parallel import Grid
from planish.engines.requests import ModelRef, Request, Sampling
from planish.engines.transformers.engine import TransformersEngine
from planish.engines.weights import DictWeights
from planish.models.experts import on_disk
from planish.models.logprobs import TokenScorer
from planish.models.policy import load_policy
from planish.models.shapes import shape_of
from planish.stages.prepare.memory import engine_parts
from planish.stages.train.config import TrainConfig
from planish.stages.train.trainer import Trainer
from tests.gpu.models import DEVICE, HALF, peak_bytes, save_random
from tests.unit.stages.train.runs import TINY, start_run

SIZES = {"dense": {}, "moe": {"num_experts": 4, "expert_intermediate_size": 32}}
ROWS, TOKENS = 256, 256


def requests_of(count, tokens, vocabulary, temperature=1.0):
    rng = np.random.default_rng(1)
    return [
        Request(
            f"{k}", tuple(rng.integers(4, vocabulary, rng.integers(5, 30)).tolist()),
            Sampling(max_new_tokens=tokens, temperature=temperature, seed=k, ignore_eos=True),
        )
        for k in range(count)
    ]  # fmt: skip


def scores(model, request, output):
    """Log-probabilities of a response under a plain forward pass."""
    ids = torch.tensor([[*request.prompt_ids, *output.token_ids]], device=model.device)
    select = torch.zeros_like(ids, dtype=torch.bool)
    select[0, len(request.prompt_ids) :] = True
    with torch.no_grad():
        return TokenScorer(model)(ids, None, select, 1.0)[0].cpu()


@pytest.mark.parametrize("name", list(SIZES))
def test_sampled_logprobs_are_those_of_the_model_before_and_after_new_weights(name, tmp_path):
    first = start_run(f"file://{tmp_path}/a", **SIZES[name])
    model = load_policy(first.policy_pin, dtype=torch.float32, device=DEVICE).model
    other = load_policy(first.policy_pin, dtype=torch.float32, device=DEVICE).model
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    requests = requests_of(24, 40, first.policy.tokenizer.vocab_size)
    engine = TransformersEngine(max_rows=8, max_model_len=128, device=str(DEVICE))
    engine.start(ModelRef(pin=first.policy_pin))
    for version, present in enumerate((model, other, model)):
        if version:
            weights = on_disk(present.state_dict(), present.config.to_dict())
            del weights["lm_head.weight"]
            engine.update_weights(DictWeights(weights), version)
        for request, output in zip(requests, engine.generate(requests), strict=True):
            gap = scores(present, request, output) - torch.tensor(output.logprobs)
            assert gap.abs().max() < 1e-3
    engine.close()


def test_speed_memory_and_refresh_of_half_a_billion(tmp_path, figures):
    pin = save_random(tmp_path, HALF)
    rows, tokens = ROWS, TOKENS
    overrides = [
        "model.dtype=bfloat16", f"rollout.max_rows={rows}", "rollout.max_prompt_tokens=32",
        f"rollout.max_response_tokens={tokens}", "reward.overlong_buffer_tokens=0",
    ]  # fmt: skip
    config = parse_settings(resolve_config(merge(load_preset("dapo-tiny"), overrides=overrides)))
    requests = requests_of(2 * rows, tokens, HALF.vocabulary)
    engine = TransformersEngine(max_rows=rows, max_model_len=32 + tokens, device=str(DEVICE))
    engine.start(ModelRef(pin=pin))
    engine.generate(requests_of(4, 8, HALF.vocabulary))
    peak_bytes()
    began = time.perf_counter()
    outputs = engine.generate(requests)
    seconds = time.perf_counter() - began
    peak = peak_bytes()
    shape = shape_of(HALF.config().to_dict())
    parts = engine_parts(config, shape, "rollout", 80 << 30, on_cpu=False)
    planned = sum(part.num_bytes for part in parts)
    trainer = Trainer(
        TrainConfig(**{**TINY, "device": "auto", "compute_dtype": "bfloat16"}), pin,
        temperature=1.0, seed=0, grid=Grid(), device=DEVICE,
    )  # fmt: skip
    gaps = []
    with torch.autocast(DEVICE.type, torch.bfloat16):
        model = load_policy(pin, dtype=torch.float32, device=DEVICE).model
        for request, output in list(zip(requests, outputs, strict=True))[:16]:
            gaps.append((scores(model, request, output) - torch.tensor(output.logprobs)).abs())
    weights = {name: p.detach() for name, p in trainer.policy.parameters.items()}
    size = sum(p.numel() * 2 for p in weights.values())
    refreshes, copies = [], []
    for version in range(1, 5):
        torch.cuda.synchronize(DEVICE)
        began = time.perf_counter()
        engine.update_weights(DictWeights(weights), version)
        torch.cuda.synchronize(DEVICE)
        refreshes.append(time.perf_counter() - began)
        began = time.perf_counter()
        copy = [p.to(torch.bfloat16, copy=True) for p in weights.values()]
        torch.cuda.synchronize(DEVICE)
        copies.append(time.perf_counter() - began)
        del copy
    figures["engine transformers Qwen2.5-0.5B"] = {
        "decoder": type(engine._batch.decoder).__name__,
        "rows": rows,
        "tokens_per_second": len(requests) * tokens / seconds,
        "step_seconds": seconds / engine.stats()["steps"],
        "peak_bytes": peak,
        "plan_bytes": {part.name: part.num_bytes for part in parts},
        "peak_over_plan": peak / planned,
        "mean_gap_to_trainer": float(torch.cat(gaps).mean()),
        "refresh_seconds": min(refreshes),
        "refresh_bytes": size,
        "copy_seconds": min(copies),
    }
    engine.close()
    assert all(len(output.token_ids) == tokens for output in outputs)
    assert torch.cat(gaps).mean() < 0.02
    assert 0.8 < peak / planned < 1.1
