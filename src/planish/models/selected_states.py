"""Hidden states of selected tokens by a decoder of transformers, without unused computation.

The modules of transformers compute every layer for every token. Attention of the last layer needs
all tokens, but the later steps (output projection, MLP, norm) are needed only for tokens whose
state is used: in reinforcement learning those of the response. In a small model that saves much of
the work. Also, a norm is one node of the autograd graph in place of six.

This module is used only in float32 on the CPU for unsharded models; all others use the modules of
transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from planish.models.packing import Packing, attend

LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
"""Classes with the computation below; classes of sharded layers have other names."""


def fits(body: Any) -> bool:
    """Return whether this module computes the same hidden states as the decoder."""
    layers = list(getattr(body, "layers", []))
    weight = getattr(getattr(body, "embed_tokens", None), "weight", None)
    if not layers or weight is None or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    return all(
        type(layer).__name__ in LAYERS
        and not layer.self_attn.training  # no dropout
        and getattr(layer.self_attn, "sliding_window", None) is None
        for layer in layers
    )


def hidden_at(
    body: Any, input_ids: Tensor, where: Tensor, packing: Packing | None = None
) -> Tensor:
    """Return the last hidden states of some tokens.

    Args:
        body: decoder of transformers that `fits` (untyped, hence Any).
        input_ids: [B, S] int64, padded on the right; positions are 0..S-1. Or [1, T], packed.
        where: [K] int64, places of the tokens in the flattened `input_ids`.
        packing: packing of the rows; None: not packed.

    Returns:
        [K, H] float32, after the final norm.
    """
    x: Tensor = body.embed_tokens(input_ids)
    positions = torch.arange(input_ids.shape[1]) if packing is None else packing.positions
    turn = body.rotary_emb(x, positions[None])
    for number, layer in enumerate(body.layers, 1):
        is_last = number == len(body.layers)
        compute = partial(
            _layer, layer, turn=turn, packing=packing, where=where if is_last else None
        )
        # As in transformers' gradient checkpointing: less memory, but a second forward pass.
        again = layer.training and layer.gradient_checkpointing and torch.is_grad_enabled()
        x = checkpoint(compute, x, use_reentrant=False) if again else compute(x)
    return _norm(body.norm, x)


def _layer(
    layer: Any,
    x: Tensor,
    *,
    turn: tuple[Tensor, Tensor],
    packing: Packing | None,
    where: Tensor | None,
) -> Tensor:
    """Compute a decoder layer for all tokens [B, S, H], or for those at `where`, [K, H]."""
    attended = _attend(layer, x, turn, packing)
    if where is not None:
        x, attended = (part.flatten(0, 1).index_select(0, where) for part in (x, attended))
    x = x + layer.self_attn.o_proj(attended)
    mlp = layer.mlp
    y = _norm(layer.post_attention_layernorm, x)
    return x + cast(Tensor, mlp.down_proj(mlp.act_fn(mlp.gate_proj(y)) * mlp.up_proj(y)))


def _attend(layer: Any, x: Tensor, turn: tuple[Tensor, Tensor], packing: Packing | None) -> Tensor:
    """Return the output of the attention heads, [B, S, heads * head size]."""
    attention = layer.self_attn
    shape = (*x.shape[:-1], -1, attention.head_dim)
    x = _norm(layer.input_layernorm, x)
    queries, keys, values = (
        project(x).view(shape) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        queries, keys = _norm(attention.q_norm, queries), _norm(attention.k_norm, keys)
    queries, keys = _rotated(queries, turn), _rotated(keys, turn)
    if packing is not None:
        read = attend(queries[0], keys[0], values[0], packing, attention.scaling)
        return read.flatten(1)[None]
    queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
    read = functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        is_causal=True,
        scale=attention.scaling,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return read.transpose(1, 2).flatten(2)


def _rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = turn
    first, second = x.chunk(2, -1)
    return x * cosine[:, :, None] + torch.cat([-second, first], -1) * sine[:, :, None]


def _norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return `x` divided by its root mean square over the last dimension, with each feature scaled.

    Args:
        x: [..., H] float32.
        weight: [H] float32.
        epsilon: number that is added to the mean square.
    """
    if not torch.is_grad_enabled():
        normed, _ = _normed(x, epsilon)
        return normed.mul_(weight)
    apply: Any = _Norm.apply  # untyped in torch
    result: Tensor = apply(x, weight, epsilon)
    return result


def _normed(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `x` divided by its root mean square over the last dimension, and the inverse of that
    root.
    """
    square = torch.linalg.vecdot(x, x).unsqueeze(-1)
    scale = square.div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return x * scale, scale


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normed, scale = _normed(x, epsilon)
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        of_weight = (gradient * normed).flatten(0, -2).sum(0)
        of_normed = gradient * weight
        # The component along the input is removed, since a longer input has the same norm.
        along = torch.linalg.vecdot(of_normed, normed).unsqueeze(-1)
        of_x = torch.addcmul(of_normed, normed, along, value=-1 / normed.shape[-1]).mul_(scale)
        return of_x, of_weight, None
