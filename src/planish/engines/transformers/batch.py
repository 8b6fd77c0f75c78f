"""A batch of running requests over one model: rows, their KV cache, and the decoder that fills it.

New requests replace ended rows before the next step. Without new requests the batch shrinks, and
attention reads only up to the longest living row. The last prompt token is decoded together with
the other rows, so tokens are sampled in one place only. A batch knows no queue, no state of an
engine and no other batch: its outputs depend only on its requests and the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from planish.engines.base import COUNTERS
from planish.engines.requests import Output, Request
from planish.engines.sampling import choose
from planish.engines.stops import StopStates, StopTable
from planish.engines.transformers.kv_cache import KeyValueCache
from planish.engines.transformers.routing import RoutingCells
from planish.engines.transformers.rows import RunningRow, RunningRows
from planish.records.rollouts import FinishReason

PREFILL_TOKENS = 16384
"""Most tokens, by default, in one forward pass over prompts."""


class Decoder(Protocol):
    """Computes logits over a cache of rows."""

    cache: KeyValueCache

    def prefill(self, tokens: Tensor, rows: Tensor, owner: Tensor) -> None:
        """Fill the cache of rows [k] int64 from position 0.

        Row i gets the sequence with number `owner[i]` ([k] int64) of `tokens` [m, length] int64,
        which are padded on the right.
        """

    def decode(self, tokens: Tensor, positions: Tensor, cells: Tensor, bias: Tensor) -> Tensor:
        """Add one token to each of the first n rows; return logits [n, vocabulary] for the next
        token.

        `tokens`, absolute `positions` and `cells` (`row * cache.width + position`) are [n] int64.
        `bias` [n, longest] is 0 on visible cells and -inf elsewhere.
        """

    def refresh(self) -> None:
        """Use weights that were changed in place."""


@dataclass(frozen=True)
class Limits:
    """Limits of a batch, and the ends of its responses."""

    max_rows: int
    max_model_len: int
    vocab_size: int
    eos: frozenset[int]
    strings: StopTable | None = None
    prefill_tokens: int = PREFILL_TOKENS
    """Most tokens, padding included, of one forward pass over prompts."""

    def fault(self, request: Request) -> str:
        """Return why a request cannot be served; "" if it can."""
        ids = request.prompt_ids + request.response_prefix
        if len(ids) >= self.max_model_len:
            return (
                f"prompt and prefix must be shorter than {self.max_model_len} tokens, got "
                f"{len(ids)}"
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            return f"token ids must lie in 0..{self.vocab_size - 1}, got {min(ids)}..{max(ids)}"
        return ""


class DecodeBatch:
    """Continuous batching over a static cache of `limits.max_rows` rows."""

    def __init__(
        self,
        limits: Limits,
        new_decoder: Callable[[KeyValueCache], Decoder],
        device: torch.device,
        routing: RoutingCells | None = None,
    ) -> None:
        self.limits = limits
        self._device = device
        self.cache = KeyValueCache(limits.max_rows, device)
        self.decoder = new_decoder(self.cache)
        self._routing = routing
        self.counts: dict[str, int] = {}
        """Value of each of `COUNTERS` so far."""
        self.renew()

    def renew(self) -> None:
        """Drop rows and cache, and reset the counters; the weights stay."""
        limits, strings = self.limits, None
        if limits.strings is not None:
            strings = StopStates(limits.strings, limits.max_rows, self._device)
        self._rows = RunningRows(
            limits.max_rows, limits.vocab_size, limits.eos, self._device, strings
        )
        self.cache.release()
        if self._routing is not None:
            self._routing.release()
        self.counts.update(dict.fromkeys(COUNTERS, 0))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def request_ids(self) -> list[str]:
        """Ids of the running requests."""
        return [row.request.request_id for row in self._rows.rows]

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request]) -> None:
        """Start requests without a `fault` in free rows, and prefill them."""
        rows = []
        for request in requests:
            start = len(request.prompt_ids) + len(request.response_prefix)
            end = min(start + request.sampling.max_new_tokens, self.limits.max_model_len)
            rows.append(RunningRow(request, start, end))
        self._make_room(max(row.start for row in rows) + 1, max(row.end for row in rows))
        indices = self._rows.add(rows).tolist()
        self._rows.update_longest()
        self._prefill(indices, [row.start - 1 for row in rows])

    def _make_room(self, needed: int, wanted: int) -> None:
        """Widen the rows: up to 1,024 to the length `wanted`, beyond that by doubling."""
        width = wanted if wanted <= 1024 else needed
        if self.cache.reserve(width):
            self._rows.widen(self.cache.width)
            if self._routing is not None:
                self._routing.widen(self.cache.width)

    def _prefill(self, indices: Sequence[int], lengths: Sequence[int]) -> None:
        """Fill the cache of rows up to their current tokens; equal sequences are computed once."""
        owners: dict[tuple[int, ...], list[int]] = {}
        where = torch.tensor(indices, device=self._device)
        # One copy from the device for all rows.
        tokens = self._rows.tokens[where, : max(lengths)].tolist()
        for index, line, length in zip(indices, tokens, lengths, strict=True):
            if length:
                owners.setdefault(tuple(line[:length]), []).append(index)
        batch: list[tuple[int, ...]] = []
        longest = 0
        for ids in sorted(owners, key=len):
            if batch and len(ids) * (len(batch) + 1) > self.limits.prefill_tokens:
                self._prefill_batch(batch, longest, owners)
                batch = []
            batch.append(ids)
            longest = len(ids)
        if batch:
            self._prefill_batch(batch, longest, owners)

    def _prefill_batch(
        self, batch: list[tuple[int, ...]], longest: int, owners: dict[tuple[int, ...], list[int]]
    ) -> None:
        padded = torch.tensor([ids + (0,) * (longest - len(ids)) for ids in batch])
        rows = torch.tensor([row for ids in batch for row in owners[ids]]).to(self._device)
        owner = torch.tensor([i for i, ids in enumerate(batch) for _ in owners[ids]])
        owner = owner.to(self._device)
        self.decoder.prefill(padded.to(self._device), rows, owner)
        if self._routing is not None:
            self._routing.fill(rows, owner)
        self.counts["prefill_tokens"] += sum(len(ids) for ids in batch)

    @torch.inference_mode()
    def advance(self, version: int) -> list[Output]:
        """Generate one token for each running request (there is at least one); return the outputs
        of finished requests.
        """
        rows = self._rows
        if rows.longest + 1 > self.cache.width:
            self._make_room(rows.longest + 1, rows.longest + 1)
        tokens, cells, bias = rows.current()
        logits = self.decoder.decode(tokens, rows.positions(), cells, bias)
        if self._routing is not None:
            self._routing.append(cells)
        ids, logprobs = choose(logits, rows.uniform(), rows.choice)
        self.counts["steps"] += 1
        self.counts["tokens"] += len(rows)
        self.counts["row_steps"] += len(rows)
        self.counts["most_rows"] = max(self.counts["most_rows"], len(rows))
        ended = rows.accept(ids, logprobs, cells)
        return self._end(ended.tolist(), version, None) if len(ended) else []

    def _end(self, ended: list[int], version: int, reason: FinishReason | None) -> list[Output]:
        outputs = self._rows.outputs(ended, version, reason)
        for index, output in zip(ended, outputs, strict=True):
            if output.error:
                self.cache.clear(index)
                self.counts["tokens"] -= 1
            row = self._rows.rows[index]
            if self._routing is not None and row.request.sampling.want_routing and output.token_ids:
                output.routing = self._routing.read(index, row.start + output.num_tokens - 1)
        moved = self._rows.remove(ended)
        if moved is not None:
            self.cache.move(*moved, self._rows.longest)
            if self._routing is not None:
                self._routing.move(*moved, self._rows.longest)
        self._rows.update_longest()
        return outputs

    @torch.inference_mode()
    def withdraw(self, request_ids: Collection[str], version: int) -> list[Output]:
        """End running requests with ABORT; unknown ids are ignored."""
        ended = [
            i for i, row in enumerate(self._rows.rows) if row.request.request_id in request_ids
        ]
        return self._end(ended, version, FinishReason.ABORT) if ended else []

    def close(self) -> None:
        """Remove the hooks from the model."""
        if self._routing is not None:
            self._routing.close()
