"""Sort rows by the slots of their experts, and sum the replies in the order of transformers.

There is no loop over experts or nodes, and rows stay on their device. Only the number of rows for
each expert goes to the host, once per layer and micro-batch. The caller chooses the slot of each
row, which is a flat number of node and local expert.

Source: MegaScale-Infer, arXiv 2504.02263, section 6 (fused gating, counting and scatter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Rows of one micro-batch sorted by (node, local expert, token), and the permutation back.

    Example:
        >>> hidden = torch.tensor([[1.0], [2.0]])
        >>> packed = route_and_pack(hidden, torch.tensor([[3, 0], [0, 2]]),
        ...                         torch.tensor([[3, 0], [0, 2]]), num_nodes=2, num_local=2)
        >>> [rows.flatten().tolist() for rows in packed.rows], packed.counts.tolist()
        ([[1.0, 2.0], [2.0, 1.0]], [[2, 0], [1, 1]])
    """

    rows: tuple[Tensor, ...]
    """[rows of the node, H] for each node, views of one tensor."""
    counts: Tensor
    """[nodes, local experts] int32 on the CPU, number of rows for each."""
    places: Tensor
    """[b, K] int64, index among all rows of the row for each token and expert; the experts of a
    token are in ascending order."""
    choices: Tensor
    """[b, K] int64, index among a token's K choices of the choice behind each of `places`."""


def host_counts(counts: Tensor) -> Tensor:
    """Return counts as int32 on the CPU, after all pending work of their device.

    In a layer of a micro-batch, only this function waits for the device.
    """
    # A non-blocking copy needs page-locked memory as its target.
    host = counts.to("cpu", torch.int32, non_blocking=True)
    if counts.is_cuda:
        torch.cuda.current_stream(counts.device).synchronize()
    return host


def route_and_pack(
    hidden: Tensor,
    expert_ids: Tensor,
    slots: Tensor,
    *,
    num_nodes: int,
    num_local: int,
    room: Tensor | None = None,
) -> Packed:
    """Gather the rows for each node; rows of one expert keep the order of their tokens.

    Args:
        hidden: [b, H], any float dtype and device; the rows stay on this device.
        expert_ids: [b, K] int64, logical experts of each token, all different.
        slots: [b, K] int64, `node * num_local + local expert` of the replica for each row.
        num_nodes: number of expert ranks.
        num_local: number of experts on each rank, replicas included.
        room: [b K, H] like `hidden`, memory for the rows; None allocates memory.
    """
    top_k = expert_ids.shape[1]
    ordered, order = torch.sort(slots.flatten(), stable=True)
    rows = torch.index_select(hidden, 0, order // top_k, out=room)
    bounds = torch.arange(num_nodes * num_local + 1, device=order.device)
    counts = host_counts(torch.searchsorted(ordered, bounds).diff()).view(num_nodes, num_local)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    choices = torch.argsort(expert_ids, dim=1)
    return Packed(
        torch.split(rows, counts.sum(1).tolist()),
        counts,
        places.view_as(expert_ids).gather(1, choices),
        choices,
    )


def combine(replies: Sequence[Tensor], weights: Tensor, packed: Packed) -> Tensor:
    """Return the weighted sum of the experts of each token, [b, H] like the replies.

    Each row is multiplied before it is added, and each product is rounded to the dtype of the rows;
    the experts of a token are added in ascending order. On the CPU each partial sum is rounded too,
    starting from zeros. The `eager` experts of transformers do the same with `index_add_`, expert
    after expert, so equal rows give equal bits under any placement. On accelerators one sum adds
    the rows, in an order that depends only on the shape; atomic additions would change their order
    from call to call.

    `replies` are [rows of the node, H] in the order of `packed.rows`; `weights` are [b, K] of any
    float dtype.
    """
    rows = torch.cat(list(replies))
    ordered = weights.gather(1, packed.choices)
    products = (rows[packed.places] * ordered[:, :, None]).to(rows.dtype)
    if not rows.is_cpu:
        return products.sum(1)
    total = rows.new_zeros(len(weights), rows.shape[1])
    for product in products.unbind(1):
        total += product
    return total
