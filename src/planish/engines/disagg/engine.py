"""The engine `disagg`: coordinator of attention ranks and expert ranks in other processes.

The coordinator owns the queue and knows the rank of each request. The attention rank of a request
has its tokens until the request ends. For each iteration the coordinator sends one message to each
rank that takes part; hidden states travel only between ranks. A fatal fault ends every request with
an error, and the engine fails.

Source: MegaScale-Infer, arXiv 2504.02263.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from planish.base.child import Message
from planish.base.errors import ConfigError, EngineError
from planish.base.parallel import num_devices
from planish.engines.base import BaseEngine
from planish.engines.config import VLLM_SETTINGS, EngineConfig
from planish.engines.deploy.connections import elsewhere
from planish.engines.disagg.control import decode_outputs, encode_request
from planish.engines.disagg.placement import ExpertLayout
from planish.engines.disagg.processes import Launcher, Processes, launch
from planish.engines.disagg.settings import RankSettings
from planish.engines.policy_folder import check_policy
from planish.engines.requests import EngineState, ModelRef, Output, Request, WeightUpdate
from planish.engines.transformers.batch import Limits
from planish.engines.weights import (
    FolderWeights,
    WeightSource,
    address_of,
    check_weights,
    local_policy,
    without_tied,
)
from planish.models.experts import expert_names, num_experts, routing_dtype, spread_fault
from planish.models.headers import context_tokens, dtype_name
from planish.records.refs import is_pin
from planish.records.rollouts import FinishReason

logger = logging.getLogger(__name__)


def _check_pin(pin: str) -> None:
    """Refuse a policy without a pin if ranks are on other machines."""
    if not pin:
        raise EngineError(
            "ranks at `engine.peers` fetch a policy by its pinned URI, got one in memory or in a "
            "folder of this machine; export it, or leave `engine.peers` out"
        )


def _check_devices(num_ranks: int) -> None:
    """Refuse more ranks than this machine has accelerators."""
    count = num_devices("cuda")
    if num_ranks > count:
        raise ConfigError(
            "`engine.attention_ranks` + `engine.expert_ranks` must be at most the accelerators of "
            f"this pod or machine ({count}), got {num_ranks}; lower them, take a profile with "
            "more, or name ranks elsewhere in `engine.peers`"
        )


@dataclass(frozen=True)
class _Place:
    """The rank, micro-batch and length of a running request."""

    rank: int
    micro_batch: int
    length: int
    """Number of its tokens when it was admitted."""
    step: int
    """Number of iterations of the engine before it was admitted."""


class _Broken(Exception):
    """The engine cannot continue."""


class DisaggEngine(BaseEngine):
    """Coordinator of attention ranks, which have micro-batches of requests, and expert ranks, which
    serve all of them.
    """

    def __init__(
        self,
        *,
        max_rows: int = 256,
        max_model_len: int = 0,
        device: str = "cpu",
        routing: bool = False,
        config: EngineConfig | None = None,
        timeout_s: float | None = None,
        stage_s: tuple[float, float] = (0.0, 0.0),
        launcher: Launcher | None = None,
    ) -> None:
        """Make an engine that is not started yet.

        Args:
            max_rows: requests that run at once, over all attention ranks.
            max_model_len: longest prompt plus response in tokens; 0 takes the model's own limit.
            device: torch device of the ranks; each rank on this machine has its own accelerator.
            routing: record the experts of each token, for requests that want them.
            config: numbers of ranks and micro-batches, addresses of remote ranks.
            timeout_s: replaces `rank_timeout_seconds` of `config`.
            stage_s: minimum seconds of a layer on attention and on expert ranks, for measurements.
            launcher: starts a rank on this machine; None takes `launch`.

        Raises:
            ConfigError: there are more micro-batches than rows.
        """
        super().__init__(max_rows, max_model_len, routing=routing)
        self._config = config or EngineConfig(name="disagg")
        self._is_vllm = self._config.name == "vllm_disagg"
        # vLLM has one batch for all requests of a rank.
        self._num_micro_batches = 1 if self._is_vllm else self._config.micro_batches
        self._num_slots = self._config.attention_ranks * self._num_micro_batches
        if max_rows < self._num_slots:
            raise ConfigError(
                "`max_rows` must be at least one row for each of the "
                f"{self._num_slots} micro-batches (`engine.attention_ranks` x "
                f"`engine.micro_batches`), got {max_rows}"
            )
        self._device = device
        if timeout_s:
            self._config = self._config.model_copy(update={"rank_timeout_seconds": timeout_s})
        self._timeout_s = self._config.rank_timeout_seconds
        self._stage_s = stage_s
        self._launcher = launcher or partial(launch, device=device)
        self.layout: ExpertLayout
        """Placement of the experts on expert ranks, set by the start."""
        self._processes: Processes | None = None
        self._scratch = ExitStack()
        self._running: dict[str, _Place] = {}
        self._is_stepping = False
        self._placed_tokens = np.zeros(1, dtype=np.int64)
        """[layers, experts], rows computed by each expert when experts were placed last."""
        self._step_seconds = 0.0
        self._rank_stats: dict[int, Message] = {}

    # Start and stop.

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each living rank, attention ranks first."""
        return self._processes.pids if self._processes is not None else {}

    def _load(self, model: ModelRef) -> int:
        begin = time.monotonic()
        try:
            peers, launcher = self._config.peers, self._launcher
            if peers:
                launcher = elsewhere(peers, self._timeout_s)
                _check_pin(model.pin)
            elif self._device != "cpu":
                _check_devices(self._config.num_ranks)
            settings = self._plan_ranks(*local_policy(model, self._scratch))
            settings = self._settings = replace(settings, pin=model.pin if peers else "")
            # Ranks that wait for each other give up, and tell why, before the coordinator does.
            processes = self._processes = Processes(self._config.start_seconds, launcher)
            attention = [replace(settings, rank=rank) for rank in settings.attention_ranks]
            experts = [
                replace(settings, rank=rank, role="expert") for rank in settings.expert_ranks
            ]
            ready = self._answers({s.rank: processes.start(s) for s in attention + experts})
            questions: dict[int, dict[str, Any]] = {}
            for mine, others in ((attention, experts), (experts, attention)):
                addresses = {str(peer.rank): ready[peer.rank]["address"] for peer in others}
                connect = {"op": "connect", "addresses": addresses}
                questions |= {rank.rank: connect for rank in mine}
            processes.timeout_s = 2 * self._timeout_s
            self._ask(questions)
        except _Broken as error:
            self._release()
            raise EngineError(f"all ranks must start, got {error}") from None
        except BaseException:
            self._release()
            raise
        logger.info(
            "started engine=%s attention_ranks=%d expert_ranks=%d micro_batches=%d seconds=%.1f",
            self._config.name,
            settings.num_attention,
            settings.num_expert,
            settings.micro_batches,
            time.monotonic() - begin,
        )
        return settings.version

    def _plan_ranks(self, folder: Path, version: int) -> RankSettings:
        """Return the settings of rank 0 for a policy folder that this engine can serve."""
        weights = FolderWeights(folder)
        model_config, tokenizer = check_policy(folder, weights.names())
        held = without_tied(weights.names(), model_config)
        self._names = {name: shape for name, (shape, _) in held.items()}
        fault = spread_fault(
            num_experts(model_config), self._config.expert_ranks, self._config.redundant_experts
        )
        num_layers = len(expert_names(self._names, model_config))
        if not fault and not num_layers:
            fault = f"no experts that this package knows in {model_config.get('architectures')}"
        if fault:
            raise EngineError(f"a policy must fit the engine {self._config.name!r}, got {fault}")
        limit = context_tokens(model_config)
        self.max_model_len = min(self.max_model_len or limit, limit)
        self._limits = Limits(
            max_rows=math.ceil(self._max_rows / self._num_slots),
            max_model_len=self.max_model_len,
            vocab_size=int(model_config["vocab_size"]),
            eos=frozenset(tokenizer.eos_token_ids),
        )
        self.layout = ExpertLayout.of(
            [[1.0] * num_experts(model_config)] * num_layers,
            num_nodes=self._config.expert_ranks,
            num_redundant=self._config.redundant_experts,
        )
        return RankSettings(
            rank=0,
            role="attention",
            num_attention=self._config.attention_ranks,
            num_expert=self._config.expert_ranks,
            micro_batches=self._num_micro_batches,
            rows=self._limits.max_rows,
            max_model_len=self.max_model_len,
            prefill_tokens=self._config.frame_tokens,
            folder=str(folder),
            version=version,
            device=self._device,
            dtype=dtype_name(model_config),
            hidden_size=int(model_config["hidden_size"]),
            top_k=int(model_config["num_experts_per_tok"]),
            local_experts=num_experts(model_config) // self._config.expert_ranks
            + self._config.redundant_experts,
            token=secrets.token_hex(16),
            scratch=self._scratch.enter_context(TemporaryDirectory(prefix="planish-")),
            timeout_s=self._timeout_s,
            layout=self.layout.plain(),
            routing=routing_dtype(model_config) if self.routing else "",
            transport=self._config.transport,
            vllm=self._config.model_dump(include=set(VLLM_SETTINGS)) if self._is_vllm else None,
            stage_s=self._stage_s,
        )

    def _release(self) -> None:
        self._running.clear()
        if self._processes is not None:
            self._processes.close()
            self._processes = None
        self._scratch.close()

    # Talking to the ranks.

    def _ask(self, questions: Mapping[int, Message]) -> dict[int, Message]:
        """Send each rank its message, and return the result of `_answers`."""
        assert self._processes is not None
        return self._answers(
            {rank: self._processes.tell([rank], message) for rank, message in questions.items()}
        )

    def _answers(self, numbers: Mapping[int, int]) -> dict[int, Message]:
        """Return the answers of ranks by rank; a dead attention rank is missing, and its requests
        end.

        Raises:
            _Broken: a rank reports a fault, or an expert rank (or the last attention rank) is lost.
        """
        assert self._processes is not None
        given: dict[int, Message] = {}
        expert_ranks = self._settings.expert_ranks
        while True:
            answers = self._processes.gather({r: n for r, n in numbers.items() if r not in given})
            given.update(answers.given)
            if answers.lost:
                told = "; ".join(
                    f"rank {rank} is lost: {why}" for rank, why in answers.lost.items()
                )
                logger.warning("lost ranks: %s", told)
                if self._state is EngineState.NEW or set(answers.lost) & {*expert_ranks}:
                    raise _Broken(told)
                if not self._attention():
                    raise _Broken(f"{told}; no attention rank is left")
                gone = {n for n, place in self._running.items() if place.rank in answers.lost}
                reason = f"the request was on an attention rank: {told}"
                self._finished.extend(self._failed(gone, reason))
                if self._is_stepping:
                    self._publish(self._counts["steps"] - 1, only=self._attention())
            if answers.faults:
                raise _Broken("; ".join(f"rank {r}: {text}" for r, text in answers.faults.items()))
            if not answers.lost:
                return given

    def _attention(self) -> list[int]:
        assert self._processes is not None
        return [rank for rank in self._settings.attention_ranks if rank in self._processes]

    def _failed(self, names: Collection[str], error: str) -> list[Output]:
        """End requests as lost, without their tokens."""
        for name in names:
            del self._running[name]
        return [Output.failed(name, error, is_lost=True) for name in names]

    def _break(self, error: _Broken) -> list[Output]:
        """Fail the engine, and return every request with its tokens so far."""
        assert self._processes is not None
        self._state = EngineState.FAILED
        reason = f"the engine failed: {error}"
        logger.error("failed engine=%s reason=%s", self._config.name, error)
        outputs: list[Output] = []
        left = self._attention()
        self._processes.tell(left, {"op": "stop", "reason": str(error)})
        numbers = {r: self._processes.tell([r], {"op": "withdraw", "ids": None}) for r in left}
        while numbers:
            answers = self._processes.gather(numbers)
            for message in answers.given.values():
                outputs += decode_outputs(message["outputs"])
            done = answers.given.keys() | answers.lost.keys() | answers.faults.keys()
            numbers = {rank: number for rank, number in numbers.items() if rank not in done}
        for output in outputs:
            self._running.pop(output.request_id, None)
            output.finish_reason, output.error = FinishReason.ABORT, output.error or reason
        outputs += self._failed(list(self._running), reason)
        outputs += [Output.failed(request.request_id, reason) for request in self._queue]
        self._queue.clear()
        return outputs

    # Requests.

    def _check(self, request: Request) -> str:
        return self._limits.fault(request)

    def _free_rows(self) -> int:
        slots = len(self._attention()) * self._num_micro_batches * self._limits.max_rows
        return min(self._max_rows, slots) - len(self._running)

    def _num_running(self) -> int:
        return len(self._running)

    def _admit(self, requests: Sequence[Request]) -> list[Output]:
        batches: dict[int, dict[str, list[Any]]] = {}
        for request in requests:
            place = self._place(request)
            self._running[request.request_id] = place
            self._counts["prefill_tokens"] += place.length - 1
            batch = batches.setdefault(place.rank, {}).setdefault(str(place.micro_batch), [])
            batch.append(encode_request(request))
        plan = {"op": "admit", "iteration": self._counts["steps"]}
        try:
            self._ask({rank: {**plan, "batches": given} for rank, given in batches.items()})
        except _Broken as error:
            return self._break(error)
        return []

    def _place(self, request: Request) -> _Place:
        """Return the micro-batch with the smallest sum of lengths, which is the cost of
        attention.
        """
        slots = {
            (rank, micro_batch): 0
            for rank in self._attention()
            for micro_batch in range(self._num_micro_batches)
        }
        rows: Counter[tuple[int, int]] = Counter()
        for place in self._running.values():
            slot = place.rank, place.micro_batch
            slots[slot] += place.length + self._counts["steps"] - place.step
            rows[slot] += 1
        free = [slot for slot in slots if rows[slot] < self._limits.max_rows]
        rank, micro_batch = min(free, key=lambda slot: (slots[slot], slot[1], slot[0]))
        length = len(request.prompt_ids) + len(request.response_prefix)
        return _Place(rank, micro_batch, length, self._counts["steps"])

    def _publish(self, iteration: int, *, only: Iterable[int]) -> dict[int, list[int]]:
        """Send the expert ranks the list of participants; return the micro-batches of each
        attention rank.
        """
        assert self._processes is not None
        slots = sorted({(place.micro_batch, place.rank) for place in self._running.values()})
        participants: dict[str, list[int]] = {}
        active: dict[int, list[int]] = {}
        for micro_batch, rank in slots:
            if rank in only:
                participants.setdefault(str(micro_batch), []).append(rank)
                active.setdefault(rank, []).append(micro_batch)
        plan = {"op": "plan", "iteration": iteration, "participants": participants}
        self._processes.tell(self._settings.expert_ranks, plan)
        return active

    def _advance(self) -> list[Output]:
        iteration = self._counts["steps"]
        self._counts["steps"] += 1
        self._counts["row_steps"] += len(self._running)
        self._counts["most_rows"] = max(self._counts["most_rows"], len(self._running))
        begin = time.monotonic()
        active = self._publish(iteration, only=self._attention())
        self._is_stepping = True
        step = {"op": "step", "iteration": iteration}
        try:
            given = self._ask({r: {**step, "micro_batches": slots} for r, slots in active.items()})
        except _Broken as error:
            return self._break(error)
        finally:
            self._is_stepping = False
            self._step_seconds += time.monotonic() - begin
        self._counts["tokens"] += sum(answer["num_tokens"] for answer in given.values())
        outputs = [o for rank in sorted(given) for o in decode_outputs(given[rank]["outputs"])]
        return self._ended(outputs)

    def _ended(self, outputs: list[Output]) -> list[Output]:
        for output in outputs:
            del self._running[output.request_id]
        return outputs

    def _withdraw(self, request_ids: Collection[str]) -> list[Output]:
        wanted: dict[int, list[str]] = {}
        for name, place in self._running.items():
            if name in request_ids:
                wanted.setdefault(place.rank, []).append(name)
        if not wanted:
            return []
        try:
            given = self._ask({r: {"op": "withdraw", "ids": ids} for r, ids in wanted.items()})
        except _Broken as error:
            return self._break(error)
        return self._ended([o for r in sorted(given) for o in decode_outputs(given[r]["outputs"])])

    # Weights.

    def _replace_weights(self, source: WeightSource, version: int) -> WeightUpdate:
        begin = time.monotonic()
        given = source.names()
        check_weights(given, self._names)
        with ExitStack() as scratch:
            address = address_of(source, scratch)
            if self._config.peers:
                _check_pin(address if is_pin(address) else "")
            assert self._processes is not None
            ranks = list(self._processes.pids)
            try:
                self._rank_stats.update(self._ask({rank: {"op": "stats"} for rank in ranks}))
                tokens = np.array(self._expert_tokens())
                # One more row for each expert, so that an expert without rows also gets a share.
                layout = ExpertLayout.of(
                    (1.0 + tokens - self._placed_tokens).tolist(),
                    num_nodes=self._config.expert_ranks,
                    num_redundant=self._config.redundant_experts,
                    version=self.layout.version + 1,
                )
                load: Message = {"op": "load", "weights": address, "version": version}
                load["layout"] = layout.plain()
                read = self._ask(dict.fromkeys(ranks, load))
            except _Broken as error:
                if list(self._processes.pids) != ranks:
                    self._finished.extend(self._break(error))
                raise EngineError(
                    f"every rank must read the new weights, got {error}; the old ones stay in use"
                ) from None
            try:
                self._ask({rank: {"op": "commit"} for rank in read})
            except _Broken as error:
                self._finished.extend(self._break(error))
                raise EngineError(f"every rank must use the new weights, got {error}") from None
            self.layout, self._placed_tokens = layout, tokens
        num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in given.values())
        return WeightUpdate(version, len(given), num_bytes, time.monotonic() - begin)

    def stats(self) -> dict[str, Any]:
        """Return counters since the start, of the engine and of the ranks.

        `ranks` has the counters of each rank. `expert_tokens` [layers][experts] has the rows that
        each expert computed. `imbalance` is the rows of the busiest expert of a layer over the mean
        (1 for a layer without rows), averaged over layers.
        """
        if self._state in (EngineState.READY, EngineState.RUNNING):
            with self._lock:
                try:
                    given = self._ask({rank: {"op": "stats"} for rank in self.pids})
                    self._rank_stats.update(given)
                except _Broken as error:
                    self._finished.extend(self._break(error))
        tokens = self._expert_tokens()
        rows = [max(layer) * len(layer) / sum(layer) if any(layer) else 1.0 for layer in tokens]
        return {
            **super().stats(),
            "cache_bytes": sum(rank.get("cache_bytes", 0) for rank in self._rank_stats.values()),
            "step_seconds": self._step_seconds,
            "ranks": [{"rank": r, **facts} for r, facts in sorted(self._rank_stats.items())],
            "expert_tokens": tokens,
            "imbalance": sum(rows) / max(len(rows), 1),
        }

    def _expert_tokens(self) -> list[list[int]]:
        """Return [layers][experts], the rows of each expert over all ranks."""
        tables = [
            facts["expert_tokens"]
            for facts in self._rank_stats.values()
            if facts["role"] == "expert"
        ]
        return [
            [sum(counts) for counts in zip(*layer, strict=True)]
            for layer in zip(*tables, strict=True)
        ]
