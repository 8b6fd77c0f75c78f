"""States of selected tokens against the modules of transformers."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from planish.models import selected_states
from planish.models.logprobs import TokenScorer, hidden_before
from tests.rounding import GRADIENTS

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=8)),
}


def a_model(family):
    torch.manual_seed(0)
    model_class, config = FAMILIES[family]
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def a_batch():
    """Prompts of 4 tokens, responses of 1 to 9, padding."""
    ids = torch.randint(0, 31, (6, 13), generator=torch.Generator().manual_seed(1))
    columns = torch.arange(13)
    lengths = torch.tensor([5, 13, 9, 7, 13, 6])[:, None]
    return ids, (columns >= 4) & (columns < lengths)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_are_those_of_the_modules(family):
    model = a_model(family)
    ids, select = a_batch()
    assert selected_states.fits(model.model)
    found = hidden_before(model.model, ids, None, select)
    expected = model.model(input_ids=ids).last_hidden_state[:, :-1][select[:, 1:]]
    assert torch.allclose(found, expected, atol=GRADIENTS)
    with torch.no_grad():
        assert torch.allclose(
            hidden_before(model.model, ids, None, select), expected, atol=GRADIENTS
        )
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    parameters = dict(model.model.named_parameters())
    ours, theirs = (
        torch.autograd.grad((states * weights).sum(), list(parameters.values()))
        for states in (found, expected)
    )
    for name, one, other in zip(parameters, ours, theirs, strict=True):
        assert (one - other).norm() <= GRADIENTS * other.norm(), name


def test_behind_attention_the_last_layer_computes_the_selected_tokens_alone():
    model = a_model("qwen3")
    ids, select = a_batch()
    seen = []
    model.model.layers[-1].mlp.gate_proj.register_forward_hook(
        lambda _module, inputs, _output: seen.append(inputs[0].shape[:-1].numel())
    )
    TokenScorer(model)(ids, None, select, 1.0)
    assert seen == [int(select.sum())]


def test_what_is_not_in_one_float32_piece_is_left_to_the_modules():
    model = a_model("qwen3")
    assert selected_states.fits(model.model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not selected_states.fits(model.model)
    model.model.layers[1].train()
    assert not selected_states.fits(model.model)
    assert not selected_states.fits(a_model("qwen3").bfloat16().model)
    config = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert not selected_states.fits(Qwen2ForCausalLM(config).eval().model)
