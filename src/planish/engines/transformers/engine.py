"""The engine in this process: continuous batching over any Hugging Face causal language model.

The engine does not use transformers' own continuous batching, for three reasons. Its sampler draws
from the global generator, so a response would depend on its neighbours and on its windows. It
cannot change weights while requests wait. On CPUs its paged attention is several times slower than
plain `generate` (tests/benchmarks/results/rollout.json).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from planish.base.errors import EngineError
from planish.engines.base import BaseEngine
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef, Output, Request, WeightUpdate
from planish.engines.transformers.batch import PREFILL_TOKENS, DecodeBatch, Decoder, Limits
from planish.engines.transformers.fused_decoder import FusedDecoder
from planish.engines.transformers.kv_cache import KeyValueCache
from planish.engines.transformers.routing import RoutingCells
from planish.engines.transformers.served_model import ServedModel, open_model
from planish.engines.weights import WeightSource
from planish.models.experts import routing_dtype
from planish.models.headers import context_tokens


class TransformersEngine(BaseEngine):
    """Continuous batching over a static cache of `max_rows` rows."""

    def __init__(
        self,
        *,
        max_rows: int = 256,
        max_model_len: int = 0,
        device: str = "cpu",
        fused: bool = True,
        routing: bool = False,
        config: EngineConfig | None = None,
    ) -> None:
        """Make an engine; `fused` uses the fast decoder if it supports the family.

        `max_rows` requests run at once; `max_model_len` 0 takes the model's own limit. With
        `routing` the engine records the experts of each token. `batch_tokens` of `config` limits a
        forward pass over prompts.
        """
        super().__init__(max_rows, max_model_len, routing=routing)
        self._prefill_tokens = (config or EngineConfig()).batch_tokens or PREFILL_TOKENS
        self._fused, self._device = fused, torch.device(device)
        self._served: ServedModel | None = None
        self._batch: DecodeBatch | None = None

    def _load(self, model: ModelRef) -> int:
        served = open_model(model, self._device, fused=self._fused)
        dtype = routing_dtype(served.config) if self.routing else ""
        limit = context_tokens(served.config)
        self.max_model_len = min(self.max_model_len or limit, limit)
        limits = Limits(
            max_rows=self._max_rows,
            max_model_len=self.max_model_len,
            vocab_size=served.vocab_size,
            eos=frozenset(served.tokenizer.eos_token_ids),
            strings=served.stop_table(),
            prefill_tokens=self._prefill_tokens,
        )
        decoder = self._choose_decoder(served)
        routing = RoutingCells(served.modules, self._max_rows, dtype) if dtype else None
        self._batch = DecodeBatch(limits, decoder, self._device, routing)
        self._counts = self._batch.counts
        self._served = served
        return served.version

    def _choose_decoder(self, served: ServedModel) -> Callable[[KeyValueCache], Decoder]:
        """Return the fused decoder if it supports the model, else the general one.

        If the model was loaded as a module of the library transformers, a decoder is taken only if
        its outputs agree with those of the module.
        """
        kinds: list[Callable[[KeyValueCache], Decoder]] = []
        if self._fused and served.fits_fused():
            # weights from a caller keep their storage, since the caller may save them
            kinds.append(
                partial(FusedDecoder, served.config, served.tensors, share=served.modules is None)
            )
        if served.modules is None:
            return kinds[0]
        from planish.engines.transformers.module_decoder import ModuleDecoder

        kinds.append(partial(ModuleDecoder, served.modules))
        faults = []
        for kind in kinds:
            probe = kind(KeyValueCache(2, self._device))
            error = self._probe(probe, served)
            if error < 1.0:
                return kind
            faults.append(f"{type(probe).__name__} {error:.2g}")
        raise EngineError(
            f"cached decoding must give the logits of the plain forward, got errors of "
            f"{', '.join(faults)} tolerances with {served.architecture}; use another engine"
        )

    @torch.inference_mode()
    def _probe(self, decoder: Decoder, served: ServedModel) -> float:
        """Return the error of cached decoding on eight tokens, in units of the tolerance."""
        ids = torch.arange(1, 17, device=self._device).view(2, 8) % served.vocab_size
        expected = served.modules(input_ids=ids, use_cache=False).logits[:, 5:].float()
        decoder.cache.reserve(8)
        rows = torch.arange(2, device=self._device)
        decoder.prefill(ids[:, :5], rows, rows)
        worst = 0.0
        tolerance = 1e-3 if served.modules.dtype == torch.float32 else 0.1
        for position in range(5, 8):
            where = torch.full_like(rows, position)
            bias = torch.zeros((2, position + 1), device=self._device)
            cells = rows * decoder.cache.width + where
            logits = decoder.decode(ids[:, position], where, cells, bias).float()
            gap = (logits - expected[:, position - 5]).abs().max()
            scale = 1.0 + expected[:, position - 5].abs().max()
            worst = max(worst, float(gap / (tolerance * scale)))
        return worst

    def _renew(self) -> None:
        self._running().renew()

    def _release(self) -> None:
        if self._batch is not None:
            self._batch.close()
        self._served = self._batch = None

    def stats(self) -> dict[str, Any]:
        """Return counters since the start."""
        cache = self._batch.cache.num_bytes() if self._batch is not None else 0
        return {**super().stats(), "cache_bytes": cache}

    def _check(self, request: Request) -> str:
        return self._running().limits.fault(request)

    def _free_rows(self) -> int:
        return self._max_rows - len(self._running())

    def _num_running(self) -> int:
        return 0 if self._batch is None else len(self._batch)

    def _running(self) -> DecodeBatch:
        assert self._batch is not None
        return self._batch

    def _admit(self, requests: Sequence[Request]) -> list[Output]:
        self._running().admit(requests)
        return []

    def _advance(self) -> list[Output]:
        return self._running().advance(self._version)

    def _withdraw(self, request_ids: Collection[str]) -> list[Output]:
        return self._batch.withdraw(request_ids, self._version) if self._batch is not None else []

    @torch.inference_mode()
    def _replace_weights(self, source: WeightSource, version: int) -> WeightUpdate:
        start = time.monotonic()
        assert self._served is not None
        num_tensors, num_bytes = self._served.write(source)
        self._running().decoder.refresh()
        return WeightUpdate(version, num_tensors, num_bytes, time.monotonic() - start)
