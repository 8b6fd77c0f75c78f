"""Reward shaping and group masks in numpy, shared by rollout, reward and train.

Source: DAPO, arXiv 2503.14476, sections 3.2 (dynamic sampling) and 3.4 (overlong reward shaping).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planish.base.errors import ConfigError

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


def check_overlong(max_tokens: int, buffer_tokens: int) -> None:
    """Refuse limits that do not define a penalty.

    Raises:
        ConfigError: `0 <= buffer_tokens <= max_tokens` and `max_tokens >= 1` do not hold.
    """
    if max_tokens < 1 or not 0 <= buffer_tokens <= max_tokens:
        raise ConfigError(
            "`overlong_buffer_tokens` must lie between 0 and `max_response_tokens`, got "
            f"{buffer_tokens} and {max_tokens}; lower `reward.overlong_buffer_tokens`"
        )


def overlong_penalty(
    lengths: npt.ArrayLike, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> Floats:
    """Return the soft overlong punishment of each response.

    The punishment is 0 up to `max_tokens - buffer_tokens`, then falls linearly to -1 at
    `max_tokens`, and is -1 beyond; all of it times `factor`. With `buffer_tokens` 0 there is no
    linear part.

    Args:
        lengths: [R] response lengths in tokens, the end token included.
        max_tokens: longest response that may be generated.
        buffer_tokens: length of the linear part, in tokens.
        factor: weight of the penalty, >= 0.

    Returns:
        [R] float32, <= 0.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    length = np.asarray(lengths, dtype=np.float64)
    start = max_tokens - buffer_tokens
    line = (start - length) / max(buffer_tokens, 1)
    penalty = np.where(length <= start, 0.0, np.where(length <= max_tokens, line, -1.0))
    # Adding zero turns -0.0 into 0.0, so that equal inputs give equal bytes.
    return (penalty * factor + 0.0).astype(np.float32)


def equal_rows(values: npt.ArrayLike, group_index: npt.ArrayLike) -> Bools:
    """Mark the rows of groups whose values are all equal: their advantage is exactly 0.

    Args:
        values: [R] shaped rewards.
        group_index: [R] int, rows of one group share a value.

    Returns:
        [R] bool, equal within a group. A group of one row is marked.
    """
    value = np.asarray(values, dtype=np.float32)
    inverse, count = _groups(group_index)
    low = np.full(len(count), np.inf, dtype=np.float32)
    high = np.full(len(count), -np.inf, dtype=np.float32)
    np.minimum.at(low, inverse, value)
    np.maximum.at(high, inverse, value)
    return np.asarray(low == high)[inverse]


def rows_of_groups_with(rows: npt.ArrayLike, group_index: npt.ArrayLike) -> Bools:
    """Mark every row of the groups in which at least one row is marked.

    Args:
        rows: [R] bool.
        group_index: [R] int, rows of one group share a value.

    Returns:
        [R] bool.
    """
    marked = np.asarray(rows, dtype=np.bool_)
    inverse, count = _groups(group_index)
    hit = np.bincount(inverse, weights=marked.astype(np.float64), minlength=len(count)) > 0
    return np.asarray(hit)[inverse]


def _groups(group_index: npt.ArrayLike) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    _, inverse, count = np.unique(np.asarray(group_index), return_inverse=True, return_counts=True)
    return inverse, count
