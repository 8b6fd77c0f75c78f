"""Products of the LM head: float32 sums of bfloat16 operands, as in engines of bfloat16 weights."""

import pytest
import torch
from torch.nn import functional

from planish.models import logprobs
from planish.models.logprobs import Head, TokenScorer, WholeVocabulary, operand_dtype
from planish.models.policy import head_dtype, product, project
from tests.unit.models.test_logprobs import make_batch, make_model

HALF = torch.bfloat16
TOKENS, WIDTH, VOCABULARY = 96, 128, 512


def operands():
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH)
    weight = torch.randn(VOCABULARY, WIDTH) * WIDTH**-0.5
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,))


def scored(hidden, weight, targets, *, operands, chunk=40):
    """Log-probabilities, and gradients of hidden states and weights under uneven slopes."""
    given = [x.clone().requires_grad_() for x in (hidden, weight)]
    head = Head(None, 0.9, WholeVocabulary(VOCABULARY), chunk, True, torch.float32, operands)
    found, _ = logprobs._Scores.apply(head, targets, *given, None)
    (found * torch.linspace(-1.0, 1.0, TOKENS)).sum().backward()
    return found.detach(), *(x.grad for x in given)


def exact(hidden, weight, targets):
    """The same in float64, from operands that bfloat16 has."""
    given = [x.to(HALF).double().requires_grad_() for x in (hidden, weight)]
    scores = torch.log_softmax(given[0] @ given[1].mT / 0.9, -1)
    found = scores.gather(-1, targets[:, None]).squeeze(-1)
    (found * torch.linspace(-1.0, 1.0, TOKENS)).sum().backward()
    return found.detach(), *(x.grad for x in given)


def test_half_operands_give_the_logprobs_and_gradients_of_an_engine_of_bfloat16_weights():
    case = operands()
    ours, *gradients = scored(*case, operands=HALF)
    wanted, *theirs = exact(*case)
    assert (ours - wanted).abs().mean() < 1e-6
    for mine, right in zip(gradients, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - right).norm() < 2e-3 * right.norm()
    # Exact operands are far from these weights: the bound would find them.
    assert (scored(*case, operands=torch.float32)[0] - wanted).abs().mean() > 1e-3


def test_a_decoder_of_bfloat16_weights_scores_like_a_trainer_of_half_operands():
    hidden, weight, targets = operands()
    scores = project(hidden.to(HALF), weight.to(HALF), None, torch.float32)
    engine = torch.log_softmax(scores / 0.9, -1).gather(-1, targets[:, None]).squeeze(-1)
    gap = scored(hidden, weight, targets, operands=HALF)[0] - engine
    assert gap.abs().mean() < 1e-6


def test_float32_operands_give_the_bits_of_plain_products():
    hidden, weight, targets = operands()
    found, of_hidden, of_weight = scored(hidden, weight, targets, operands=torch.float32)
    slopes, parts = [], torch.zeros_like(weight)
    head = Head(None, 0.9, WholeVocabulary(VOCABULARY), 40, True)
    for rows in torch.arange(TOKENS).split(40):
        products = functional.linear(hidden[rows], weight)
        chosen, _, top, norm = head.measure(targets[rows], products)
        assert torch.equal(found[rows], chosen)
        gradient = torch.linspace(-1.0, 1.0, TOKENS)[rows]
        products = functional.linear(hidden[rows], weight)
        slopes.append(head.slopes(products, targets[rows], top, norm, gradient))
        parts.addmm_(slopes[-1].mT, hidden[rows])
    assert torch.equal(of_hidden, torch.cat([part @ weight for part in slopes]))
    assert torch.equal(of_weight, parts)


def test_half_operands_under_a_bias_reach_the_scorer(monkeypatch):
    monkeypatch.setattr(logprobs, "operand_dtype", lambda dtype, hidden: HALF)
    model, twin = (make_model("Phi", partial_rotary_factor=1.0) for _ in range(2))
    ids, select = make_batch()
    found, _ = TokenScorer(model, tokens_per_chunk=4)(ids, None, select, 1.0)
    found.sum().backward()
    hidden = twin.model(input_ids=ids, use_cache=False).last_hidden_state
    before = hidden[select.roll(-1, 1)].to(HALF).float()
    scores = functional.linear(before, twin.lm_head.weight.to(HALF).float(), twin.lm_head.bias)
    wanted = torch.log_softmax(scores, -1).gather(-1, ids[select][:, None]).squeeze(-1)
    wanted.sum().backward()
    assert torch.allclose(found, wanted, atol=1e-5)
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert mine.dtype == torch.float32
        assert (mine.grad - theirs.grad).norm() <= 1e-2 * theirs.grad.norm() + 1e-5, name


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_an_accelerator_multiplies_in_the_type_of_other_products_and_sums_in_float32(
    monkeypatch, dtype
):
    """On the device `meta`, which takes the path of accelerators."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    hidden, weight = (torch.empty(8, 4, device="meta", dtype=dtype) for _ in range(2))
    assert operand_dtype(torch.float32, hidden) == dtype
    assert operand_dtype(HALF, hidden) == HALF
    assert operand_dtype(torch.float32, torch.empty(8, 4, dtype=dtype)) == torch.float32
    assert product(hidden, weight.mT).dtype == torch.float32


def test_a_configuration_without_a_type_of_the_head_means_float32():
    assert head_dtype({}) == head_dtype({"head_dtype": None}) == torch.float32
    assert head_dtype({"head_dtype": "bfloat16"}) == HALF
