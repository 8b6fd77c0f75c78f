"""Stop strings for an engine that knows only token ids: an automaton that reads tokens.

The strings become an Aho-Corasick automaton over bytes, and the automaton becomes a table over
tokens. The state after a token is one lookup on the device of the tokens. A string that spans
tokens or windows, or ends inside a token, is found at the token that completes it.

The text is not cut before a stop string, because training needs the sampled tokens; the last token
may reach beyond the string.

Source: Aho and Corasick, CACM 18 (6), 1975.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planish.base.errors import ConfigError
from planish.engines.requests import Request
from planish.models.tokens import Tokenizer, check_stop_strings

Table = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class StopTable:
    """Stop strings of one tokenizer.

    Example:
        >>> table = stop_table(["ab"], [b"a", b"b", b"xa", b"bc"])
        >>> bool(table.complete[table.advance(0, [2, 3])])
        True
    """

    token_class: Table
    """[vocabulary] int32, class of each token: from any state, tokens of one class lead to the same
    next state."""
    next_state: Table
    """[states, classes] int32; state 0 is the start of a response."""
    complete: npt.NDArray[np.bool_]
    """[states]: whether a string is complete. The automaton never leaves such a state."""

    def advance(self, state: int, ids: Iterable[int]) -> int:
        """Return the state after more tokens; tokens beyond the vocabulary have no text."""
        for token in ids:
            if token < len(self.token_class):
                state = int(self.next_state[state, self.token_class[token]])
        return state


def tokenizer_stops(tokenizer: Tokenizer, vocab_size: int) -> StopTable | None:
    """Return the stop table of a tokenizer; None if it has no stop strings.

    The LM head has `vocab_size` rows, which may be more or fewer than the tokens.

    Raises:
        ConfigError: the tokenizer does not say which text each token adds.
    """
    if not tokenizer.stop_strings:
        return None
    texts = tokenizer.token_bytes()[:vocab_size]
    return stop_table(tokenizer.stop_strings, texts + [b""] * (vocab_size - len(texts)))


def stop_table(strings: Sequence[str], token_bytes: Sequence[bytes]) -> StopTable:
    """Return the stop table of strings, from the bytes that each token adds to the text.

    Raises:
        ConfigError: a string fails `check_stop_strings`, or no tokens complete it.
    """
    unique = tuple(dict.fromkeys(strings))
    check_stop_strings(unique)
    step, found = _automaton([text.encode() for text in unique])
    reached = _after_tokens(step, token_bytes)
    columns, token_class = np.unique(reached, axis=0, return_inverse=True)
    next_state = np.ascontiguousarray(columns.T, dtype=np.int32)
    rare = [text for index, text in enumerate(unique) if index not in _ends(reached, found)]
    # Another string may only have been completed before it.
    alone = {text: _automaton([text.encode()]) for text in rare}
    unspelled = [
        text for text, (s, f) in alone.items() if not _ends(_after_tokens(s, token_bytes), f)
    ]
    if unspelled:
        raise ConfigError(
            f"stop strings must be texts that tokens of this policy spell, got {unspelled!r:.200}, "
            "which no sequence of them gives; leave them out of `model.stop_strings`"
        )
    return StopTable(token_class.reshape(-1).astype(np.int32), next_state, found >= 0)


def _automaton(patterns: Sequence[bytes]) -> tuple[npt.NDArray[np.int16], Table]:
    """Return the state after each byte, [states, 256], and the string found in each state (-1:
    none).
    """
    step: list[list[int]] = [[-1] * 256]
    found = [-1]
    for index, pattern in enumerate(patterns):
        state = 0
        for byte in pattern:
            if step[state][byte] < 0:
                step[state][byte] = len(step)
                step.append([-1] * 256)
                found.append(-1)
            state = step[state][byte]
        found[state] = index
    # Breadth first: a missing step follows the state of the longest proper suffix.
    suffix = [0] * len(step)
    queue: deque[int] = deque([0])
    while queue:
        state = queue.popleft()
        if found[state] < 0 and state:
            found[state] = found[suffix[state]]
        for byte in range(256):
            child = step[state][byte]
            beyond = step[suffix[state]][byte] if state else 0
            if child < 0:
                step[state][byte] = beyond
            else:
                suffix[child] = beyond
                queue.append(child)
    for state, index in enumerate(found):
        if index >= 0:
            step[state] = [state] * 256
    return np.array(step, np.int16), np.array(found, np.int32)


def _after_tokens(
    step: npt.NDArray[np.int16], token_bytes: Sequence[bytes]
) -> npt.NDArray[np.int16]:
    """Return the state after each token from each state, [vocabulary, states] int16."""
    lengths = np.array([len(text) for text in token_bytes], np.int64)
    order = np.argsort(-lengths, kind="stable")
    columns = [
        np.array([token_bytes[token][place] for token in order[: (lengths > place).sum()]])
        for place in range(int(lengths.max(initial=0)))
    ]
    reached = np.empty((len(lengths), len(step)), np.int16)
    for state in range(len(step)):
        now = np.full(len(lengths), state, np.int16)
        for column in columns:
            now[: len(column)] = step[now[: len(column)], column]
        reached[order, state] = now
    return reached


def _ends(reached: npt.NDArray[np.int16], found: Table) -> set[int]:
    """Return the strings with which a response can end, from the states after each token."""
    seen, open_states = {0}, [0]
    while open_states:
        following = {*np.unique(reached[:, open_states.pop()]).tolist()} - seen
        seen |= following
        open_states += following
    return {int(found[state]) for state in seen if found[state] >= 0}


class StopStates:
    """State of every row in the model's stop table; reading it never waits for the device."""

    def __init__(self, table: StopTable, capacity: int, device: torch.device) -> None:
        self._table, self._num_classes = table, table.next_state.shape[1]
        self._following = torch.from_numpy(table.next_state).long().flatten().to(device)
        self._complete = torch.from_numpy(table.complete).to(device)
        self._class = torch.from_numpy(table.token_class).long().to(device)
        self._states = torch.zeros(capacity, dtype=torch.int64, device=device)

    def add(self, first: int, requests: Sequence[Request]) -> None:
        """Add requests to the rows from `first` on, in the state after their earlier response
        tokens.
        """
        states = [self._table.advance(0, request.response_prefix) for request in requests]
        self._states[first : first + len(states)] = torch.tensor(states)

    def read(self, ids: Tensor) -> Tensor:
        """Advance the first n rows by one token each; return [n] bool, True for complete
        strings.
        """
        states = self._states[: len(ids)]
        states.copy_(self._following[states * self._num_classes + self._class[ids]])
        return self._complete[states]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the state of rows `source` to rows `target`."""
        self._states[target] = self._states[source]
