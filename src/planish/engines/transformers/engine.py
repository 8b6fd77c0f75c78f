"""The embedded engine: continuous batching over any Hugging Face causal LM, in one process.

Rows that end are replaced from the queue before the next step; with an empty queue the batch
shrinks, and attention reads only up to the longest living row. The last prompt token is decoded
with everyone else, so that tokens are sampled in one place only.

transformers' own continuous batching is not used: its sampler draws from the global generator, so
a response would depend on its neighbours and on its windows, it can not change weights under frozen
requests, and on CPU its paged attention is several times slower than plain `generate`
(tests/benchmarks/results/rollout.json).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from planish.base.errors import ConfigError, EngineError
from planish.engines.base import BaseEngine
from planish.engines.config import EngineConfig
from planish.engines.requests import (
    Capabilities,
    ModelRef,
    Output,
    Request,
    WeightUpdate,
)
from planish.engines.sampling import choose
from planish.engines.stops import StopStates
from planish.engines.transformers.fused_decoder import FusedDecoder
from planish.engines.transformers.kv_cache import KeyValueCache
from planish.engines.transformers.rows import RunningRow, RunningRows
from planish.engines.transformers.served_model import ServedModel, open_model
from planish.engines.weights import WeightSource
from planish.records.rollouts import FinishReason

PREFILL_TOKENS = 16384
"""Most tokens of one forward over prompts where the settings leave it open."""


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


class TransformersEngine(BaseEngine):
    """Continuous batching over a static cache of `max_rows` rows."""

    def __init__(
        self,
        *,
        max_rows: int = 256,
        max_model_len: int = 0,
        device: str = "cpu",
        fused: bool = True,
        config: EngineConfig | None = None,
    ) -> None:
        """Make an engine.

        Args:
            max_rows: requests that run at once.
            max_model_len: prompt and response in tokens; 0 takes the model's own limit.
            device: torch device.
            fused: use the fast decoder for the families that it covers.
            config: most tokens, padding included, of one forward over prompts.
        """
        super().__init__()
        if max_rows < 1 or max_model_len < 0:
            raise ConfigError(
                f"`max_rows` must be at least 1 and `max_model_len` at least 0, got {max_rows} and "
                f"{max_model_len}"
            )
        self._max_rows = max_rows
        self._prefill_tokens = (config or EngineConfig()).batch_tokens or PREFILL_TOKENS
        self._max_model_len, self._fused = max_model_len, fused
        self._device = torch.device(device)
        self._served: ServedModel | None = None
        self._counts = dict.fromkeys(
            ("tokens", "steps", "row_steps", "most_rows", "prefill_tokens"), 0
        )

    # Start and stop.

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do with this model."""
        return Capabilities(
            max_model_len=self._max_model_len,
            seed_split_exact=True,
            bit_stable=self._device.type == "cpu",
            moe=True,
        )

    @property
    def decoder_name(self) -> str:
        """Which decoder serves this model."""
        return type(self._decoder).__name__

    def _load(self, model: ModelRef, source: WeightSource | None) -> int:
        served = open_model(model, self._device, fused=self._fused)
        if source is not None:
            served.write(source)
        limit = int(served.config.get("max_position_embeddings") or 1 << 20)
        self._max_model_len = min(self._max_model_len or limit, limit)
        self._eos = frozenset(served.tokenizer.eos_token_ids)
        self._vocab_size = served.vocab_size
        table = served.stop_table()
        strings = StopStates(table, self._max_rows, self._device) if table is not None else None
        self._rows = RunningRows(self._max_rows, self._vocab_size, self._device, strings)
        self._cache = KeyValueCache(self._max_rows, self._device)
        self._served = served
        self._decoder = self._choose_decoder(served)
        return served.version

    def _choose_decoder(self, served: ServedModel) -> Decoder:
        """Return the fused decoder where it fits, else the general one.

        Where transformers' modules are at hand, a decoder must prove itself against their forward.
        """
        kinds: list[Callable[[KeyValueCache], Decoder]] = []
        if self._fused and served.fits_fused():
            # weights that were handed over keep their storage: their owner may save them
            kinds.append(
                partial(FusedDecoder, served.config, served.tensors, share=served.modules is None)
            )
        if served.modules is None:
            return kinds[0](self._cache)
        from planish.engines.transformers.module_decoder import ModuleDecoder

        kinds.append(partial(ModuleDecoder, served.modules))
        faults = []
        for kind in kinds:
            probe = kind(KeyValueCache(2, self._device))
            error = self._probe(probe, served.modules)
            if error < 1.0:
                return kind(self._cache)
            faults.append(f"{type(probe).__name__} {error:.2g}")
        raise EngineError(
            f"cached decoding must give the logits of the plain forward, got errors of "
            f"{', '.join(faults)} tolerances with {served.architecture}; use another engine"
        )

    @torch.inference_mode()
    def _probe(self, decoder: Decoder, modules: Any) -> float:
        """Return the error of cached decoding on eight tokens, in tolerances."""
        ids = torch.arange(1, 17, device=self._device).view(2, 8) % self._vocab_size
        expected = modules(input_ids=ids, use_cache=False).logits[:, 5:].float()
        decoder.cache.reserve(8)
        rows = torch.arange(2, device=self._device)
        decoder.prefill(ids[:, :5], rows, rows)
        worst = 0.0
        tolerance = 1e-3 if modules.dtype == torch.float32 else 0.1
        for position in range(5, 8):
            where = torch.full_like(rows, position)
            bias = torch.zeros((2, position + 1), device=self._device)
            cells = rows * decoder.cache.width + where
            logits = decoder.decode(ids[:, position], where, cells, bias).float()
            gap = (logits - expected[:, position - 5]).abs().max()
            scale = 1.0 + expected[:, position - 5].abs().max()
            worst = max(worst, float(gap / (tolerance * scale)))
        return worst

    def _release(self) -> None:
        self._served = None
        for name in ("_decoder", "_cache", "_rows"):
            self.__dict__.pop(name, None)

    def stats(self) -> dict[str, Any]:
        """Return counters since the start.

        `steps` are forward passes that decode, `most_rows` the most living rows of any of them,
        `occupancy` living rows per step over `max_rows`.
        """
        steps = max(self._counts["steps"], 1)
        return {
            **super().stats(),
            **self._counts,
            "cache_bytes": self._cache.num_bytes() if self._served is not None else 0,
            "occupancy": self._counts["row_steps"] / steps / self._max_rows,
        }

    # Requests.

    def _check(self, request: Request) -> str:
        ids = request.prompt_ids + request.response_prefix
        if len(ids) >= self._max_model_len:
            return (
                f"prompt and prefix must be shorter than {self._max_model_len} tokens, got "
                f"{len(ids)}"
            )
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            return f"token ids must lie in 0..{self._vocab_size - 1}, got {min(ids)}..{max(ids)}"
        return ""

    def _free_rows(self) -> int:
        return self._max_rows - len(self._rows)

    def _num_running(self) -> int:
        return len(self._rows) if self._served is not None else 0

    @torch.inference_mode()
    def _admit(self, requests: Sequence[Request]) -> list[Output]:
        rows = []
        now = time.monotonic()
        for request in requests:
            start = len(request.prompt_ids) + len(request.response_prefix)
            end = min(start + request.sampling.max_new_tokens, self._max_model_len)
            waited = now - self._arrivals.get(request.request_id, now)
            stats = {"queue_seconds": waited, "cached_tokens": 0, "preemptions": 0}
            rows.append(
                RunningRow(
                    request, len(request.prompt_ids), start, end, stats=stats, admitted_seconds=now
                )
            )
        self._make_room(max(row.start for row in rows) + 1, max(row.end for row in rows))
        stops = [
            frozenset(r.sampling.stop_token_ids)
            | (frozenset() if r.sampling.ignore_eos else self._eos)
            for r in requests
        ]
        indices = self._rows.add(rows, stops).tolist()
        self._rows.update_longest()
        self._prefill(indices, [row.start - 1 for row in rows])
        spent = time.monotonic() - rows[0].admitted_seconds
        for row in rows:
            row.stats["prefill_seconds"] = spent
        return []

    def _make_room(self, needed: int, wanted: int) -> None:
        """Widen the rows: to all that is wanted where that is little, else by doubling."""
        width = wanted if wanted <= 1024 else needed
        if self._cache.reserve(width):
            self._rows.widen(self._cache.width)

    def _prefill(self, indices: Sequence[int], lengths: Sequence[int]) -> None:
        """Compute the cache of rows up to their current tokens; equal sequences once."""
        owners: dict[tuple[int, ...], list[int]] = {}
        where = torch.tensor(indices, device=self._device)
        # One copy from the device for all of them.
        tokens = self._rows.tokens[where, : max(lengths)].tolist()
        for index, line, length in zip(indices, tokens, lengths, strict=True):
            if length:
                owners.setdefault(tuple(line[:length]), []).append(index)
        batch: list[tuple[int, ...]] = []
        longest = 0
        for ids in sorted(owners, key=len):
            if batch and len(ids) * (len(batch) + 1) > self._prefill_tokens:
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
        rows = torch.tensor([row for ids in batch for row in owners[ids]])
        owner = torch.tensor([i for i, ids in enumerate(batch) for _ in owners[ids]])
        self._decoder.prefill(*(x.to(self._device) for x in (padded, rows, owner)))
        self._counts["prefill_tokens"] += sum(len(ids) for ids in batch)

    @torch.inference_mode()
    def _advance(self) -> list[Output]:
        rows = self._rows
        if rows.longest + 1 > self._cache.width:
            self._make_room(rows.longest + 1, rows.longest + 1)
        tokens, cells, bias = rows.current()
        logits = self._decoder.decode(tokens, rows.positions(), cells, bias)
        ids, logprobs = choose(rows.forbid_stops(logits), rows.uniform(), rows.choice)
        self._counts["steps"] += 1
        self._counts["row_steps"] += len(rows)
        self._counts["most_rows"] = max(self._counts["most_rows"], len(rows))
        ended = rows.accept(ids, logprobs, cells)
        return self._end(ended.tolist(), None) if len(ended) else []

    def _end(self, ended: list[int], reason: FinishReason | None) -> list[Output]:
        """Return the outputs of rows and close the gaps that they leave."""
        outputs = self._rows.outputs(ended, self._version, reason)
        for index, output in zip(ended, outputs, strict=True):
            if output.error:
                self._cache.clear(index)
            self._counts["tokens"] += output.num_tokens
        moved = self._rows.remove(ended)
        if moved is not None:
            self._cache.move(*moved, self._rows.longest)
        self._rows.update_longest()
        return outputs

    @torch.inference_mode()
    def _withdraw(self, request_ids: Collection[str]) -> list[Output]:
        ended = [
            i for i, row in enumerate(self._rows.rows) if row.request.request_id in request_ids
        ]
        return self._end(ended, FinishReason.ABORT) if ended else []

    @torch.inference_mode()
    def _replace_weights(self, source: WeightSource, version: int) -> WeightUpdate:
        start = time.monotonic()
        assert self._served is not None
        num_tensors, num_bytes = self._served.write(source)
        self._decoder.refresh()
        return WeightUpdate(version, num_tensors, num_bytes, time.monotonic() - start)
