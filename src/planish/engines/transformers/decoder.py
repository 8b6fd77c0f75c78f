"""What computes logits for the engine, over a cache of rows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from planish.engines.transformers.kv_cache import KeyValueCache


class Decoder(Protocol):
    """Computes logits over a cache of rows."""

    cache: KeyValueCache

    def prefill(self, tokens: Tensor, rows: Tensor, owner: Tensor) -> None:
        """Fill the cache of `rows` from position 0.

        Args:
            tokens: [m, length] int64, padded on the right.
            rows: [k] int64, rows to fill.
            owner: [k] int64, which of the m sequences each row takes.
        """

    def decode(self, tokens: Tensor, positions: Tensor, cells: Tensor, bias: Tensor) -> Tensor:
        """Add one token to each of the first n rows.

        Args:
            tokens: [n] int64.
            positions: [n] int64, absolute position of each token.
            cells: [n] int64, `row * cache.width + position`.
            bias: [n, longest] float, 0 on visible cells and -inf elsewhere.

        Returns:
            Logits [n, vocabulary] of the following token.
        """

    def refresh(self) -> None:
        """Take over weights that were changed in place."""
