"""Token scorer against the naive computation over all logits."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planish.models.logprobs import TokenScorer, ValueScorer
from planish.models.packing import pack_rows
from planish.models.policy import DTYPES
from tests.rounding import GRADIENTS, VALUES

SMALL = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(family="Qwen3", seed=0, **changes):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def naive(model, ids, select, temperature):
    """All logits at once, shifted by hand."""
    scores = model(input_ids=ids).logits.float() / temperature
    logprobs = torch.log_softmax(scores, -1)
    chosen, entropies = [], []
    for row in range(ids.shape[0]):
        for column in range(ids.shape[1]):
            if select[row, column]:
                before = logprobs[row, column - 1]
                chosen.append(before[ids[row, column]])
                entropies.append(-(before.exp() * before).sum())
    return torch.stack(chosen), torch.stack(entropies)


def make_batch(batch=3, length=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 23, (batch, length), generator=generator)
    select = torch.rand(batch, length, generator=generator) < 0.6
    select[:, 0] = False
    return ids, select


class FixedBody(nn.Module):
    """A body whose hidden states are given: one-hot rows make logits readable by hand."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(last_hidden_state=self.hidden)


class FixedModel(nn.Module):
    base_model_prefix = "body"

    def __init__(self, hidden, head):
        super().__init__()
        self.body = FixedBody(hidden)
        self.head = nn.Linear(head.shape[1], head.shape[0], bias=False)
        self.head.weight.data = head
        self.config = SimpleNamespace()

    def get_output_embeddings(self):
        return self.head


def test_impossible_token_gives_no_nan_in_the_entropy():
    hidden = torch.tensor([[[1.0], [1.0]]])
    head = torch.tensor([[0.0], [float("-inf")]])
    ids, select = torch.tensor([[0, 0]]), torch.tensor([[False, True]])
    logprobs, entropy = TokenScorer(FixedModel(hidden, head))(ids, None, select, 1.0)
    assert logprobs.tolist() == [0.0]
    assert entropy.tolist() == [0.0]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 4096])
def test_scores_equal_the_naive_computation(temperature, tokens_per_chunk):
    model = make_model()
    ids, select = make_batch()
    scorer = TokenScorer(model, tokens_per_chunk=tokens_per_chunk)
    with torch.no_grad():
        logprobs, entropy = scorer(ids, None, select, temperature)
        expected_logprobs, expected_entropy = naive(model, ids, select, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprobs, expected_logprobs, atol=VALUES)
    assert torch.allclose(entropy, expected_entropy, atol=VALUES)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Qwen2", {}),
        ("Gemma2", {"final_logit_softcapping": 0.5}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 3.0}),
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Phi", {"partial_rotary_factor": 1.0}),
    ],
)
@pytest.mark.parametrize("tokens_per_chunk", [2, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.9])
def test_scores_and_gradients_of_families_are_those_of_their_own_forward(
    family, changes, tokens_per_chunk, temperature
):
    model, twin = make_model(family, **changes), make_model(family, **changes)
    ids, select = make_batch()
    weights = torch.linspace(-1.0, 1.0, int(select.sum()))
    scorer = TokenScorer(model, tokens_per_chunk=tokens_per_chunk)
    logprobs, entropy = scorer(ids, None, select, temperature)
    expected_logprobs, expected_entropy = naive(twin, ids, select, temperature)
    assert torch.allclose(logprobs, expected_logprobs, atol=VALUES)
    assert torch.allclose(entropy, expected_entropy, atol=VALUES)
    (logprobs * weights).sum().backward()
    (expected_logprobs * weights).sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=GRADIENTS), name


class Scores(TorchDispatchMode):
    """Rows of the largest tensor over a vocabulary of 23."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            # [16, 23] is the head itself.
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (23,):
                rows = tensor.numel() // 23
                self.rows = max(self.rows, rows if rows != 16 else 0)
        return made


def test_no_scores_of_more_tokens_than_a_chunk_exist_forward_or_backward():
    model = make_model()
    ids, select = make_batch()
    assert select.sum() > 12
    with Scores() as seen:
        logprobs, _ = TokenScorer(model, tokens_per_chunk=3)(ids, None, select, 0.9)
        logprobs.sum().backward()
    assert seen.rows == 3


def test_adapters_train_under_a_head_that_stays():
    model, twin = make_model(), make_model()
    for side in (model, twin):
        side.lm_head.requires_grad_(False)
    ids, select = make_batch()
    TokenScorer(model, tokens_per_chunk=2)(ids, None, select, 1.0)[0].sum().backward()
    naive(twin, ids, select, 1.0)[0].sum().backward()
    assert model.lm_head.weight.grad is None
    seen, wanted = (side.model.layers[0].mlp.up_proj.weight.grad for side in (model, twin))
    assert torch.allclose(seen, wanted, atol=GRADIENTS)


@pytest.mark.parametrize(("dtype", "first"), [("float32", 1.0009765625), ("bfloat16", 1.0)])
def test_the_head_computes_in_the_type_that_its_configuration_names(dtype, first):
    # bfloat16 rounds the weight of the first token to 1.
    hidden = torch.ones(1, 2, 1)
    model = FixedModel(hidden, torch.tensor([[1.0009765625], [0.0]]))
    model.config = SimpleNamespace(head_dtype=dtype)
    ids, select = torch.tensor([[0, 0]]), torch.tensor([[False, True]])
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = TokenScorer(model)(ids, None, select, 1.0)
        logprobs.sum().backward()
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-first)), abs=VALUES)
    slope = 1 / (1 + math.exp(first))
    rounded = torch.tensor([slope, -slope]).to(DTYPES[dtype]).float()
    assert torch.allclose(model.head.weight.grad.flatten(), rounded, atol=VALUES)


def test_entropy_carries_no_gradient_and_can_be_left_out():
    ids, select = make_batch()
    scorer = TokenScorer(make_model())
    logprobs, entropy = scorer(ids, None, select, 1.0)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    _, nothing = scorer(ids, None, select, 1.0, with_entropy=False)
    assert nothing.tolist() == [0.0] * int(select.sum())


def test_packed_sequences_score_as_if_they_were_alone():
    scorer = TokenScorer(make_model(), tokens_per_chunk=2)
    first, second = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 10, 11]])
    both = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    select = torch.tensor([[False, True, True, True], [False, True, True, False]])
    packing = pack_rows(np.array([4, 3]), 4)
    with torch.no_grad():
        together, entropies = scorer(both, packing, select, 1.0)
        alone = [scorer(ids, None, ids.cumsum(1) > ids[:, :1], 1.0) for ids in (first, second)]
    assert torch.allclose(together, torch.cat([found[0] for found in alone]), atol=VALUES)
    assert torch.allclose(entropies, torch.cat([found[1] for found in alone]), atol=VALUES)


def test_empty_selection_gives_no_scores_and_zero_gradients():
    model = make_model()
    ids, select = make_batch()
    logprobs, entropy = TokenScorer(model)(ids, None, torch.zeros_like(select), 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(
        parameter.grad is None or not parameter.grad.any() for parameter in model.parameters()
    )


class FixedCritic(nn.Module):
    def __init__(self, hidden, weight, bias):
        super().__init__()
        self.body = FixedBody(hidden)
        self.head = nn.Linear(len(weight), 1)
        self.head.weight.data = torch.tensor([weight])
        self.head.bias.data = torch.tensor([bias])


def test_value_of_a_token_is_that_of_the_state_before_it_by_hand():
    # States (1, 0), (0, 1), (2, 2); the head adds 3 x first + 5 x second + 0.5.
    hidden = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]])
    scorer = ValueScorer(FixedCritic(hidden, [3.0, 5.0], 0.5))
    ids = torch.tensor([[7, 8, 9]])
    values = scorer(ids, None, torch.tensor([[False, True, True]]))
    assert values.tolist() == [3.5, 5.5]
    assert scorer(ids, None, torch.tensor([[False, False, True]])).tolist() == [5.5]
    assert scorer(ids, None, torch.zeros(1, 3, dtype=torch.bool)).shape == (0,)


def test_values_are_float32_under_half_precision_and_on_half_precision_states():
    hidden = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.bfloat16)
    scorer = ValueScorer(FixedCritic(hidden, [1.0009765625, 0.0], 0.0))
    select = torch.tensor([[False, True]])
    with torch.autocast("cpu", torch.bfloat16):
        values = scorer(torch.zeros(1, 2, dtype=torch.long), None, select)
    assert values.dtype == torch.float32
    # bfloat16 would round the weight to 1.
    assert values.tolist() == [1.0009765625]
