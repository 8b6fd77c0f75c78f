"""Packing of a batch: rows end to end, without padding, with attention only within each row.

A decoder computes everything except attention token by token, so it can take one long row.
Attention is computed for each row alone: on accelerators by a kernel for rows of any length,
elsewhere in groups of rows of similar length. `attend` chooses the kernel or the groups. In
`attend`, ranks that share the tokens also exchange tokens for heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from planish.models.shapes import CAP, PACKED_FAMILIES, has_windows

GROUP_SPREAD = 0.8
"""Smallest length of a row in a group, as a share of the longest row's length."""


@dataclass(frozen=True)
class Context:
    """Context parallelism: ranks with the same rows, each with an equal part of the tokens.

    Before attention the ranks exchange tokens for heads, so each rank has its heads of all tokens.
    After attention they exchange back.

    Source: DeepSpeed Ulysses, arXiv 2309.14509, section 3.
    """

    group: Any
    """Process group of the ranks."""
    rank: int
    """Rank of this process in the group."""
    size: int

    def part(self, per_token: Tensor, fill: int = 0) -> Tensor:
        """Return this rank's part of [T, ...]; `fill` pads after the last token."""
        missing = -len(per_token) % self.size
        blank = per_token.new_full((missing, *per_token.shape[1:]), fill)
        return torch.cat([per_token, blank]).chunk(self.size)[self.rank]

    def to_heads(self, own: Tensor, num_tokens: int) -> Tensor:
        """Return this rank's heads of all tokens, [T, heads of a rank, head size].

        Args:
            own: [tokens of a rank, heads, head size]; if there are fewer heads than ranks, heads
                are repeated.
            num_tokens: T.
        """
        if own.shape[1] < self.size:
            own = own.repeat_interleave(self.size // own.shape[1], 1)
        parts = own.reshape(len(own), self.size, -1, own.shape[2]).transpose(0, 1)
        return _trade(parts, self.group).flatten(0, 1)[:num_tokens]

    def to_tokens(self, heads: Tensor) -> Tensor:
        """Return all heads of this rank's tokens; the inverse of `to_heads`."""
        missing = heads.new_zeros((-len(heads) % self.size, *heads.shape[1:]))
        parts = torch.cat([heads, missing]).view(self.size, -1, *heads.shape[1:])
        return _trade(parts, self.group).transpose(0, 1).flatten(1, 2)

    def join(self, own: Tensor) -> Tensor:
        """Concatenate the parts [t] of all ranks.

        Every rank computes the gradient of the whole, and keeps that of its own part.
        """
        every = own.new_empty(self.size * len(own))
        dist.all_gather_into_tensor(every, own.detach(), group=self.group)
        start = self.rank * len(own)
        every[start : start + len(own)] = own
        return every


def _trade(parts: Tensor, group: Any) -> Tensor:
    """Send part `i` of [ranks, ...] to rank `i` of a group; return the received parts."""
    apply: Any = _Trade.apply  # untyped in torch
    traded: Tensor = apply(parts, group)
    return traded


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        given = parts.contiguous()
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Trade.forward(ctx, gradient, ctx.group), None


@dataclass(frozen=True)
class Packing:
    """Places of a padded batch's tokens when its rows are packed end to end.

    The last token of a row is left out, because the state after it is not needed.

    Example:
        >>> packing = pack_rows(np.array([3, 2]), num_columns=4)
        >>> packing.tokens.tolist(), packing.positions.tolist(), packing.bounds.tolist()
        ([0, 1, 4], [0, 1, 0], [0, 2, 3])
    """

    tokens: Tensor
    """[T] int64, the place of each token in the flattened [B, S]."""
    positions: Tensor
    """[T] int64, the column of each token."""
    bounds: Tensor
    """[B + 1] int32, the start of each row and the end of the last row."""
    longest: int
    """Number of tokens of the longest row."""
    groups: tuple[tuple[int, int], ...]
    """(rows, columns) of each group of rows of similar length."""
    slots: Tensor
    """[T] int64, the place of each token in the concatenation of all flattened groups."""
    context: Context | None = None
    """Ranks that share the tokens; None: this rank has all tokens."""

    def own(self, per_token: Tensor, fill: int = 0) -> Tensor:
        """Return this rank's tokens of [T, ...]; `fill` pads missing tokens."""
        return per_token if self.context is None else self.context.part(per_token, fill)

    def take(self, per_token: Tensor, fill: int = 0) -> Tensor:
        """Return this rank's packed tokens of [B, S, ...]."""
        return self.own(per_token.flatten(0, 1).index_select(0, self.tokens), fill)

    def to(self, device: torch.device) -> Packing:
        """Return the packing on another device."""
        names = ("tokens", "positions", "bounds", "slots")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def pack_rows(
    lengths: npt.NDArray[np.int64], num_columns: int, context: Context | None = None
) -> Packing:
    """Return the packing of rows.

    Args:
        lengths: [B] int64, columns up to the last token whose score is needed, at least 2.
        num_columns: S of the padded batch.
        context: ranks that share the tokens; None: this rank has all tokens.
    """
    counts = lengths - 1
    columns = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort(-counts, kind="stable")
    firsts = np.zeros(len(counts), np.int64)
    groups: list[tuple[int, int]] = []
    start = size = 0
    while start < len(order):
        width = int(counts[order[start]])
        members = order[start:][counts[order[start:]] >= GROUP_SPREAD * width]
        firsts[members] = size + width * np.arange(len(members))
        groups.append((len(members), width))
        start, size = start + len(members), size + width * len(members)
    rows = np.repeat(np.arange(len(counts)), counts)
    return Packing(
        tokens=torch.from_numpy(rows * num_columns + columns),
        positions=torch.from_numpy(columns),
        bounds=torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32)),
        longest=int(counts.max()),
        groups=tuple(groups),
        slots=torch.from_numpy(firsts[rows] + columns),
        context=context,
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None = None
) -> Tensor:
    """Return causal attention within each row.

    Args:
        query: [T, heads, head size]; with a context only this rank's tokens.
        key: like `query`, with one head for each group of query heads.
        value: like `key`.
        packing: packing of the T tokens.
        scale: factor of the products; None is 1 over the root of the head size.

    Returns:
        Like `query`.
    """
    parts = (query, key, value)
    if packing.context is not None:
        q, k, v = (packing.context.to_heads(part, len(packing.tokens)) for part in parts)
        return packing.context.to_tokens(attend(q, k, v, replace(packing, context=None), scale))
    is_grouped = query.shape[1] != key.shape[1]
    kind = product_dtype(query)
    if has_kernel(query, kind):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (part.to(kind) for part in parts)
        bounds, longest = packing.bounds, packing.longest
        # torch 2.11 groups heads without being told.
        names = varlen_attn.__code__.co_varnames
        grouped: dict[str, Any] = {"enable_gqa": is_grouped} if "enable_gqa" in names else {}
        read = varlen_attn(
            q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), **grouped
        )  # fmt: skip
        return cast(Tensor, read)
    sizes = [rows * columns for rows, columns in packing.groups]
    blank = [part.new_zeros((sum(sizes), *part.shape[1:])) for part in parts]
    padded = [
        torch.split(empty.index_copy(0, packing.slots, part), sizes)
        for empty, part in zip(blank, parts, strict=True)
    ]
    found = []
    for shape, *group in zip(packing.groups, *padded, strict=True):
        q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in group)
        read = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
        found.append(read.transpose(1, 2).flatten(0, 1))
    return torch.cat(found).index_select(0, packing.slots)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a linear layer multiplies this input."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def has_kernel(query: Tensor, kind: torch.dtype) -> bool:
    """Return whether a kernel attends to rows of any length, with heads in this type."""
    return query.device.type != "cpu" and kind != torch.float32 and query.shape[2] % 8 == 0


def cap_attention(model: Any) -> None:
    """Switch a model with capped attention scores to transformers' eager attention.

    Kernels of torch do not support a cap, but transformers would use them. Eager attention keeps
    the scores of all pairs of tokens in memory.

    Source: Gemma 2, arXiv 2408.00118, section 2 (logit soft-capping).
    """
    if getattr(getattr(model, "config", None), CAP, None) is not None:
        model.set_attn_implementation("eager")


def pack_attention(body: Any) -> bool:
    """Change the attention of a transformers decoder to accept packed rows; return False if that is
    impossible.

    From then on every call of the decoder must have a `packing`. The decoder has no LM head yet,
    and is sharded later.
    """

    def attend_to_rows(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *,
        packing: Packing, scaling: float, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Adapt `attend` to transformers' attention interface: [1, heads, T, head size] to [1, T,
        ...].
        """
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        return attend(q, k, v, packing, scaling)[None], None

    if body.config.model_type not in PACKED_FAMILIES or has_windows(body.config.to_dict()):
        return False
    from transformers import AttentionInterface

    AttentionInterface.register("planish_packed", attend_to_rows)
    body.set_attn_implementation("planish_packed")
    return True
