"""An attention rank: all of the model but the routed experts, and the rank's own requests.

Each micro-batch is a batch of running requests with its own KV cache; all micro-batches share the
modules. A request stays in its micro-batch until it ends. The outputs of a micro-batch do not
depend on the others.

Source: MegaScale-Infer, arXiv 2504.02263, sections 3 and 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planish.base.child import Message
from planish.engines.base import COUNTERS
from planish.engines.disagg.attention_model import AttentionModel
from planish.engines.disagg.control import decode_requests, encode_outputs
from planish.engines.disagg.exchange import ExchangingRank, Inbox
from planish.engines.disagg.ping_pong import Turns
from planish.engines.disagg.placement import ExpertLayout
from planish.engines.disagg.settings import RankSettings
from planish.engines.transformers.batch import DecodeBatch, Limits
from planish.engines.transformers.module_decoder import ModuleDecoder
from planish.engines.transformers.routing import RoutingCells
from planish.engines.transformers.served_model import ServedModel
from planish.engines.weights import WeightSource
from planish.models.tokens import load_tokenizer


class AttentionRank(ExchangingRank):
    """The micro-batches of one process."""

    def __init__(self, settings: RankSettings, inbox: Inbox) -> None:
        """Build the model and read its tensors, except tensors of experts."""
        device = torch.device(settings.device)
        self._turns = Turns(settings.micro_batches)
        super().__init__(settings, inbox, self._turns)
        self._model = AttentionModel(settings.path, self._exchange.compute, device)
        modules = self._model.modules
        served = ServedModel(
            type(modules).__name__,
            self._model.config,
            dict(modules.state_dict()),
            load_tokenizer(settings.path),
            settings.version,
            modules,
        )
        limits = Limits(
            max_rows=settings.rows,
            max_model_len=settings.max_model_len,
            vocab_size=served.vocab_size,
            eos=frozenset(served.tokenizer.eos_token_ids),
            strings=served.stop_table(),
            prefill_tokens=settings.prefill_tokens,
        )
        self._batches = []
        for number in range(settings.micro_batches):
            routing = None
            if settings.routing:
                # Micro-batches share the modules, so their calls of a layer interleave.
                is_own = partial(self._turns.is_turn_of, number)
                routing = RoutingCells(modules, settings.rows, settings.routing, is_own)
            decoder = partial(ModuleDecoder, modules)
            self._batches.append(DecodeBatch(limits, decoder, device, routing))

    def admit(self, message: Mapping[str, Any]) -> Message:
        """Compute the KV caches of new requests."""
        self._exchange.begin(message["iteration"], is_prefill=True)
        jobs = {}
        for name, given in message["batches"].items():
            jobs[int(name)] = partial(self._batches[int(name)].admit, decode_requests(given))
        self._turns.run(jobs, self._exchange.wait)
        return {}

    def step(self, message: Mapping[str, Any]) -> Message:
        """Add a token to each request of some micro-batches."""
        self._exchange.begin(message["iteration"], is_prefill=False)
        before, version = self._count("tokens"), self._exchange.version
        jobs = {mb: partial(self._batches[mb].advance, version) for mb in message["micro_batches"]}
        with self._computing():
            outputs = self._turns.run(jobs, self._exchange.wait)
        return {
            "outputs": encode_outputs([o for mb in sorted(outputs) for o in outputs[mb]]),
            "num_tokens": self._count("tokens") - before,
        }

    def _count(self, name: str) -> int:
        return sum(batch.counts[name] for batch in self._batches)

    def withdraw(self, message: Mapping[str, Any]) -> Message:
        """End requests with ABORT: those with the given ids, or all if the ids are None."""
        outputs, ids = [], message["ids"]
        for batch in self._batches:
            wanted = batch.request_ids if ids is None else ids
            outputs += batch.withdraw(wanted, self._exchange.version)
        return {"outputs": encode_outputs(outputs)}

    def _read(self, weights: WeightSource, layout: ExpertLayout) -> dict[str, Tensor]:
        return self._model.read(weights)

    def commit(self, _: Mapping[str, Any]) -> Message:
        """Use the weights that `load` read last."""
        version, layout, tensors = self._next
        self._exchange.use(layout, version)
        self._model.write(tensors)
        return {}

    def stats(self, _: Mapping[str, Any]) -> Message:
        """Return counters since the start."""
        return self._stats(
            num_bytes=self._model.num_bytes,
            rows=self._count("row_steps"),
            queue=sum(map(len, self._batches)),
            cache_bytes=sum(batch.cache.num_bytes() for batch in self._batches),
            counts={name: self._count(name) for name in COUNTERS},
        )
