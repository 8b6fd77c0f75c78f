"""The same computation as `ModuleDecoder` for the Llama and Qwen families, with few kernels.

A decode step of a small model is bound by the number of kernels and of Python calls, not by
arithmetic; here a layer is one QKV product, one rotation, two products of attention and two of the
MLP. Models outside `FAMILIES`, and settings that these lines do not cover, go to `ModuleDecoder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planish.engines.kv_cache import KeyValueCache

FAMILIES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Classes whose layer is: norm, QKV, optional norm of heads, rotation, attention, norm, SwiGLU."""


def fits(model: Any) -> bool:
    """Return whether the lines below compute what `model` computes."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        type(model).__name__ in FAMILIES
        and kinds == {"full_attention"}
        and (hasattr(config, "layer_types") or not getattr(config, "sliding_window", None))
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
        and getattr(config, "hidden_act", "") == "silu"
    )


def _join(linears: Sequence[nn.Linear], share: bool) -> tuple[Tensor, Tensor | None]:
    """Lay the weights of several linears in one tensor; `share` makes theirs views of it.

    With views an update in place reaches both, at no extra memory, but the model can no longer be
    saved, since none of its tensors covers its storage.
    """
    weight = torch.cat([x.weight.data for x in linears])
    biases = [x.bias for x in linears if x.bias is not None]
    bias = torch.cat([b.data for b in biases]) if biases else None
    start = 0
    for linear in linears if share else ():
        end = start + linear.weight.shape[0]
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias


class _Layer:
    """Weights of one decoder layer, laid out for few products."""

    def __init__(self, layer: Any, heads: int, kv_heads: int, share: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention = attention
        self._inputs = (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [mlp.gate_proj, mlp.up_proj],
        )
        self._sizes = (heads, kv_heads)
        self.qkv, self.gate_up = (_join(linears, share) for linears in self._inputs)
        self.out = (attention.o_proj.weight, attention.o_proj.bias)
        self.down = (mlp.down_proj.weight, mlp.down_proj.bias)
        self.norm_1 = layer.input_layernorm
        self.norm_2 = layer.post_attention_layernorm
        self.head_norm = self._join_head_norms()

    def _join_head_norms(self) -> Tensor | None:
        """Return [heads + kv heads, head size]: one scale per head of the joint projection."""
        if not hasattr(self._attention, "q_norm"):
            return None
        heads, kv_heads = self._sizes
        of_queries, of_keys = (
            x.weight.data for x in (self._attention.q_norm, self._attention.k_norm)
        )
        return torch.stack([of_queries] * heads + [of_keys] * kv_heads)

    def refresh(self, share: bool) -> None:
        """Copy the weights that are not views again."""
        if not share:
            self.qkv, self.gate_up = (_join(linears, share) for linears in self._inputs)
        self.head_norm = self._join_head_norms()


class FusedDecoder:
    """Decoder over joined weights."""

    def __init__(self, model: Any, cache: KeyValueCache, *, share: bool = False) -> None:
        """Lay out the weights of `model`; `share` turns its own into views of them."""
        config = model.config
        self.cache = cache
        self._body = model.model
        self._head: Tensor = model.lm_head.weight
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = self._body.layers[0].self_attn.head_dim
        self._scale: float = self._body.layers[0].self_attn.scaling
        self._eps: float = config.rms_norm_eps
        self._eps_tensor = torch.tensor(self._eps)
        self._layers = [_Layer(x, self._heads, self._kv_heads, share) for x in self._body.layers]
        self._share = share
        self._rotation = torch.empty(0)

    def refresh(self) -> None:
        """Take over weights that were changed in place."""
        for layer in self._layers:
            layer.refresh(self._share)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Divide by the root mean square over the last dim, then scale."""
        size = x.shape[-1]
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return functional.rms_norm(x, (size,), None, self._eps) * weight
        # torch's CPU kernel for it is a chain of seven operators; this is four
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._eps_tensor, length, length, value=1 / size).rsqrt_() * weight

    def _rotations(self, length: int, like: Tensor) -> Tensor:
        """Return [positions, 2, head size]: cosines, and sines with the sign of the swap."""
        if self._rotation.shape[0] < length:
            positions = torch.arange(max(length, 64) * 2, device=like.device)[None]
            cos, sin = self._body.rotary_emb(like, positions)
            sin[..., : self._head_dim // 2] *= -1
            self._rotation = torch.stack([cos[0], sin[0]], dim=1)
        return self._rotation

    def _project(self, layer: _Layer, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values, each [..., heads, head size]."""
        num = self._heads + self._kv_heads
        flat = functional.linear(self._norm(x, layer.norm_1.weight), *layer.qkv)
        joint = flat.view(*flat.shape[:-1], num + self._kv_heads, self._head_dim)
        turned, values = joint[..., :num, :], joint[..., num:, :]
        if layer.head_norm is not None:
            turned = self._norm(turned, layer.head_norm)
        swapped = turned.roll(self._head_dim // 2, -1)
        turned = torch.addcmul(turned * turn[..., :1, :], swapped, turn[..., 1:, :])
        return turned[..., : self._heads, :], turned[..., self._heads :, :], values

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Add the output of attention and of the MLP to the residual stream."""
        x = x + functional.linear(attended, *layer.out)
        both = functional.linear(self._norm(x, layer.norm_2.weight), *layer.gate_up)
        gate, up = both.chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, *layer.down)

    def prefill(self, tokens: Tensor, rows: Tensor, owner: Tensor) -> None:
        """Fill rows from position 0; see `Decoder.prefill`."""
        x = functional.embedding(tokens, self._body.embed_tokens.weight)
        turn = self._rotations(tokens.shape[1], x)[: tokens.shape[1]]
        for index, layer in enumerate(self._layers):
            queries, keys, values = (part.transpose(1, 2) for part in self._project(layer, x, turn))
            self.cache.fill(index, keys, values, rows, owner)
            if index + 1 == len(self._layers):
                break
            attended = functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=True,
                scale=self._scale,
                enable_gqa=self._heads != self._kv_heads,
            )
            x = self._finish(layer, x, attended.transpose(1, 2).flatten(2))

    def decode(self, tokens: Tensor, positions: Tensor, cells: Tensor, bias: Tensor) -> Tensor:
        """Add one token to each row; see `Decoder.decode`."""
        num, longest = bias.shape
        x = functional.embedding(tokens, self._body.embed_tokens.weight)
        turn = self._rotations(longest, x).index_select(0, positions)
        group = self._heads // self._kv_heads
        hidden = bias.to(x.dtype)[:, None]
        if self._kv_heads > 1:
            hidden = hidden.repeat_interleave(self._kv_heads, 0)
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._project(layer, x, turn)
            all_keys, all_values = self.cache.append(
                index, keys.unsqueeze(2), values.unsqueeze(2), cells, longest
            )
            # the query heads of one kv head are rows of one product
            scores = torch.baddbmm(
                hidden,
                queries.reshape(num * self._kv_heads, group, self._head_dim),
                all_keys.flatten(0, 1).transpose(1, 2),
                alpha=self._scale,
            )
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
            attended = torch.bmm(weights, all_values.flatten(0, 1))
            x = self._finish(layer, x, attended.reshape(num, -1))
        return functional.linear(self._norm(x, self._body.norm.weight), self._head)
