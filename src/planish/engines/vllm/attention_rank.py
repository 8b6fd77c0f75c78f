"""An attention rank that is a whole vLLM: scheduler, KV cache and sampler, but no experts.

Several of these ranks share the expert ranks. Each rank steps by itself, and expert ranks serve
rows as they arrive. While the rows of one attention rank are at the experts, the others compute:
ping-pong between replicas.

Source: MegaScale-Infer, arXiv 2504.02263, sections 3 and 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from planish.base.child import Message
from planish.engines.base import COUNTERS
from planish.engines.config import EngineConfig
from planish.engines.disagg.control import decode_requests, encode_outputs
from planish.engines.disagg.exchange import ExchangingRank, ExpertExchange, Inbox
from planish.engines.disagg.settings import RankSettings
from planish.engines.requests import ModelRef
from planish.engines.vllm import remote_experts
from planish.engines.vllm.engine import VllmEngine
from planish.engines.weights import FolderWeights
from planish.models.experts import is_expert


class _Alone:
    """Turns of a single micro-batch, which waits while it has no replies."""

    current = 0
    exchange: ExpertExchange

    def pause(self) -> None:
        """Wait until the replies are complete."""
        while not self.exchange.wait(True):
            pass


class VllmAttentionRank(ExchangingRank):
    """One vLLM, its requests, and the exchange of its rows with the experts."""

    def __init__(self, settings: RankSettings, inbox: Inbox) -> None:
        """Start vLLM with all tensors except those of routed experts."""
        turns = _Alone()
        super().__init__(settings, inbox, turns)
        turns.exchange = self._exchange
        self._engine = VllmEngine(
            max_rows=settings.rows,
            max_model_len=settings.max_model_len,
            device=settings.device,
            config=EngineConfig(name="vllm", compile=False, **(settings.vllm or {})),
            load_format=remote_experts.LOAD_FORMAT,
        )
        try:
            with remote_experts.without_experts():
                self._engine.start(ModelRef(folder=settings.folder, version=settings.version))
            self._hear = self._engine.keep_choices(settings.routing) if settings.routing else None
            self._engine.apply(lambda model: remote_experts.connect(model, self.compute))
        except BaseException:
            self.close()
            raise
        names = FolderWeights(settings.path).names().items()
        self._num_bytes = sum(
            math.prod(shape) * dtype.itemsize for n, (shape, dtype) in names if not is_expert(n)
        )

    def close(self) -> None:
        """Close vLLM, so that the process can start another one."""
        self._engine.close()

    def compute(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts of each row, like `ExpertExchange.compute`."""
        if self._hear is not None:
            self._hear(layer, index)
        return self._exchange.compute(layer, hidden, index, weights)

    def admit(self, message: Mapping[str, Any]) -> Message:
        """Queue new requests."""
        batches = message["batches"].values()
        self._engine.submit([r for given in batches for r in decode_requests(given)])
        return {}

    def withdraw(self, message: Mapping[str, Any]) -> Message:
        """End requests with ABORT: those with the given ids, or all if the ids are None."""
        return {"outputs": encode_outputs(self._engine.abort(message["ids"]))}

    def step(self, message: Mapping[str, Any]) -> Message:
        """Run one step of vLLM: new prompts, or a token for each running request.

        Every step is marked as prefill, so that expert ranks do not wait for other ranks.
        """
        self._exchange.begin(message["iteration"], is_prefill=True)
        before = self._engine.stats()["tokens"]
        with self._computing():
            outputs = self._engine.poll(0.0)
        num_tokens = self._engine.stats()["tokens"] - before
        return {"outputs": encode_outputs(outputs), "num_tokens": num_tokens}

    def commit(self, _: Mapping[str, Any]) -> Message:
        """Load the weights that `load` opened last. vLLM has no second copy, so they are read only
        now.
        """
        version, layout, weights = self._next
        self._engine.update_weights(weights, version)
        self._exchange.use(layout, version)
        return {}

    def stats(self, _: Mapping[str, Any]) -> Message:
        """Return counters since the start."""
        stats = self._engine.stats()
        return self._stats(
            num_bytes=self._num_bytes,
            rows=stats["row_steps"],
            queue=stats["running"],
            cache_bytes=0,
            counts={name: stats[name] for name in COUNTERS},
        )
