"""Waiting responses: finished responses on which the critic has not trained yet."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from planish.records.ragged import Ragged
from planish.records.schema import Record, column, record, row_faults, value_faults


@record
class WaitingSet(Record):
    """One row per response, in the order of waiting, the longest first.

    It holds all that a step of the critic needs, so that no set of an earlier iteration has to be
    kept for it.

    Example:
        >>> waiting = WaitingSet(
        ...     prompt_tokens=Ragged.from_lists([[5, 6]], np.int32),
        ...     response_tokens=Ragged.from_lists([[7, 1]], np.int32),
        ...     values=Ragged.from_lists([[0.25, 0.5]], np.float32),
        ...     returns=Ragged.from_lists([[1.0, 1.0]], np.float32))
        >>> waiting.validate(), waiting.num_rows
        (None, 1)
    """

    SCHEMA: ClassVar[str] = "waiting/1"
    REMEDY: ClassVar[str] = "the train stage writes this set"

    prompt_tokens: Ragged = column("list<int32>", "prompt after the chat template")
    response_tokens: Ragged = column("list<int32>", "response tokens of all windows")
    values: Ragged = column("list<float32>", "of the state before each token, when it was sampled")
    returns: Ragged = column("list<float32>", "what the critic is to say of each token")

    @classmethod
    def empty(cls) -> WaitingSet:
        """Return a set of no rows."""
        tokens, numbers = Ragged.empty(np.int32), Ragged.empty(np.float32)
        return cls(tokens, tokens, numbers, numbers)

    def value_faults(self) -> list[str]:
        """Return what is wrong with values of the right form."""
        faults = []
        wanted = self.response_tokens.lengths
        for name in ("prompt_tokens", "response_tokens"):
            tokens: Ragged = getattr(self, name)
            lengths, ids = tokens.lengths, tokens.values
            faults += row_faults(f"`{name}` must have at least one token", lengths == 0, lengths)
            faults += value_faults(f"`{name}` must be token ids", ids < 0, ids)
        for name in ("values", "returns"):
            numbers: Ragged = getattr(self, name)
            lengths, values = numbers.lengths, numbers.values
            rule = f"`{name}` must have one number per response token"
            faults += row_faults(rule, lengths != wanted, lengths, wanted)
            faults += value_faults(f"`{name}` must be finite", ~np.isfinite(values), values)
        return faults
