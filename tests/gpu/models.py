"""The device of these tests, and models of published sizes with random weights."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from planish.algorithms.base import TrainBatch
from planish.models.policy import Policy, save_policy
from planish.models.tokens import character_tokenizer
from tests.unit.algorithms.batches import random_batch

DEVICE = torch.device("cuda")

PEAK_FLOPS = 989e12
"""Dense bfloat16 products of an H100 or H200 SXM a second. Source: NVIDIA's data sheets."""


@dataclass(frozen=True)
class Size:
    """A decoder of Qwen2.5's form."""

    name: str
    hidden: int
    wide: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936

    def config(self):
        """The configuration of transformers."""
        import transformers

        return transformers.Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.wide,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
            eos_token_id=2,
            pad_token_id=0,
        )


HALF = Size("Qwen2.5-0.5B", 896, 4864, 24, 14, 2)
ONE_AND_A_HALF = Size("Qwen2.5-1.5B", 1536, 8960, 28, 12, 2)


def save_random(folder: Path, size: Size) -> str:
    """Write a policy of this size in bfloat16; returns its pin."""
    import transformers

    with torch.device(DEVICE), torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Qwen2ForCausalLM(size.config()).to(torch.bfloat16)
    policy = Policy(model.cpu().eval(), character_tokenizer("0123456789 abc"))
    place = (folder / size.name).as_uri()
    return save_policy(place, policy, version=0, parents={}, attributes={}).pin()


def uneven_batch(rows: int, *, prompt: int, longest: int, vocabulary: int) -> TrainBatch:
    """Rollouts with prompts of one length and log-normal responses, the first one the longest."""
    rng = np.random.default_rng(0)
    responses = rng.lognormal(np.log(0.4 * longest), 0.7, rows).astype(int).clip(8, longest)
    responses[0] = longest
    logprob = -np.log(vocabulary)
    return random_batch(rng, prompt, responses, vocabulary=vocabulary, logprob=logprob)


def peak_bytes() -> int:
    """The most memory of the device that tensors have had at once since the last call."""
    peak = torch.cuda.max_memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    return peak
