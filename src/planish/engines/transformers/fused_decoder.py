"""The forward pass of the Llama and Qwen families in few kernels, from tensors by name.

The number of kernels and of Python calls, not arithmetic, limits a decode step of a small model.
Here a layer is one QKV product, one rotation, two products of attention and two of the MLP. The
decoder needs no module of transformers, whose import takes longer than most rollouts of a tiny
model. `ModuleDecoder` serves models outside `FAMILIES` and unsupported settings, such as rotary
scalings whose table depends on the length.

Source: rotary embeddings are from RoFormer, arXiv 2104.09864, section 3.2; Llama 3's scaling of
them is as in its model card.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from planish.engines.transformers.kv_cache import KeyValueCache
from planish.models.policy import head_dtype, project

FAMILIES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Model classes with these layers: norm, QKV, optional norm of heads, rotation, attention, norm,
SwiGLU."""

_NEEDED = ("hidden_act", "num_attention_heads", "num_hidden_layers", "rms_norm_eps")
_NAME = re.compile(
    r"lm_head\.weight|model\.embed_tokens\.weight|model\.norm\.weight|model\.layers\.(\d+)\."
    r"((input|post_attention)_layernorm\.weight|self_attn\.([qkvo]_proj\.(weight|bias)"
    r"|[qk]_norm\.weight)|mlp\.(gate|up|down)_proj\.(weight|bias))"
)


def _llama3(rope: Mapping[str, Any], frequencies: Tensor) -> Tensor:
    """Divide slow frequencies, keep fast ones, and blend the frequencies between."""
    slow, fast = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    length = float(rope["original_max_position_embeddings"])
    turns = length * frequencies / (2 * math.pi)
    share = ((turns - slow) / (fast - slow)).clamp(0.0, 1.0)
    return (1 - share) * frequencies / float(rope["factor"]) + share * frequencies


SCALINGS: dict[str, Callable[[Mapping[str, Any], Tensor], Tensor]] = {
    "default": lambda rope, frequencies: frequencies,
    "linear": lambda rope, frequencies: frequencies / float(rope["factor"]),
    "llama3": _llama3,
}
"""Map from `rope_type` of a configuration to the function that scales the frequencies."""


def rotation_table(rope: Mapping[str, Any], head_dim: int, length: int) -> Tensor:
    """Return the rotation table: `x * table[p, 0] + roll(x, head_dim / 2) * table[p, 1]`.

    Returns:
        [length, 2, head_dim] float32: cosines, and sines whose first half is negated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / float(rope["rope_theta"]) ** exponents
    frequencies = SCALINGS[rope["rope_type"]](rope, frequencies)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)


def fits(architecture: str, config: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether this decoder computes the same logits as transformers for a model."""
    kinds = set(config.get("layer_types") or ["full_attention"])
    rope = config.get("rope_parameters") or {}
    windowed = "layer_types" not in config and config.get("sliding_window")
    return (
        architecture in FAMILIES
        and all(config.get(key) is not None for key in _NEEDED)
        and config["hidden_act"] == "silu"
        and kinds == {"full_attention"}
        and not windowed
        and rope.get("rope_type") in SCALINGS
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and all(
            (found := _NAME.fullmatch(name)) and int(found[1] or 0) < config["num_hidden_layers"]
            for name in names
        )
        and ("lm_head.weight" in names or bool(config.get("tie_word_embeddings")))
    )


Linear = tuple[Tensor, Tensor | None]
"""Weight and bias."""


def _join(tensors: dict[str, Tensor], names: Sequence[str], share: bool) -> Linear:
    """Join the weights of several linear layers in one tensor; with `share` their tensors become
    views of it.
    """
    joined: list[Tensor | None] = []
    for kind in ("weight", "bias"):
        present = [f"{name}.{kind}" for name in names if f"{name}.{kind}" in tensors]
        whole = torch.cat([tensors[name] for name in present]) if present else None
        joined.append(whole)
        if whole is not None and share:
            sizes = [tensors[name].shape[0] for name in present]
            tensors.update(zip(present, torch.split(whole, sizes), strict=True))
    weight, bias = joined
    assert weight is not None
    return weight, bias


class _Layer:
    """Weights of one decoder layer, joined for few matrix products."""

    def __init__(self, tensors: dict[str, Tensor], index: int, heads: int, share: bool) -> None:
        self._tensors, self._place, self._share = tensors, f"model.layers.{index}.", share
        norm = self._place + "self_attn.q_norm.weight"
        key_rows = tensors[self._place + "self_attn.k_proj.weight"].shape[0]
        query_rows = tensors[self._place + "self_attn.q_proj.weight"].shape[0]
        self.head_dim = query_rows // heads
        self.heads, self.kv_heads = heads, key_rows // self.head_dim
        self._has_head_norm = norm in tensors
        self._lay_out()

    def _lay_out(self) -> None:
        tensors, place = self._tensors, self._place
        attention, mlp = place + "self_attn.", place + "mlp."
        inputs = [attention + f"{x}_proj" for x in "qkv"]
        self.qkv = _join(tensors, inputs, self._share)
        self.gate_up = _join(tensors, [mlp + "gate_proj", mlp + "up_proj"], self._share)
        self.out = _linear(tensors, attention + "o_proj")
        self.down = _linear(tensors, mlp + "down_proj")
        self.norm_1 = tensors[place + "input_layernorm.weight"]
        self.norm_2 = tensors[place + "post_attention_layernorm.weight"]
        self.head_norm: Tensor | None = None
        self.refresh_head_norm()

    def refresh_head_norm(self) -> None:
        """Repeat the norm of queries and keys for each head: [heads + kv heads, head size]."""
        if self._has_head_norm:
            queries, keys = (self._tensors[f"{self._place}self_attn.{x}_norm.weight"] for x in "qk")
            self.head_norm = torch.stack([queries] * self.heads + [keys] * self.kv_heads)

    def refresh(self) -> None:
        """Use weights that were changed in place."""
        if self._share:
            self.refresh_head_norm()
        else:
            self._lay_out()


def _linear(tensors: Mapping[str, Tensor], name: str) -> Linear:
    return tensors[f"{name}.weight"], tensors.get(f"{name}.bias")


def _add_linear(x: Tensor, y: Tensor, linear: Linear) -> Tensor:
    """Return `x` plus a linear layer of `y`, in one kernel if the layer has no bias."""
    weight, bias = linear
    if bias is not None:
        return x + functional.linear(y, weight, bias)
    flat = torch.addmm(x.flatten(0, -2), y.flatten(0, -2), weight.t())
    return flat.view(x.shape)


class FusedDecoder:
    """Decoder over joined weights."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: dict[str, Tensor],
        cache: KeyValueCache,
        *,
        share: bool,
    ) -> None:
        """Join the weights, given by canonical names.

        With `share` the entries of `tensors` become views of the joined weights. This saves memory,
        and in-place changes are visible in both.
        """
        self.cache = cache
        self._config = config
        self._embedding = tensors["model.embed_tokens.weight"]
        self._head = tensors.get("lm_head.weight", self._embedding)
        self._head_dtype = head_dtype(config)
        self._last_norm = tensors["model.norm.weight"]
        self._eps: float = config["rms_norm_eps"]
        self._eps_tensor = torch.tensor(self._eps)
        heads = int(config["num_attention_heads"])
        self._layers = [
            _Layer(tensors, i, heads, share) for i in range(int(config["num_hidden_layers"]))
        ]
        first = self._layers[0]
        self._heads, self._kv_heads, self._head_dim = first.heads, first.kv_heads, first.head_dim
        self._scale = self._head_dim**-0.5
        self._rotation = torch.empty(0)

    def refresh(self) -> None:
        """Use weights that were changed in place."""
        for layer in self._layers:
            layer.refresh()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        size = x.shape[-1]
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return functional.rms_norm(x, (size,), None, self._eps) * weight
        # torch's CPU kernel for this norm is a chain of seven operators; here there are four
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_tensor, length, length, value=1 / size).rsqrt_()
        return (x * scale).mul_(weight)

    def _rotations(self, length: int) -> Tensor:
        if self._rotation.shape[0] < length:
            table = rotation_table(
                self._config["rope_parameters"], self._head_dim, max(length, 64) * 2
            )
            self._rotation = table.to(self._embedding.device, self._embedding.dtype)
        return self._rotation

    def _project(self, layer: _Layer, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values, each [..., heads, head size]."""
        num = self._heads + self._kv_heads
        flat = functional.linear(self._norm(x, layer.norm_1), *layer.qkv)
        joint = flat.view(*flat.shape[:-1], num + self._kv_heads, self._head_dim)
        turned, values = joint[..., :num, :], joint[..., num:, :]
        if layer.head_norm is not None:
            turned = self._norm(turned, layer.head_norm)
        swapped = turned.roll(self._head_dim // 2, -1)
        turned = torch.addcmul(turned * turn[..., :1, :], swapped, turn[..., 1:, :])
        return turned[..., : self._heads, :], turned[..., self._heads :, :], values

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        x = _add_linear(x, attended, layer.out)
        both = functional.linear(self._norm(x, layer.norm_2), *layer.gate_up)
        gate, up = both.chunk(2, -1)
        return _add_linear(x, functional.silu(gate).mul_(up), layer.down)

    def prefill(self, tokens: Tensor, rows: Tensor, owner: Tensor) -> None:
        """Fill rows from position 0; see `Decoder.prefill`."""
        x = functional.embedding(tokens, self._embedding)
        turn = self._rotations(tokens.shape[1])[: tokens.shape[1]]
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
        x = functional.embedding(tokens, self._embedding)
        turn = self._rotations(longest).index_select(0, positions)
        group = self._heads // self._kv_heads
        hidden = bias.to(x.dtype)[:, None]
        if self._kv_heads > 1:
            hidden = hidden.repeat_interleave(self._kv_heads, 0)
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._project(layer, x, turn)
            all_keys, all_values = self.cache.append(
                index, keys.unsqueeze(2), values.unsqueeze(2), cells, longest
            )
            # one product has the query heads of one kv head as rows
            scores = torch.baddbmm(
                hidden,
                queries.reshape(num * self._kv_heads, group, self._head_dim),
                all_keys.flatten(0, 1).transpose(1, 2),
                alpha=self._scale,
            )
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
            attended = torch.bmm(weights, all_values.flatten(0, 1))
            x = self._finish(layer, x, attended.reshape(num, -1))
        return project(self._norm(x, self._last_norm), self._head, None, self._head_dtype)
