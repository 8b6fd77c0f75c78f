"""Arithmetic of torch's kernel for packed rows on the CPU, where torch has none."""

import torch
from torch.nn.attention import varlen

from planish.models import packing


def _rows(query, key, value, bounds):
    """Place, and heads in float32, of each row; heads of keys are repeated."""
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        heads = (
            part[begin:end].transpose(0, 1).float() for part in (query, key, value)
        )  # fmt: skip
        yield slice(begin, end), *(x.repeat_interleave(query.shape[1] // len(x), 0) for x in heads)


def _shares(query, key, scale):
    scores = query @ key.mT * scale
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)


def _forward(query, key, value, bounds, _, __, ___, is_causal=False, scale=None, *rest):
    assert is_causal
    out = torch.empty_like(query)
    for place, q, k, v in _rows(query, key, value, bounds):
        out[place] = (_shares(q, k, scale) @ v).transpose(0, 1).to(query.dtype)
    return (
        out,
        query.new_zeros(query.shape[1::-1], dtype=torch.float32),
        torch.empty(2).to(torch.uint64),
    )


def _backward(flow, query, key, value, out, lse, bounds, _, __, ___, causal, rng, scale, *rest):
    found = [torch.empty_like(part) for part in (query, key, value)]
    for place, q, k, v in _rows(query, key, value, bounds):
        share, given = _shares(q, k, scale), flow[place].transpose(0, 1).float()
        of_share = given @ v.mT
        slopes = share * (of_share - (of_share * share).sum(-1, keepdim=True)) * scale
        for made, part in zip(found, (slopes @ k, slopes.mT @ q, share.mT @ given), strict=True):
            own = part.unflatten(0, (made.shape[1], -1)).sum(1)
            made[place] = own.transpose(0, 1).to(made.dtype)
    return tuple(found)


def use_kernel(monkeypatch):
    """Let packed rows take the way of accelerators."""
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
    monkeypatch.setattr(packing, "has_kernel", lambda query, kind: True)
