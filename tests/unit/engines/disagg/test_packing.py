from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from planish.engines.disagg.packing import combine, route_and_pack


def routes(num_tokens, num_experts, top_k, seed):
    """Return expert ids [b, K] without repeats in a row."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    return scores.topk(top_k, dim=1).indices


shapes = st.tuples(
    st.integers(0, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 16), st.integers(0, 99)
)


@given(shapes)
def test_rows_are_packed_as_plain_loops_would(shape):
    num_tokens, num_nodes, num_local, top_k, seed = shape
    num_experts = num_nodes * num_local
    ids = routes(num_tokens, num_experts, min(top_k, num_experts), seed)
    # Slots are a permutation of experts, as after a placement.
    slot_of = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    hidden = torch.arange(num_tokens * 2.0).view(num_tokens, 2)
    slots = slot_of[ids]
    packed = route_and_pack(hidden, ids, slots, num_nodes=num_nodes, num_local=num_local)
    for node in range(num_nodes):
        wanted, counts = [], []
        for local in range(num_local):
            tokens = [t for t in range(num_tokens) if node * num_local + local in slots[t]]
            wanted += [hidden[token].tolist() for token in tokens]
            counts.append(len(tokens))
        assert packed.rows[node].tolist() == wanted
        assert packed.counts[node].tolist() == counts
    every = torch.cat(list(packed.rows))
    for token in range(num_tokens):
        assert all(
            every[place].tolist() == hidden[token].tolist() for place in packed.places[token]
        )
        assert ids[token][packed.choices[token]].tolist() == sorted(ids[token].tolist())


@given(shapes, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_replies_are_summed_as_plain_loops_would(shape, dtype):
    num_tokens, num_nodes, num_local, top_k, seed = shape
    num_experts = num_nodes * num_local
    ids = routes(num_tokens, num_experts, min(top_k, num_experts), seed)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, 3, generator=generator).to(dtype)
    weights = torch.rand(ids.shape, generator=generator).to(dtype)
    packed = route_and_pack(hidden, ids, ids, num_nodes=num_nodes, num_local=num_local)
    replies = []
    for node, rows in enumerate(packed.rows):
        experts = torch.arange(num_local).repeat_interleave(packed.counts[node])
        replies.append(rows * (node * num_local + experts + 1)[:, None].to(dtype))
    wanted = torch.zeros_like(hidden)
    for token in range(num_tokens):
        for choice in ids[token].argsort():
            output = hidden[token] * (ids[token, choice] + 1).to(dtype)
            wanted[token] = wanted[token] + output * weights[token, choice]
    assert torch.equal(combine(replies, weights, packed), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights_dtype", [None, torch.float32])
@pytest.mark.parametrize(
    ("experts_class", "config"),
    [
        (
            Qwen3MoeExperts,
            Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=8, num_experts=6),
        ),
        (MixtralExperts, MixtralConfig(hidden_size=16, intermediate_size=8, num_local_experts=6)),
    ],
)
def test_the_sum_equals_the_reference_bit_by_bit(experts_class, config, dtype, weights_dtype):
    """Against the eager experts of transformers.

    Rows of an expert stand there by choice and then by token, and where a row stands in a product
    of matrices may change its last bits; so outputs are computed in that order here as well.
    """
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = experts_class(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    module.to(dtype)
    hidden = torch.randn(40, 16).to(dtype)
    ids = routes(40, 6, 3, seed=1)
    weights = torch.rand(40, 3).to(weights_dtype or dtype)

    def outputs(expert):
        _, tokens = torch.where((ids == expert).t())
        gate_up = torch.nn.functional.linear(hidden[tokens], module.gate_up_proj[expert])
        gate, up = gate_up.chunk(2, -1)
        rows = torch.nn.functional.linear(module.act_fn(gate) * up, module.down_proj[expert])
        return rows[tokens.argsort()]

    packed = route_and_pack(hidden, ids, ids, num_nodes=2, num_local=3)
    with torch.no_grad():
        reference = module(hidden, ids, weights)
        replies = [torch.cat([outputs(3 * node + local) for local in range(3)]) for node in (0, 1)]
    result = combine(replies, weights, packed)
    assert result.dtype == reference.dtype
    assert torch.equal(result, reference)
    descending = combine(
        replies,
        weights,
        replace(packed, places=packed.places.flip(1), choices=packed.choices.flip(1)),
    )
    assert not torch.equal(descending, reference)
