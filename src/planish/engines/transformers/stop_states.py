"""Where each running row is on its way to a stop string, on the device of the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planish.engines.requests import Request
from planish.engines.stops import StopTable


class StopStates:
    """State of every row in the stop table of the model; rows that ignore it have one of their own.

    Nothing here waits for the device.
    """

    def __init__(self, table: StopTable, capacity: int, device: torch.device) -> None:
        self._table = table
        num_states, self._num_classes = table.next_state.shape
        self._ignoring = num_states
        following = torch.from_numpy(table.next_state).long()
        own = torch.full((1, self._num_classes), self._ignoring)
        self._following = torch.cat([following, own]).flatten().to(device)
        found = torch.from_numpy(table.found >= 0)
        self._complete = torch.cat([found, torch.zeros(1, dtype=torch.bool)]).to(device)
        self._class = torch.from_numpy(table.token_class).long().to(device)
        self._states = torch.zeros(capacity, dtype=torch.int64, device=device)

    def add(self, first: int, requests: Sequence[Request]) -> None:
        """Put requests into the rows from `first` on; response tokens of earlier windows count."""
        states = [
            self._ignoring
            if request.sampling.ignore_eos
            else self._table.advance(0, request.response_prefix)
            for request in requests
        ]
        self._states[first : first + len(states)] = torch.tensor(states)

    def read(self, ids: Tensor) -> Tensor:
        """Go on by one token in each of the first rows; return which are complete, [n] bool."""
        states = self._states[: len(ids)]
        states.copy_(self._following[states * self._num_classes + self._class[ids]])
        return self._complete[states]

    def would_complete(self, num_rows: int) -> Tensor:
        """Return which tokens would complete a string now, [n, vocabulary] bool."""
        lines = self._states[:num_rows, None] * self._num_classes + self._class
        return self._complete[self._following[lines]]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows."""
        self._states[target] = self._states[source]

    def strings(self, rows: Tensor) -> list[str | None]:
        """Return the string that each of some rows has completed."""
        states = self._states[rows].tolist()
        return [None if s == self._ignoring else self._table.string_at(s) for s in states]
