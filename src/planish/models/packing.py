"""Rows of a batch laid end to end, without padding, and attention that never crosses rows.

Everything in a decoder but attention looks at one token at a time, so it is computed for one long
row. Attention is given each row alone: by a kernel for rows of any length on accelerators, and in
groups of rows of similar length elsewhere. Which of the two is decided in `attend` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

FAMILIES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
"""`model_type` of decoders of transformers that call `attend` once they are told to."""

GROUP_SPREAD = 0.8
"""Rows of a group are at least this share of its longest one."""


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a padded batch lie when its rows are laid end to end.

    The last token of a row is left out: no state behind it is read.

    Example:
        >>> packing = pack_rows(np.array([3, 2]), num_columns=4)
        >>> packing.tokens.tolist(), packing.positions.tolist(), packing.bounds.tolist()
        ([0, 1, 4], [0, 1, 0], [0, 2, 3])
    """

    tokens: Tensor
    """[T] int64, of each token its place in the flattened [B, S]."""
    positions: Tensor
    """[T] int64, of each token its column."""
    bounds: Tensor
    """[B + 1] int32, where rows begin and where the last one ends."""
    longest: int
    """Tokens of the longest row."""
    groups: tuple[tuple[int, int], ...]
    """Rows and columns of each group of rows of similar length."""
    slots: Tensor
    """[T] int64, of each token its place in all groups, flattened, one after the other."""

    def take(self, per_token: Tensor) -> Tensor:
        """Return [T, ...], the packed tokens of [B, S, ...]."""
        return per_token.flatten(0, 1).index_select(0, self.tokens)

    def to(self, device: torch.device) -> Packing:
        """Return the packing on another device."""
        moved = (x.to(device) for x in (self.tokens, self.positions, self.bounds))
        tokens, positions, bounds = moved
        return Packing(tokens, positions, bounds, self.longest, self.groups, self.slots.to(device))


def pack_rows(lengths: npt.NDArray[np.int64], num_columns: int) -> Packing:
    """Return how to lay rows end to end.

    Args:
        lengths: [B] int64, columns up to the last token whose score is needed, at least 2.
        num_columns: S of the padded batch.
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
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None = None
) -> Tensor:
    """Attend to the tokens before, in the same row.

    Args:
        query: [T, heads, head size].
        key: as `query`, with a head for each group of heads.
        value: as `key`.
        packing: of the T tokens.
        scale: of the products; None is 1 over the root of the head size.

    Returns:
        [T, heads, head size].
    """
    parts = (query, key, value)
    is_grouped = query.shape[1] != key.shape[1]
    kind = query.dtype
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        kind = torch.get_autocast_dtype("cuda")
    if query.is_cuda and kind != torch.float32 and query.shape[2] % 8 == 0:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (part.to(kind) for part in parts)
        bounds, longest = packing.bounds, packing.longest
        read = varlen_attn(
            q, k, v, bounds, bounds, longest, longest,
            scale=scale, window_size=(-1, 0), enable_gqa=is_grouped,
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


def pack_attention(body: Any) -> bool:
    """Tell the attention of a decoder of transformers to take packed rows; False where it can not.

    From then on the decoder must be given a `packing` with every call.

    The decoder comes without its head, and is sharded later.
    """

    def attend_to_rows(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *,
        packing: Packing, scaling: float, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Meet the attention interface of transformers: [1, heads, T, head size] to [1, T, ...]."""
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        return attend(q, k, v, packing, scaling)[None], None

    options = body.config
    windows = "sliding_attention" in (getattr(options, "layer_types", None) or ())
    windows |= options.model_type in ("mistral", "mixtral") and options.sliding_window is not None
    if options.model_type not in FAMILIES or windows:
        return False
    from transformers import AttentionInterface

    AttentionInterface.register("planish_packed", attend_to_rows)
    body.set_attn_implementation("planish_packed")
    return True
