"""Interface of a rollout engine, and the code that all engines share.

An engine neither decides the final length of a response nor filters responses. Its caller handles
partial responses, retries and groups.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from planish.base import telemetry
from planish.base.errors import ConfigError, EngineBusy, EngineError, NotSupported, PlanishError
from planish.engines.requests import EngineState, ModelRef, Output, Request, WeightUpdate
from planish.engines.weights import WeightSource
from planish.records.rollouts import FinishReason

logger = logging.getLogger(__name__)

_AT_WORK = (EngineState.READY, EngineState.RUNNING)

COUNTERS = ("tokens", "steps", "row_steps", "most_rows", "prefill_tokens")
"""Counters of every engine. `tokens`: sampled tokens, also of running requests. `steps`: forward
passes that decode. `row_steps`: sum of the requests over these steps. `most_rows`: their
maximum."""

LINE_SECONDS = 5.0
"""Seconds between lines of the log that `generate` writes."""


class TurnLock:
    """A mutex that serves threads in the order of their calls.

    With `threading.Lock` a polling loop would take the lock again at once, and a thread that aborts
    would wait forever.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False


class BaseEngine(ABC):
    """States, queue, locking and `generate`, built on hooks that each engine implements.

    `submit`, `poll` and `abort` may be called from different threads.

    The calling thread does the work inside `poll` and `generate`. The engine starts no thread, so
    equal calls give equal schedules and bit-equal outputs.
    """

    max_model_len: int
    """Longest prompt plus response in tokens; known after `start`."""
    routing: bool
    """True if outputs can have the experts of each token."""

    def __init__(self, max_rows: int, max_model_len: int, *, routing: bool) -> None:
        self.max_model_len, self.routing = max_model_len, routing
        self._max_rows = max_rows
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._lock = TurnLock()
        self._arrived = threading.Event()
        self._state = EngineState.NEW
        self._version = 0
        self._queue: deque[Request] = deque()
        self._alive: set[str] = set()
        self._finished: list[Output] = []

    # Hooks of an engine, under the lock.
    @abstractmethod
    def _load(self, model: ModelRef) -> int:
        """Load the model and return the policy version."""

    @abstractmethod
    def _check(self, request: Request) -> str:
        """Return why the engine cannot serve a request that has no `fault`; "" if it can."""

    @abstractmethod
    def _free_rows(self) -> int:
        """Return the number of requests that may start now."""

    @abstractmethod
    def _admit(self, requests: Sequence[Request]) -> list[Output]:
        """Start requests; return the outputs of those that failed at once."""

    @abstractmethod
    def _num_running(self) -> int:
        """Return the number of requests that have started and not ended."""

    @abstractmethod
    def _advance(self) -> list[Output]:
        """Make one step for the running requests; return the outputs of finished requests.

        A step may give each request any number of tokens, or none. Tokens after the end of a
        response, or beyond its budget, are in no output.
        """

    @abstractmethod
    def _withdraw(self, request_ids: Collection[str]) -> list[Output]:
        """End running requests with ABORT."""

    @abstractmethod
    def _replace_weights(self, source: WeightSource, version: int) -> WeightUpdate:
        """Replace all weights, or none on failure."""

    def _renew(self) -> None:
        """Drop the state of earlier requests, and reset the counters."""
        raise NotSupported(
            f"an engine must be able to sample for one iteration after the other, got "
            f"{type(self).__name__}; run iterations apart, or take `transformers` or `vllm`"
        )

    def _sleep(self) -> None:  # noqa: B027 - few engines can
        """Free the device as far as the engine can; `_replace_weights` uses it again."""

    @abstractmethod
    def _release(self) -> None:
        """Free everything."""

    @property
    def state(self) -> EngineState:
        """Present state of the engine."""
        return self._state

    def start(self, model: ModelRef) -> None:
        """Load the model.

        Raises:
            EngineBusy: this is the second call.
            EngineError: the engine cannot serve the model.
        """
        with self._lock:
            if self._state is not EngineState.NEW:
                raise EngineBusy(
                    f"`start` needs a new engine, got one that is {self._state}; open another one"
                )
            with self._failing():
                self._version = self._load(model)
            self._state = EngineState.READY
            telemetry.set_level("planish_rollout_weight_version", self._version)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none; a request with a `fault` ends at once, without the others.

        Raises:
            ConfigError: a prompt is empty, or an id is not a text.
            EngineError: an id is in use.
        """
        with self._lock:
            self._expect("submit", *_AT_WORK)
            seen: set[str] = set()
            for request in requests:
                self._refuse(request, seen)
                seen.add(request.request_id)
            # Checks come first, so an exception changes nothing.
            faults = [self._fault(request) for request in requests]
            self._alive |= seen
            for request, fault in zip(requests, faults, strict=True):
                if fault:
                    self._finished.append(Output.failed(request.request_id, fault))
                else:
                    self._queue.append(request)
            self._settle()
        self._arrived.set()

    def _refuse(self, request: Request, seen: set[str]) -> None:
        if type(request.request_id) is not str:
            raise ConfigError(
                f"`request_id` must be a text, got {request.request_id!r:.80}; name the request"
            )
        if type(request.prompt_ids) is tuple and not request.prompt_ids:
            raise ConfigError(
                f"`prompt_ids` must hold at least one token, got none in {request.request_id!r}; "
                "the chat template of this policy gives empty prompts"
            )
        if request.request_id in self._alive or request.request_id in seen:
            raise EngineError(
                f"a request id must be unique while it is alive, got {request.request_id!r} "
                "again; collect its output or abort it first"
            )

    def _fault(self, request: Request) -> str:
        """Return why a request must end at once, so that it does not affect running requests."""
        fault = request.fault()
        if not fault and request.sampling.want_routing and not self.routing:
            fault = (
                "`want_routing` must be false with an engine that keeps no experts, got true; "
                "open it with `routing` (`rollout.keep_routing`)"
            )
        return fault or self._check(request)

    def poll(self, timeout: float) -> list[Output]:
        """Work until there is an output or `timeout` seconds have passed; return all outputs.

        If there is work, the engine makes at least one step, even with timeout 0. EngineError: the
        engine failed and its requests are lost.
        """
        return self._poll(timeout, None)

    def _poll(self, timeout: float, wanted: set[str] | None) -> list[Output]:
        """Poll for some ids only; outputs of other ids stay for a later call."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                self._expect("poll", *_AT_WORK)
                self._arrived.clear()
                outputs = self._collect(wanted)
                if not outputs and self._state is EngineState.RUNNING:
                    self._turn()
                    outputs = self._collect(wanted)
                if outputs:
                    return outputs
                waits = self._state is not EngineState.RUNNING
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            if waits:
                self._arrived.wait(left)

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Submit requests, work until all are done, and return their outputs in order.

        Every `LINE_SECONDS` a line of the log says how far it has come.
        """
        self.submit(requests)
        wanted = {request.request_id for request in requests}
        done: dict[str, Output] = {}
        last, tokens = time.monotonic(), self._counts["tokens"]
        while len(done) < len(wanted):
            done.update((output.request_id, output) for output in self._poll(1.0, wanted))
            if (spent := time.monotonic() - last) >= LINE_SECONDS:
                rate = (self._counts["tokens"] - tokens) / spent
                last, tokens = last + spent, self._counts["tokens"]
                told = "generating done=%d goal=%d tokens_per_second=%.0f"
                logger.info(told, len(done), len(wanted), rate)
            if self._state is EngineState.FAILED:
                faults = [output.error for output in done.values() if output.error]
                raise EngineError("; ".join(faults[:1]) or "the engine failed")
        return [done[request.request_id] for request in requests]

    def abort(self, request_ids: Collection[str] | None = None) -> list[Output]:
        """Cancel requests and return them with their tokens so far; None cancels all.

        Finished outputs stay until they are polled; unknown ids are ignored.
        """
        with self._lock:
            self._expect("abort", *_AT_WORK)
            return self._abort(request_ids)

    def _abort(self, request_ids: Collection[str] | None) -> list[Output]:
        ids = self._alive if request_ids is None else self._alive & set(request_ids)
        outputs = [
            Output(request.request_id, [], [], [], FinishReason.ABORT)
            for request in self._queue
            if request.request_id in ids
        ]
        self._queue = deque(request for request in self._queue if request.request_id not in ids)
        outputs.extend(self._withdraw(ids - {o.request_id for o in outputs}))
        for output in outputs:
            self._alive.discard(output.request_id)
        self._settle()
        return outputs

    def update_weights(self, source: WeightSource, version: int) -> WeightUpdate:
        """Change the weights; if reading fails, the old weights stay.

        The first policy of a forked run may have a higher `version` than its later policies.

        Raises:
            EngineBusy: requests run or wait.
            EngineError: names or shapes do not fit.
            RecordError: files of pinned weights are damaged.
        """
        with self._lock:
            self._expect("update_weights", *_AT_WORK, EngineState.ASLEEP)
            if self._state is EngineState.RUNNING:
                raise EngineBusy(
                    f"`update_weights` needs an engine with nothing in flight, got "
                    f"{len(self._alive)} requests; collect or abort them first"
                )
            report = self._replace_weights(source, version)
            self._version, self._state = version, EngineState.READY
            telemetry.set_level("planish_rollout_weight_version", version)
            telemetry.set_level("planish_rollout_update_seconds", report.seconds)
            logger.info("updated version=%d seconds=%.3f", version, report.seconds)
            return report

    def renew(self) -> None:
        """Reset the engine to its state after opening with the present weights.

        Raises:
            EngineError: requests run or wait.
            NotSupported: the engine cannot reset.
        """
        with self._lock:
            self._expect("renew", EngineState.READY)
            self._renew()

    def sleep(self) -> None:
        """Free the device for other programs until `update_weights`; the weights may be lost."""
        with self._lock:
            self._expect("sleep", EngineState.READY, EngineState.ASLEEP)
            if self._state is EngineState.READY:
                self._sleep()
            self._state = EngineState.ASLEEP

    def version(self) -> int:
        """Return the policy version of the weights."""
        return self._version

    def stats(self) -> dict[str, Any]:
        """Return `COUNTERS` and further figures; `occupancy` is requests per step over
        `max_rows`.
        """
        steps = max(self._counts["steps"], 1)
        return {
            "queued": len(self._queue),
            "running": self._num_running(),
            "state": self._state,
            **self._counts,
            "occupancy": self._counts["row_steps"] / steps / self._max_rows,
        }

    def close(self) -> None:
        """Free everything; requests in flight are lost. May be called twice."""
        with self._lock:
            if self._state is EngineState.CLOSED:
                return
            self._state = EngineState.CLOSED
            self._queue, self._finished = deque(), []
            self._alive = set()
            self._release()
        self._arrived.set()

    def __enter__(self) -> BaseEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _turn(self) -> None:
        """Start the requests that fit, then make one step."""
        with self._failing(), telemetry.timed("planish_rollout_step_seconds"):
            free = min(self._free_rows(), len(self._queue)) if self._queue else 0
            if free:
                batch = [self._queue.popleft() for _ in range(free)]
                self._finished.extend(self._admit(batch))
            if self._num_running():
                self._finished.extend(self._advance())
        telemetry.mark_progress()
        self._settle()

    def _collect(self, wanted: set[str] | None = None) -> list[Output]:
        """Return and remove finished outputs: all, or those with the `wanted` ids."""
        outputs, self._finished = self._finished, []
        if wanted is not None:
            self._finished = [o for o in outputs if o.request_id not in wanted]
            outputs = [o for o in outputs if o.request_id in wanted]
        for output in outputs:
            self._alive.discard(output.request_id)
            status = "error" if output.error else output.finish_reason.name.lower()
            telemetry.count("planish_rollout_requests_total", status=status)
        return outputs

    def _settle(self) -> None:
        """Set the state to RUNNING if requests remain, else to READY."""
        if self._state in _AT_WORK:
            busy = bool(self._queue) or self._num_running() > 0
            self._state = EngineState.RUNNING if busy else EngineState.READY

    def _expect(self, call: str, *states: EngineState) -> None:
        if self._state not in states:
            why = [output.error for output in self._finished if output.error][:1]
            raise EngineError(
                f"`{call}` needs an engine that is {' or '.join(states)}, got "
                + ": ".join([self._state, *why])
            )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Set the state to FAILED if the block raises."""
        try:
            yield
        except PlanishError:
            self._state = EngineState.FAILED
            raise
        except Exception as error:
            self._state = EngineState.FAILED
            raise EngineError(
                f"the engine failed: {type(error).__name__}: {error}; close it and open another"
            ) from error
