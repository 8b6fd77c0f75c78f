"""Small random models of several families, and short ways to make requests."""

import copy

import numpy as np
import torch

from planish.engines.requests import ModelRef, Output, Request, Sampling
from planish.engines.sampling import noise
from planish.engines.transformers.engine import TransformersEngine
from planish.models.config import ModelConfig
from planish.models.experts import num_experts
from planish.models.policy import Policy, build_policy
from planish.models.tokens import character_tokenizer

SIZES = {
    "vocab_size": 54,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def qwen3_policy(seed: int = 0, **config) -> Policy:
    """The demo's own architecture."""
    return build_policy(ModelConfig(initializer_range=0.2, **config), seed)


def family_policy(family: str, seed: int = 0, **changes) -> Policy:
    """A tiny model of another family with random weights."""
    import transformers

    if family == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=54, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1,
            eos_token_id=2, initializer_range=0.2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        cls = transformers.GPT2LMHeadModel
    else:
        if family in ("Qwen3", "Qwen3Moe", "Gemma3Text"):
            changes = {"head_dim": 16, **changes}
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
        name = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
        cls = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    tokenizer = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz+-*/=;:.,()% \n")
    return Policy(model=model, tokenizer=tokenizer)


def start(policy: Policy, **options) -> TransformersEngine:
    engine = TransformersEngine(**{"max_rows": 8, **options})
    engine.start(ModelRef(policy=policy))
    return engine


def prompt(index: int, length: int = 0) -> tuple[int, ...]:
    rng = np.random.default_rng(index)
    return tuple(int(x) for x in rng.integers(4, 50, length or 2 + index % 7))


def request(index: int, max_new_tokens: int = 12, **sampling) -> Request:
    prefix = sampling.pop("prefix", ())
    options = {"seed": 1000 + index, "ignore_eos": True, **sampling}
    return Request(
        f"r{index}",
        prompt(index),
        Sampling(max_new_tokens=max_new_tokens, **options),
        response_prefix=prefix,
    )


def reference_greedy(policy: Policy, ids, num_tokens: int) -> list[int]:
    """Greedy tokens by the plain forward, without any cache."""
    tokens = list(ids)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = policy.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(ids) :]


def reference_logprobs(policy: Policy, ids, response) -> list[float]:
    """Log-probabilities of a response by the plain forward."""
    tokens = torch.tensor([[*ids, *response]])
    with torch.inference_mode():
        logits = policy.model(input_ids=tokens, use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)[len(ids) - 1 : -1]
    return logprobs.gather(-1, tokens[0, len(ids) :, None]).squeeze(-1).tolist()


def exact_logits(policy: Policy, ids) -> np.ndarray:
    """Logits of the next token after each position by a float64 forward, [tokens, vocabulary]."""
    model = copy.deepcopy(policy.model).double()
    if num_experts(model.config.to_dict()):
        model.set_experts_implementation("eager")  # the grouped product knows no float64
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()


def exact_logprobs(policy: Policy, one: Request, response) -> np.ndarray:
    """Log-probabilities of a response in the distribution that its request samples from.

    Temperature 0 is taken as 1, and what top-k and then top-p leave is normalised again.
    """
    before, sampling = [*one.prompt_ids, *one.response_prefix], one.sampling
    rows = exact_logits(policy, [*before, *response])[len(before) - 1 : -1]
    rows = rows / (sampling.temperature or 1.0)
    found = []
    for row, token in zip(rows, response, strict=True):
        order = np.argsort(-row, kind="stable")[: sampling.top_k or None]
        shares = np.exp(row[order] - row[order[0]])
        shares /= shares.sum()
        kept = np.cumsum(shares) - shares < sampling.top_p
        share = shares[kept & (order == token)].sum()
        found.append(np.log(share / shares[kept].sum()) if share else -np.inf)
    return np.array(found)


def ids_of(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def differs_by_a_tie(
    policy: Policy, one: Request, output: Output, whole: Output, *, noise_is_ours: bool
) -> bool:
    """Compare a response at temperature 1 with the same one from a batch of other rows.

    Products of other sizes add in another order, so log-probabilities differ by rounding (at most
    4.6e-6 over 22,000 tokens here) and sums of probabilities by 1.1e-6. Tokens may part only where
    the noise lies that close to the border of the two: 6e-3 expected in 1,200 tokens. A wrong cache
    cell moves log-probabilities by orders more and parts the tokens anywhere. The policy becomes
    float64. An engine with a noise of its own does not say where its borders are.
    """
    pairs = zip(output.token_ids, whole.token_ids, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    stop = output.num_tokens if place is None else place
    gaps = np.abs(np.array(output.logprobs[:stop]) - whole.logprobs[:stop])
    assert (gaps < 2e-5).all(), (one.request_id, gaps.max())
    if place is None:
        assert output.num_tokens <= whole.num_tokens
        return False
    if not noise_is_ours:
        return True
    low, high = sorted((output.token_ids[place], whole.token_ids[place]))
    tokens = torch.tensor([[*one.prompt_ids, *whole.token_ids[:place]]])
    if num_experts(policy.model.config.to_dict()):
        policy.model.set_experts_implementation("eager")  # the grouped product knows no float64
    with torch.inference_mode():
        logits = policy.model.double()(input_ids=tokens, use_cache=False).logits[0, -1]
    borders = logits.softmax(-1).cumsum(-1)[low:high]
    uniform = noise(torch.tensor(one.sampling.seed), torch.tensor(place))
    assert (borders - uniform).abs().max() < 5e-6, (one.request_id, place, low, high)
    return True
