"""Sums, means and whitening over masks; masked entries never affect the result.

Each function first replaces masked entries by 0, so NaN and infinity in padding have no effect on
values or gradients. Half precision is widened to float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planish.base.parallel import ALONE, Share

if TYPE_CHECKING:
    from torch import Tensor


def hidden(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` in float32 or wider, with 0 wherever `mask` is 0."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    return wide.masked_fill(mask == 0, 0.0)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum `x` over the entries whose mask is not 0; over all dimensions when `dim` is None."""
    return hidden(x, mask).sum() if dim is None else hidden(x, mask).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average `x` over the entries whose mask is not 0; an empty mask gives 0."""
    kept = mask != 0
    count = kept.sum() if dim is None else kept.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def spread_of(x: Tensor, mask: Tensor, share: Share = ALONE) -> tuple[int, Tensor, Tensor]:
    """Return count, mean and sum of squared deviations, over the mask and the rows of all ranks."""
    kept = x[mask != 0]
    count = int(share.sum((mask != 0).sum()))
    mean = share.sum(kept.sum()) / max(count, 1)
    return count, mean, share.sum(((kept - mean) ** 2).sum())


def masked_whiten(x: Tensor, mask: Tensor, share: Share = ALONE) -> Tensor:
    """Shift and scale `x` to mean 0 and sample variance 1 over the mask, for the rows of all ranks.

    Returns:
        The same shape, 0 outside the mask. With fewer than two entries all are 0.
    """
    wide = hidden(x, mask)
    count, mean, squares = spread_of(wide, mask, share)
    if count < 2:
        return wide.new_zeros(wide.shape)
    scale = (squares / (count - 1) + 1e-8).rsqrt()
    return hidden((wide - mean) * scale, mask)


def last_column(mask: Tensor) -> Tensor:
    """Return [B] int64, the column of the last 1 in each row; 0 for rows without a 1.

    The mask may have holes, so this differs from "length - 1".
    """
    columns = (mask != 0).long().cumsum(1)
    # The first column where the running count reaches its total is the last 1 of the row.
    return (columns == columns[:, -1:]).long().argmax(1) * (columns[:, -1] > 0)


def without_last(mask: Tensor, num_tokens: int) -> Tensor:
    """Return the mask without the last `num_tokens` entries of each row, [B, S] bool."""
    kept = mask != 0
    to_come = kept.flip(1).long().cumsum(1).flip(1)
    return kept & (to_come > num_tokens)
