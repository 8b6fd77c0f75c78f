"""Waiting responses: finished responses on which the critic has not trained yet."""

from __future__ import annotations

from typing import ClassVar

from planish.records.ragged import Ragged
from planish.records.schema import Record, column, record


@record
class WaitingSet(Record):
    """One row per response, in the order of waiting, the longest first.

    It holds all that a step of the critic needs, so that no set of an earlier iteration has to be
    kept for it.

    Example:
        >>> import numpy as np
        >>> waiting = WaitingSet(
        ...     prompt_tokens=Ragged.from_lists([[5, 6]], np.int32),
        ...     response_tokens=Ragged.from_lists([[7, 1]], np.int32),
        ...     values=Ragged.from_lists([[0.25, 0.5]], np.float32),
        ...     returns=Ragged.from_lists([[1.0, 1.0]], np.float32))
        >>> waiting.num_rows
        1
    """

    SCHEMA: ClassVar[str] = "waiting/1"

    prompt_tokens: Ragged = column("list<int32>", "prompt after the chat template")
    response_tokens: Ragged = column("list<int32>", "response tokens of all windows")
    values: Ragged = column("list<float32>", "of the state before each token, when it was sampled")
    returns: Ragged = column("list<float32>", "what the critic is to say of each token")
