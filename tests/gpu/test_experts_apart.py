"""Attention and experts apart on an accelerator: dispatch, experts, combine, and rows over NIXL."""

import pytest
import torch
from torch.nn import functional

from planish.engines.disagg.expert_model import ExpertModel, Experts, grouped_product
from planish.engines.disagg.packing import combine, route_and_pack
from tests.gpu.models import DEVICE

HIDDEN, WIDTH, EXPERTS, TOP_K, TOKENS, NODES = 256, 128, 16, 4, 300, 2


def weights(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE).mul(shape[-1] ** -0.5).to(dtype)


@pytest.mark.parametrize("sizes", [[70, 0, 5, 225], [0, 0, 0, 9]])
def test_one_grouped_product_equals_that_of_each_expert(sizes):
    torch.manual_seed(0)
    rows, matrices = weights(sum(sizes), HIDDEN), weights(4, WIDTH, HIDDEN)
    ends = torch.tensor(sizes, device=DEVICE).cumsum(0)
    found = grouped_product(rows, matrices, ends)
    parts = zip(rows.split(sizes), matrices, strict=True)
    wanted = torch.cat([functional.linear(part, matrix) for part, matrix in parts])
    assert torch.allclose(found.float(), wanted.float(), rtol=0.01, atol=0.01)


def test_a_layer_on_the_device_equals_one_on_the_cpu():
    """Dispatch to two nodes, their experts, and the weighted sum."""
    torch.manual_seed(0)
    hidden = weights(TOKENS, HIDDEN)
    scores = torch.rand(TOKENS, EXPERTS, device=DEVICE)
    share, index = scores.topk(TOP_K, dim=1)
    share = (share / share.sum(1, keepdim=True)).bfloat16()
    both = Experts(weights(EXPERTS, 2 * WIDTH, HIDDEN), weights(EXPERTS, HIDDEN, WIDTH))

    def layer(device, dtype):
        num_local = EXPERTS // NODES
        given = hidden.to(device, dtype), index.to(device), share.to(device, dtype)
        packed = route_and_pack(
            *given[:2], given[1], num_nodes=NODES, num_local=num_local,
            room=torch.empty(TOKENS * TOP_K, HIDDEN, device=device, dtype=dtype),
        )  # fmt: skip
        replies = []
        for node, rows in enumerate(packed.rows):
            model = ExpertModel.__new__(ExpertModel)
            model._device = torch.device(device)
            here = slice(node * num_local, (node + 1) * num_local)
            model.write([Experts(*(part[here].to(device, dtype) for part in both))])
            replies.append(torch.empty_like(rows))
            model.compute(0, packed.counts[node : node + 1], [rows], replies[-1])
        return combine(replies, given[2], packed)

    found, wanted = layer(str(DEVICE), torch.bfloat16), layer("cpu", torch.float64)
    assert found.device.type == DEVICE.type
    assert (found.cpu().double() - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_rows_go_between_two_processes_by_nixl():
    pytest.importorskip("nixl_cu13", reason="pip install nixl-cu13")
    from tests.unit.engines.disagg.test_nixl import exchange_frames

    exchange_frames(DEVICE.type)
