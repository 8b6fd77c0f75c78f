"""An attention rank: all of the model but the routed experts, and the requests that it owns.

Each micro-batch is a batch of running requests with a cache of its own over one set of modules, and
a request stays in its micro-batch until it ends. What a micro-batch gives does not depend on the
others.

Source: MegaScale-Infer, arXiv 2504.02263, sections 3 and 4.1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planish.engines.disagg.attention_model import AttentionModel
from planish.engines.disagg.control import Message, decode_request, encode_outputs
from planish.engines.disagg.exchange import ExchangingRank, ExpertExchange, Inbox
from planish.engines.disagg.layout import ExpertLayout
from planish.engines.disagg.ping_pong import Turns
from planish.engines.disagg.settings import RankSettings
from planish.engines.transformers.batch import COUNTERS, DecodeBatch, Limits
from planish.engines.transformers.module_decoder import ModuleDecoder
from planish.engines.transformers.routing import RoutingCells
from planish.engines.transformers.served_model import ServedModel
from planish.engines.weights import fetch_weights
from planish.models.tokens import load_tokenizer


class AttentionRank(ExchangingRank):
    """Micro-batches of one process."""

    def __init__(self, settings: RankSettings, inbox: Inbox) -> None:
        """Read the tensors that are not of experts."""
        device = torch.device(settings.device)
        self._turns = Turns(settings.micro_batches)
        self._exchange = ExpertExchange(settings, inbox, self._turns)
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
                # The modules are shared: those of other micro-batches compute in between.
                is_own = partial(self._turns.is_turn_of, number)
                routing = RoutingCells(modules, settings.rows, settings.routing, is_own)
            decoder = partial(ModuleDecoder, modules)
            self._batches.append(DecodeBatch(limits, decoder, device, routing))
        self._shadow: tuple[int, ExpertLayout, dict[str, Tensor]] | None = None
        self._busy_s = 0.0

    def admit(self, message: Mapping[str, Any]) -> Message:
        """Compute the caches of new requests."""
        self._exchange.begin(message["iteration"], is_prefill=True)
        jobs = {}
        for name, given in message["batches"].items():
            requests = [decode_request(plain) for plain, _ in given]
            waited = [seconds for _, seconds in given]
            jobs[int(name)] = partial(self._batches[int(name)].admit, requests, waited)
        self._turns.run(jobs, self._exchange.wait)
        return {}

    def step(self, message: Mapping[str, Any]) -> Message:
        """Add a token to each request of some micro-batches."""
        self._exchange.begin(message["iteration"], is_prefill=False)
        before = self._count("tokens")
        begin, waited = time.monotonic(), self._exchange.seconds["wait"]
        version = self._exchange.version
        jobs = {mb: partial(self._batches[mb].advance, version) for mb in message["micro_batches"]}
        outputs = self._turns.run(jobs, self._exchange.wait)
        spent = time.monotonic() - begin
        self._busy_s += spent - (self._exchange.seconds["wait"] - waited)
        return {
            "outputs": encode_outputs([o for mb in sorted(outputs) for o in outputs[mb]]),
            "num_tokens": self._count("tokens") - before,
        }

    def _count(self, name: str) -> int:
        return sum(batch.counts[name] for batch in self._batches)

    def withdraw(self, message: Mapping[str, Any]) -> Message:
        """End requests of some ids with ABORT; None ends all."""
        outputs, ids = [], message["ids"]
        for batch in self._batches:
            wanted = batch.request_ids if ids is None else ids
            outputs += batch.withdraw(wanted, self._exchange.version)
        return {"outputs": encode_outputs(outputs)}

    def load(self, message: Mapping[str, Any]) -> Message:
        """Read other weights beside those in use."""
        layout = ExpertLayout.parse(message["layout"])
        tensors = self._model.read(fetch_weights(message["weights"]))
        self._shadow = int(message["version"]), layout, tensors
        return {"fingerprint": self._model.fingerprint}

    def commit(self, _: Mapping[str, Any]) -> Message:
        """Use what was read last."""
        assert self._shadow is not None
        version, layout, tensors = self._shadow
        self._exchange.use(layout, version)
        self._model.write(tensors)
        self._shadow = None
        return {}

    def stats(self, _: Mapping[str, Any]) -> Message:
        """Return counters since the start."""
        return {
            "role": "attention",
            "num_bytes": self._model.num_bytes,
            "busy_s": self._busy_s,
            "wait_s": self._exchange.seconds["wait"],
            "rows": self._count("row_steps"),
            "queue": sum(map(len, self._batches)),
            "seconds": self._exchange.seconds,
            "m2n": self._exchange.traffic.plain(),
            "cache_bytes": sum(batch.cache.num_bytes() for batch in self._batches),
            "counts": {name: self._count(name) for name in COUNTERS},
        }
