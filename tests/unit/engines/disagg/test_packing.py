from dataclasses import replace
from itertools import cycle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from planish.engines.disagg import packing
from planish.engines.disagg.exchange import ExpertExchange
from planish.engines.disagg.expert_model import ExpertModel, Experts, grouped_product
from planish.engines.disagg.expert_rank import ExpertRank
from planish.engines.disagg.m2n.frames import Frame
from planish.engines.disagg.packing import combine, route_and_pack
from planish.engines.disagg.placement import ExpertLayout
from planish.engines.disagg.settings import RankSettings


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


META = torch.device("meta")
HIDDEN, WIDTH, TOP_K, TOKENS, NODES = 16, 8, 2, 6, 2


class DeviceTransport:
    """Gives frames to a function as they are, as a write from device to device would."""

    def __init__(self, deliver):
        self._deliver = deliver

    def room(self, first, num_rows):
        return torch.empty(num_rows, HIDDEN, dtype=first.dtype, device=META)

    def send(self, header, counts, rows):
        assert rows.device == META
        assert len(rows) == header.num_rows
        self._deliver(Frame(header, counts, rows))


class Turns:
    """Lets the expert ranks serve while the micro-batch waits."""

    current = 0

    def __init__(self, experts):
        self._experts = experts

    def pause(self):
        for rank in self._experts:
            while rank.has_work:
                rank.serve()


def settings(layout, rank=0, role="attention"):
    return RankSettings(
        rank, role, 1, NODES, micro_batches=1, rows=TOKENS, max_model_len=8, prefill_tokens=TOKENS,
        folder="", version=0, device="meta", dtype="bfloat16", hidden_size=HIDDEN, top_k=TOP_K,
        local_experts=3, token="", scratch="", timeout_s=1.0, layout=layout.plain(),
    )  # fmt: skip


def on_meta(redundant, monkeypatch):
    """An attention rank's exchange with its expert ranks."""
    layout = ExpertLayout.of([[1.0] * 4], num_nodes=NODES, num_redundant=redundant)
    monkeypatch.setattr(ExpertRank, "load", lambda self, _: None)
    monkeypatch.setattr(ExpertRank, "commit", lambda self, _: setattr(self, "layout", layout))
    monkeypatch.setattr("planish.engines.disagg.expert_rank.ExpertModel", lambda *_: model)
    count = len(layout.layers[0].experts[0])
    each = torch.empty(count, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16, device=META)
    last = torch.empty(count, HIDDEN, WIDTH, dtype=torch.bfloat16, device=META)
    model = ExpertModel.__new__(ExpertModel)
    model._device, model._layers = META, [Experts(each, last)]
    experts = []
    exchange = ExpertExchange(settings(layout), None, turns := Turns(experts))
    for node in range(NODES):
        rank = ExpertRank(settings(layout, 1 + node, "expert"))
        rank._version = 0
        rank.transport = DeviceTransport(exchange.deliver)
        rank.plan({"participants": {"0": [0]}, "iteration": 0})
        experts.append(rank)
    exchange.transport = DeviceTransport(lambda frame: experts[frame.header.target - 1].take(frame))
    exchange.begin(0, is_prefill=False)
    assert turns.current == 0
    return exchange


@pytest.mark.parametrize("redundant", [0, 1])
def test_no_row_comes_to_the_host(redundant, monkeypatch):
    exchange = on_meta(redundant, monkeypatch)
    given = cycle([7, 1, 4])

    def counts_of(counts):
        assert counts.device == META
        num_rows = [next(given) for _ in range(counts.numel() - 1)]
        asked.append(1)
        return torch.tensor([*num_rows, TOKENS * TOP_K - sum(num_rows)], dtype=torch.int32)

    asked = []
    monkeypatch.setattr(packing, "host_counts", counts_of)
    hidden = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=META)
    index = torch.zeros(TOKENS, TOP_K, dtype=torch.int64, device=META)
    weights = torch.empty(TOKENS, TOP_K, dtype=torch.bfloat16, device=META)
    with torch.no_grad():
        result = exchange.compute(0, hidden, index, weights)
    assert (result.shape, result.dtype, result.device) == (hidden.shape, hidden.dtype, META)
    assert asked == [1], "the host asks for counts once a micro-batch"


@pytest.mark.parametrize("touch", ["cpu", "tolist", "item"])
def test_the_check_sees_a_row_that_does(touch, monkeypatch):
    exchange = on_meta(0, monkeypatch)
    monkeypatch.setattr(packing, "host_counts", lambda _: torch.tensor([3, 3, 3, 3]))
    compute = ExpertModel.compute

    def touching(self, layer, counts, rows, room):
        getattr(rows[0][0, 0], touch)()
        compute(self, layer, counts, rows, room)

    monkeypatch.setattr(ExpertModel, "compute", touching)
    hidden = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=META)
    index = torch.zeros(TOKENS, TOP_K, dtype=torch.int64, device=META)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        exchange.compute(0, hidden, index, hidden[:, :TOP_K])


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 0, 4], [1, 1, 1, 1]])
def test_one_grouped_product_equals_that_of_each_expert(sizes):
    """What accelerators compute, by the kernel's own form on the CPU."""
    torch.manual_seed(0)
    rows, weights = torch.randn(sum(sizes), 16), torch.randn(4, 24, 16) / 4
    ends = torch.tensor(sizes).cumsum(0)
    grouped = torch.nn.functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends.int())
    each = grouped_product(rows, weights, ends)
    assert torch.allclose(each, grouped, rtol=1e-6, atol=1e-6)


def test_the_experts_of_several_senders_are_computed_as_one_after_another():
    torch.manual_seed(0)
    model = ExpertModel.__new__(ExpertModel)
    model._device = torch.device("cpu")
    model._layers = [Experts(torch.randn(3, 16, 12).double(), torch.randn(3, 12, 8).double())]
    counts = torch.tensor([[2, 0, 3], [1, 4, 0]], dtype=torch.int32)
    rows = [torch.randn(5, 12).double() for _ in range(2)]
    together = torch.empty(10, 12).double()
    model.compute(0, counts, rows, together)
    for sender, part in enumerate(together.split(5)):
        alone = torch.empty(5, 12).double()
        model.compute(0, counts[sender : sender + 1], rows[sender : sender + 1], alone)
        assert torch.allclose(part, alone, rtol=0, atol=1e-12)
