"""What one accelerator takes for a training step: memory against the plan, and seconds."""

import statistics
import time

import pytest
import torch

from planish.algorithms import build_algorithm
from planish.algorithms.base import Denominators
from planish.base.config import load_preset, merge, parse_section, parse_settings, resolve_config
from planish.base.parallel import Grid
from planish.models.policy import load_policy
from planish.models.shapes import shape_of
from planish.stages.prepare.memory import Sharing, train_parts
from planish.stages.train.config import TrainConfig
from planish.stages.train.trainer import Trainer
from tests.gpu.models import (
    DEVICE,
    HALF,
    ONE_AND_A_HALF,
    PEAK_FLOPS,
    peak_bytes,
    save_random,
    uneven_batch,
)

ROWS, PROMPT, LONGEST = 64, 256, 3840
BUDGET = 24_576
STEPS = 3


def seconds_of(call, times=STEPS):
    """Median seconds of a call after one to warm up."""
    found = []
    for _ in range(1 + times):
        torch.cuda.synchronize(DEVICE)
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(DEVICE)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def model_flops(size, batch):
    """Floating-point operations of a forward and a backward pass, nothing computed again.

    Source: PaLM, arXiv 2204.02311, appendix B; attention sees half of the square, and the LM head
    the tokens of responses alone.
    """
    shape = shape_of(size.config().to_dict())
    lengths = batch.attention_mask.sum(1).double()
    outer = shape.vocab_size * shape.hidden_size
    body = shape.layers * shape.layer_parameters
    squares = float((lengths**2).sum()) / 2
    products = body * float(lengths.sum()) + outer * float(batch.policy_mask.sum())
    return 6 * products + 12 * shape.layers * shape.q_size * squares


class Bare:
    """What one writes by hand: padded rows, autocast, logits of response tokens, AdamW."""

    def __init__(self, pin, checkpointing):
        self.model = load_policy(pin, dtype=torch.float32).model.to(DEVICE)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def step(self, batch):
        lengths = batch.attention_mask.sum(1)
        size = max(1, BUDGET // int(lengths.max()))
        total = float(batch.policy_mask.sum())
        for rows in torch.argsort(lengths, descending=True).split(size):
            width = int(lengths[rows].max())
            ids, mask, old, gain = (
                x[rows, :width].to(DEVICE)
                for x in (batch.input_ids, batch.policy_mask, batch.old_logprobs, batch.advantages)
            )
            with torch.autocast(DEVICE.type, torch.bfloat16):
                hidden = self.model.model(ids, use_cache=False).last_hidden_state
                logits = self.model.lm_head(hidden[:, :-1][mask[:, 1:]]).float()
            chosen = torch.log_softmax(logits, -1).gather(-1, ids[mask][:, None]).squeeze(-1)
            ratio = (chosen - old[mask]).exp()
            gains = gain[mask]
            losses = torch.max(-gains * ratio, -gains * ratio.clamp(0.8, 1.28))
            (losses.sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("size", "checkpointing", "has_peer"),
    [(HALF, False, False), (HALF, True, True), (ONE_AND_A_HALF, True, False)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_a_step_takes_the_memory_that_is_planned(size, checkpointing, has_peer, tmp_path, figures):
    overrides = [
        "train.compute_dtype=bfloat16", "train.deterministic=false",
        f"train.activation_checkpointing={str(checkpointing).lower()}",
        f"train.tokens_per_microbatch={BUDGET}", f"rollout.max_prompt_tokens={PROMPT}",
        f"rollout.max_response_tokens={LONGEST}", "reward.overlong_buffer_tokens=0",
    ]  # fmt: skip
    config = resolve_config(merge(load_preset("dapo-tiny"), overrides=overrides))
    settings = parse_section(TrainConfig, config["train"], section="train")
    algorithm = build_algorithm({"name": "dapo"})
    batch = uneven_batch(ROWS, prompt=PROMPT, longest=LONGEST, vocabulary=size.vocabulary)
    batch = algorithm.advantages(batch)
    counts = algorithm.counts(batch)
    pin = save_random(tmp_path, size)

    def loss(logprobs, entropy, micro):
        return algorithm.loss(logprobs, entropy, micro, Denominators(counts, counts, 1))

    began = time.perf_counter()
    trainer = Trainer(settings, pin, temperature=1.0, seed=0, grid=Grid(), device=DEVICE)
    opened = time.perf_counter() - began
    peak_bytes()
    scored = seconds_of(lambda: trainer.logprobs(batch), 2)
    scoring_peak = peak_bytes()
    stepped = seconds_of(lambda: trainer.step(batch, loss, learning_rate=1e-6))
    peak = peak_bytes()
    trainer.close()
    torch.cuda.empty_cache()
    shape, alone = shape_of(size.config().to_dict()), Sharing(1, 1, gathers=False)
    parts = train_parts(parse_settings(config), shape, alone, on_cpu=False)
    planned = sum(part.num_bytes for part in parts)
    found = {
        "plan_bytes": {part.name: part.num_bytes for part in parts},
        "peak_bytes": peak,
        "peak_over_plan": peak / planned,
        "scoring_peak_bytes": scoring_peak,
        "open_seconds": opened,
        "step_seconds": stepped,
        "score_seconds": scored,
        "tokens": int(batch.attention_mask.sum()),
        "tokens_per_second": float(batch.attention_mask.sum()) / stepped,
        "mfu": model_flops(size, batch) / stepped / PEAK_FLOPS,
    }
    if has_peer:
        bare = Bare(pin, checkpointing)
        peak_bytes()
        found["bare_padded_step_seconds"] = seconds_of(lambda: bare.step(batch))
        found["bare_padded_peak_bytes"] = peak_bytes()
        found["speed_over_bare_padded"] = found["bare_padded_step_seconds"] / stepped
    figures[f"train {size.name} checkpointing={str(checkpointing).lower()}"] = found
    assert 0.8 < peak / planned < 1.1
