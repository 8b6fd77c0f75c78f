"""Packed rows against rows that are alone."""

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from planish.models.logprobs import hidden_before
from planish.models.packing import attend, pack_attention, pack_rows
from planish.models.shapes import PACKED_FAMILIES
from tests.rounding import GRADIENTS

LENGTHS = np.array([5, 13, 2, 9, 12, 6])
SHAPE = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
CLASSES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
WINDOWED = {
    "mistral": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "gemma2": ("Gemma2", {}),
}


def body_of(name, changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE, **changes)
    return getattr(transformers, f"{name}Model")(config).eval()


def test_tokens_lie_end_to_end_without_the_last_of_each_row_by_hand():
    packing = pack_rows(np.array([3, 2, 4]), num_columns=5)
    assert packing.tokens.tolist() == [0, 1, 5, 10, 11, 12]
    assert packing.positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert packing.bounds.tolist() == [0, 2, 3, 6]
    assert packing.longest == 3
    # each row differs by more than a fifth from the next longer one
    assert packing.groups == ((1, 3), (1, 2), (1, 1))
    assert packing.slots.tolist() == [3, 4, 5, 0, 1, 2]
    per_token = torch.arange(3 * 5 * 2).reshape(3, 5, 2)
    assert packing.take(per_token).tolist() == [[2 * n, 2 * n + 1] for n in (0, 1, 5, 10, 11, 12)]


def test_rows_of_similar_length_share_a_group_and_no_slot():
    packing = pack_rows(LENGTHS, num_columns=13)
    assert packing.groups == ((2, 12), (1, 8), (2, 5), (1, 1))
    assert len(set(packing.slots.tolist())) == LENGTHS.sum() - len(LENGTHS)


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_attention_and_its_gradient_are_those_under_a_mask_of_blocks(num_groups):
    packing = pack_rows(LENGTHS, num_columns=13)
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.from_numpy(LENGTHS - 1))
    mask = (row[:, None] == row) & torch.ones(len(row), len(row)).tril().bool()
    parts = [
        torch.randn(len(row), heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, num_groups, num_groups)
    ]
    weights = torch.randn(len(row), 4, 8, dtype=torch.float64)
    wanted = functional.scaled_dot_product_attention(
        *(part.transpose(0, 1)[None] for part in parts), attn_mask=mask, scale=0.3, enable_gqa=True
    )[0].transpose(0, 1)
    seen = attend(*parts, packing, 0.3)
    torch.testing.assert_close(seen, wanted)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), parts) for x in (seen, wanted))
    torch.testing.assert_close(ours, theirs)


def test_on_accelerators_attention_is_one_kernel_for_all_rows():
    packing = pack_rows(LENGTHS, num_columns=13)
    seen = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(allow_non_fake_inputs=True), Calls():
        q, k, v = (
            torch.empty(len(packing.tokens), heads, 16, dtype=torch.bfloat16, device="cuda")
            for heads in (4, 2, 2)
        )
        seen.clear()
        read = attend(q, k, v, packing, 0.3)
    assert read.shape == q.shape
    assert read.dtype == torch.bfloat16
    assert seen.count("_varlen_attn.default") == 1
    assert not any("dot_product" in name for name in seen)


@pytest.mark.parametrize("family", sorted(PACKED_FAMILIES))
@pytest.mark.parametrize("by_modules", [True, False])
def test_packed_states_and_gradients_are_those_of_padded_rows(family, by_modules):
    body = body_of(*CLASSES[family])
    # Our own lines know no dropout, which is 0 here.
    body.layers[0].self_attn.training = by_modules
    columns = torch.arange(13)
    ids = torch.randint(0, 31, (6, 13), generator=torch.Generator().manual_seed(1))
    select = (columns >= 1) & (columns < torch.from_numpy(LENGTHS)[:, None]) & (columns % 3 > 0)
    select[range(6), LENGTHS - 1] = True
    wanted = hidden_before(body, ids, None, select)
    weights = torch.randn(wanted.shape)
    parameters = list(body.parameters())
    theirs = torch.autograd.grad((wanted * weights).sum(), parameters, allow_unused=True)
    assert pack_attention(body)
    # What lies behind a row is computed for no one.
    ids = torch.where(columns < torch.from_numpy(LENGTHS)[:, None], ids, 0)
    seen = hidden_before(body, ids, pack_rows(LENGTHS, 13), select)
    torch.testing.assert_close(seen, wanted, atol=GRADIENTS, rtol=GRADIENTS)
    ours = torch.autograd.grad((seen * weights).sum(), parameters, allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        if other is not None:
            assert (one - other).norm() <= GRADIENTS * (other.norm() + 1e-3)


@pytest.mark.parametrize("family", WINDOWED)
def test_decoders_whose_attention_looks_elsewhere_are_left_as_they_are(family):
    body = body_of(*WINDOWED[family])
    before = body.config._attn_implementation
    assert not pack_attention(body)
    assert body.config._attn_implementation == before


def test_a_kernel_that_groups_heads_untold_is_not_told(monkeypatch):
    """As that of torch 2.11; on the device `meta`, which takes the way of accelerators."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    seen = []

    def kernel(q, k, v, starts, ends, longest, most, *, scale, window_size):
        seen.append((k.shape[1], window_size))
        return torch.empty_like(q)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    packing = pack_rows(LENGTHS, 13).to(torch.device("meta"))
    parts = (torch.empty(41, n, 8, dtype=torch.bfloat16, device="meta") for n in (4, 2, 2))
    assert attend(*parts, packing).shape == (41, 4, 8)
    assert seen == [(2, (-1, 0))]
