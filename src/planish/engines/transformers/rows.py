"""The rows of running requests: rows 0 to n - 1 always have a request.

If a row ends, a new request or the last row takes its place at once, so no step computes an empty
row. Rows know no model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planish.engines.requests import Output, Request, Sampling
from planish.engines.sampling import PLAIN, Choice, noise
from planish.engines.stops import StopStates
from planish.records.rollouts import FinishReason

_NOISE_BLOCK = 32
"""Number of steps whose noise is computed at once."""


@dataclass
class RunningRow:
    """The host's record of one running request."""

    request: Request
    start: int
    """Absolute position of the first token of this call."""
    end: int
    """Absolute length at which the budget is used up."""


class RunningRows:
    """Tokens, log-probabilities and sampling settings of all running requests.

    Column p of `tokens` and `logprobs` is the token at absolute position p, prompt included. The
    current token of a row (at `positions`) is known, but not in the KV cache yet.
    """

    def __init__(
        self,
        capacity: int,
        vocab_size: int,
        eos: Collection[int],
        device: torch.device,
        strings: StopStates | None = None,
    ) -> None:
        self.capacity, self.vocab_size, self.device = capacity, vocab_size, device
        self._strings = strings
        self.rows: list[RunningRow] = []
        self.width = 0
        self.longest = 0
        """Upper bound of the columns in use after the current step."""
        self.choice = PLAIN
        self._numbers = torch.zeros((capacity, len(_FIELDS)), dtype=torch.int64, device=device)
        self._settings = torch.ones((capacity, 2), dtype=torch.float32, device=device)
        self._noise = torch.zeros((capacity, _NOISE_BLOCK), dtype=torch.float64, device=device)
        self._column = _NOISE_BLOCK
        self._heeds_ends = torch.ones(capacity, dtype=torch.bool, device=device)
        self._is_end = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._is_end[sorted(eos)] = True
        self._stopped = self._is_end[:0]
        """[n] bool, rows that ended in the last step by a token or a stop string."""
        self._num_special = 0
        self._allocate(0)

    def _allocate(self, width: int) -> None:
        shape = (self.capacity, width)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.bias = torch.full(shape, -torch.inf, dtype=torch.float32, device=self.device)
        self.base = torch.arange(self.capacity, device=self.device) * width
        self.width = width

    def widen(self, width: int) -> None:
        """Widen every row to `width` columns and keep its content."""
        old = (self.tokens, self.logprobs, self.bias)
        self._allocate(width)
        for new, before in zip((self.tokens, self.logprobs, self.bias), old, strict=True):
            new[:, : before.shape[1]] = before

    def __len__(self) -> int:
        return len(self.rows)

    def _field(self, name: str) -> Tensor:
        return self._numbers[: len(self.rows), _FIELDS[name]]

    def positions(self) -> Tensor:
        """Return [n] int64: absolute position of each current token."""
        return self._field("position")

    def add(self, rows: Sequence[RunningRow]) -> Tensor:
        """Add new requests after the living rows; return their indices [k] int64."""
        first, last = len(self.rows), len(self.rows) + len(rows)
        self.rows.extend(rows)
        lengths = torch.tensor([row.start for row in rows])
        longest = int(lengths.max())
        ids = [row.request.prompt_ids + row.request.response_prefix for row in rows]
        padded = torch.tensor([i + (0,) * (longest - len(i)) for i in ids])
        self.tokens[first:last, :longest] = padded.to(self.device)
        seen = torch.arange(self.width) < lengths[:, None] - 1
        self.bias[first:last] = torch.where(seen, 0.0, -torch.inf).to(self.device)
        samplings = [row.request.sampling for row in rows]
        numbers = [
            (
                row.start - 1,
                row.end,
                len(row.request.prompt_ids),
                sampling.seed,
                sampling.top_k or self.vocab_size,
            )
            for row, sampling in zip(rows, samplings, strict=True)
        ]
        self._numbers[first:last] = torch.tensor(numbers, device=self.device)
        heeds_ends = [not sampling.ignore_eos for sampling in samplings]
        self._heeds_ends[first:last] = torch.tensor(heeds_ends, device=self.device)
        self._settings[first:last] = torch.tensor(
            [(s.temperature, s.top_p) for s in samplings], device=self.device
        )
        if self._strings is not None:
            self._strings.add(first, [row.request for row in rows])
        if self._column < _NOISE_BLOCK:
            self._fill_noise(first, self._column)
        self._num_special += sum(_is_special(sampling) for sampling in samplings)
        self._refresh_choice()
        return torch.arange(first, last, device=self.device)

    def _refresh_choice(self) -> None:
        """Record which settings any row uses, so that a batch with default settings does no extra
        work.
        """
        if not self._num_special:
            self.choice = PLAIN
            return
        samplings = [row.request.sampling for row in self.rows]
        temperatures = self._settings[: len(self.rows), 0]
        greedy = any(s.temperature == 0.0 for s in samplings)
        warm = greedy or any(s.temperature != 1.0 for s in samplings)
        self.choice = Choice(
            temperature=torch.where(temperatures == 0.0, 1.0, temperatures) if warm else None,
            greedy=temperatures == 0.0 if greedy else None,
            top_k=self._field("top_k") if any(s.top_k for s in samplings) else None,
            top_p=self._settings[: len(self.rows), 1]
            if any(s.top_p < 1.0 for s in samplings)
            else None,
        )

    def _fill_noise(self, first: int, column: int) -> None:
        """Compute the noise block of rows from `first` on; `column` is for the next token."""
        numbers = self._numbers[first : len(self.rows)]
        next_token = numbers[:, _FIELDS["position"]] + 1 - numbers[:, _FIELDS["prompt"]]
        steps = torch.arange(_NOISE_BLOCK, device=self.device) - column
        self._noise[first : len(self.rows)] = noise(
            numbers[:, _FIELDS["seed"], None], next_token[:, None] + steps
        )

    def uniform(self) -> Tensor:
        """Return [n] float64, the noise of the token that each row samples next."""
        if self._column == _NOISE_BLOCK:
            self._column = 0
            self._fill_noise(0, 0)
        return self._noise[: len(self.rows), self._column]

    def current(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the current tokens [n], their cells [n] (now visible), and the bias [n,
        longest].
        """
        num = len(self.rows)
        cells = self.base[:num] + self.positions()
        self.bias.view(-1).index_fill_(0, cells, 0.0)
        return self.tokens.view(-1)[cells], cells, self.bias[:num, : self.longest]

    def accept(self, ids: Tensor, logprobs: Tensor, cells: Tensor) -> np.ndarray:
        """Store the sampled tokens; return the indices of the rows that ended, as a sorted host
        array.
        """
        cells = cells + 1
        self.tokens.view(-1).index_copy_(0, cells, ids)
        self.logprobs.view(-1).index_copy_(0, cells, logprobs)
        positions = self.positions()
        positions += 1
        self._column += 1
        self.longest += 1
        stops = self._is_end[ids]
        if self._strings is not None:
            stops = stops | self._strings.read(ids)
        self._stopped = stops & self._heeds_ends[: len(self.rows)]
        ended = self._stopped | (positions + 1 >= self._field("end")) | ~(logprobs > -torch.inf)
        return ended.nonzero().squeeze(-1).cpu().numpy()

    def outputs(
        self, indices: Sequence[int], version: int, reason: FinishReason | None
    ) -> list[Output]:
        """Return the outputs of rows in this call, with stop tokens.

        If `reason` is None, it is STOP, LENGTH, or ABORT for non-finite logits.
        """
        # One copy from the device for all rows.
        where = torch.tensor(indices, device=self.device)
        lengths = (self._numbers[where, _FIELDS["position"]] + 1).tolist()
        tokens, logprobs = (
            wide[where, : max(lengths)].tolist() for wide in (self.tokens, self.logprobs)
        )
        stopped = self._stopped[where].tolist() if reason is None else ()
        outputs = []
        for place, index in enumerate(indices):
            row, why, error = self.rows[index], reason, ""
            ids, logs = (wide[place][row.start : lengths[place]] for wide in (tokens, logprobs))
            if why is None and not math.isfinite(logs[-1]):
                error = f"logits must be finite, got NaN or inf at position {lengths[place] - 1}"
                ids, logs, why = ids[:-1], logs[:-1], FinishReason.ABORT
            if why is None:
                why = FinishReason.STOP if stopped[place] else FinishReason.LENGTH
            versions, name = [version] * len(ids), row.request.request_id
            outputs.append(Output(name, ids, logs, versions, why, error=error))
        return outputs

    def remove(self, ended: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Remove rows and fill their places with the last rows.

        Returns:
            (source, target) of the moved rows, for the cache; None if no row moved.
        """
        gone = set(ended)
        left = len(self.rows) - len(gone)
        holes = [i for i in sorted(gone) if i < left]
        movers = [i for i in range(left, len(self.rows)) if i not in gone]
        self._num_special -= sum(_is_special(self.rows[i].request.sampling) for i in gone)
        for target, source in zip(holes, movers, strict=True):
            self.rows[target] = self.rows[source]
        del self.rows[left:]
        moved = None
        if holes:
            origin = torch.tensor(movers, device=self.device)
            hole = torch.tensor(holes, device=self.device)
            for storage in (self._numbers, self._settings, self._noise, self._heeds_ends):
                storage[hole] = storage[origin]
            if self._strings is not None:
                self._strings.move(origin, hole)
            for wide in (self.tokens, self.logprobs, self.bias):
                wide[hole, : self.longest] = wide[origin, : self.longest]
            moved = origin, hole
        if left:
            self._refresh_choice()
        return moved

    def update_longest(self) -> None:
        """Recompute the number of columns in use after rows were added or removed."""
        self.longest = int(self.positions().max()) + 1 if self.rows else 0


_FIELDS: Mapping[str, int] = {
    name: index for index, name in enumerate(("position", "end", "prompt", "seed", "top_k"))
}
"""Map from name to column of the rows' table of integers."""


def _is_special(sampling: Sampling) -> bool:
    return sampling.temperature != 1.0 or sampling.top_p < 1.0 or sampling.top_k > 0
