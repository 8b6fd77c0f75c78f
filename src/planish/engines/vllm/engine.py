"""vLLM as a rollout engine: its scheduler, KV cache and sampler, stepped inside this process.

Windows and stop strings are not left to vLLM: the caller cuts windows, and the stop table of all
engines finds strings in token ids.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
from torch import Tensor

from planish.base import telemetry
from planish.base.errors import ConfigError, EngineBusy, EngineError, PlanishError
from planish.engines.architectures import window_fault
from planish.engines.base import BaseEngine
from planish.engines.config import EngineConfig
from planish.engines.policy_folder import check_policy
from planish.engines.requests import (
    EngineState,
    ModelRef,
    Output,
    Request,
    Sampling,
    WeightUpdate,
)
from planish.engines.sampling import request_seed
from planish.engines.stops import StopTable, tokenizer_stops
from planish.engines.transformers.batch import Limits
from planish.engines.vllm.cpu import refuse_on_cpu
from planish.engines.vllm.plugin import LOAD_FORMAT, WEIGHT_TRANSFER, register
from planish.engines.vllm.routing import SlotRouting, inputs_routing, layers_with_experts
from planish.engines.vllm.team import Team
from planish.engines.weights import (
    FolderWeights,
    WeightSource,
    address_of,
    check_weights,
    local_policy,
    offer,
    without_tied,
)
from planish.models.experts import is_expert, num_experts, routing_dtype
from planish.models.headers import context_tokens, dtype_name
from planish.models.policy import head_dtype
from planish.records.rollouts import FinishReason

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler lives in this process, and we step it
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_CPU_CACHE_BYTES = 1 << 30
_CPU_BATCH_TOKENS = 4096
_UPDATE_SECONDS = 1800.0
"""Seconds that the workers may take to load new weights."""
_RANKS_SECONDS = 10.0
"""Seconds that ranks may take to end after vLLM's request; vLLM itself kills them after eight."""


_living: WeakSet[VllmEngine] = WeakSet()
"""The engine of this process, since vLLM's ranks, layer tables and sleep exist once per process."""


@dataclass
class _Running:
    request: Request
    stop_ids: frozenset[int]
    stop_state: int = 0
    """State in the stop table; not used if the request ignores stop strings."""
    internal_id: str = ""
    """The request's name in vLLM's scheduler."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed: list[np.ndarray] = field(default_factory=list)
    """vLLM's record of the experts, complete at the end of the request."""
    cached_tokens: int = 0


class VllmEngine(BaseEngine):
    """An engine on vLLM with at most `max_rows` sequences at once."""

    def __init__(
        self,
        *,
        max_rows: int = 256,
        max_model_len: int = 0,
        device: str = "cpu",
        routing: bool = False,
        config: EngineConfig | None = None,
        load_format: str = LOAD_FORMAT,
        shares_device: bool = False,
        team: Team | None = None,
    ) -> None:
        """Make an engine.

        Args:
            max_rows: requests that run at once.
            max_model_len: longest prompt plus response in tokens; 0 takes the model's own limit.
            device: `cpu`, or the accelerator that this build of vLLM is for.
            routing: record the experts of each token, for requests that want them; only on
                accelerators.
            config: ranks and memory.
            load_format: vLLM's load format at the start; with a format other than ours, vLLM
                reads no routed experts.
            shares_device: `sleep` frees the accelerator for other programs.
            team: the ranks of `config`, if each is a training process with an engine; the first
                rank serves requests, and the others `follow`.
        """
        super().__init__(max_rows, max_model_len, routing=routing)
        self._device, self._routing, self._load_format = device, routing, load_format
        self._shares_device, self._team = shares_device, team
        self._sleeps = shares_device and device != "cpu"
        self._config = config or EngineConfig()
        self._llm: Any = None
        self._ranks: list[multiprocessing.process.BaseProcess] = []
        self._slots: SlotRouting | None = None
        self._strings: StopTable | None = None
        self._running: dict[str, _Running] = {}
        self._scratch = contextlib.ExitStack()

    # Start and stop.

    def _load(self, model: ModelRef) -> int:
        begin = time.monotonic()
        folder, version = local_policy(model, self._scratch)
        names = FolderWeights(folder).names()
        config, tokenizer = check_policy(folder, names)
        self._names = without_tied(names, config)
        limit = context_tokens(config)
        self.max_model_len = min(self.max_model_len or limit, limit)
        size, self._eos = int(config["vocab_size"]), frozenset(tokenizer.eos_token_ids)
        self._limits = Limits(self._max_rows, self.max_model_len, size, self._eos)
        self._strings = tokenizer_stops(tokenizer, size)
        self._experts = layers_with_experts(self._names)
        try:
            if self._routing and self._config.guesses:
                raise ConfigError(
                    "`rollout.keep_routing` must be false with `engine.vllm.speculative_config`, "
                    "and so must `train.replay_routing`, got true; guesses have experts as well"
                )
            if fault := window_fault(config):
                raise ConfigError(f"`engine.name` must serve the model, got 'vllm' and {fault}")
            self._routing_dtype = routing_dtype(config) if self._routing else ""
            ranks, experts = self._config.tensor_parallel, num_experts(config)
            if self._config.expert_parallel and (not experts or experts % ranks):
                raise ConfigError(
                    "the experts of a layer must be divisible by the ranks with "
                    f"`engine.expert_parallel`, got {experts} and `engine.tensor_parallel` = "
                    f"{ranks}; change the ranks, or share every expert among them"
                )
            before = multiprocessing.active_children()
            self._llm = self._open(folder, config)
            self._ranks = [p for p in multiprocessing.active_children() if p not in before]
            self._wanted = {
                name
                for name in self._names
                if not (self._load_format != LOAD_FORMAT and is_expert(name))
            }
            self._check_taken()
            # One token, so that a model that this build cannot run fails now.
            one = Sampling(max_new_tokens=1, temperature=0.0, ignore_eos=True)
            if refused := self._add(Request("probe", (0,), one)):
                raise EngineError(f"a prompt of one token must be served, got {refused[0].error}")
            while self._running:
                self._step()
            self._counts = dict.fromkeys(self._counts, 0)
            self._forget()
        except BaseException:
            self._release()
            raise
        cache = self._llm.vllm_config.cache_config
        logger.info(
            "started engine=vllm ranks=%d cache_tokens=%d seconds=%.1f",
            self._config.tensor_parallel,
            int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0),
            time.monotonic() - begin,
        )
        return version

    def _open(self, folder: Path, model_config: dict[str, Any]) -> Any:
        if _living:
            raise EngineBusy(
                "`start` needs a process without another vLLM, got a second engine `vllm` beside "
                f"one that is {next(iter(_living)).state}; close that one, or take a process each"
            )
        _living.add(self)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from vllm import EngineArgs
            from vllm.config import CompilationConfig, WeightTransferConfig
            from vllm.envs import disable_envs_cache
            from vllm.platforms import current_platform
        except ImportError as error:
            raise ConfigError(
                f"the engine `vllm` needs the package vllm, got {error}; use the image `rollout`, "
                "or `engine.name = 'transformers'`"
            ) from None
        register()
        settings, is_cpu = self._config, current_platform.is_cpu()
        if (self._device == "cpu") != is_cpu:
            raise ConfigError(
                f"the device must be the one that vLLM is built for, which is "
                f"{current_platform.device_type!r}, got {self._device!r}"
            )
        if is_cpu:
            refuse_on_cpu(settings, model_config, routing=self._routing)
            if settings.tensor_parallel > 1:
                # vLLM would bind each rank to its own NUMA node, which few machines have. An
                # earlier engine of this process has made vLLM cache the environment variables.
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
                disable_envs_cache()
        is_rank = self._shares_device and "RANK" in os.environ
        cache_bytes = settings.cache_bytes or (_CPU_CACHE_BYTES if is_cpu else 0)
        batch_tokens = settings.batch_tokens
        if is_cpu:
            batch_tokens = max(batch_tokens or _CPU_BATCH_TOKENS, self.max_model_len)
        ours: dict[str, Any] = {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "load_format": self._load_format,
            "generation_config": "vllm",
            "dtype": dtype_name(model_config),
            # Without it vLLM would compute the LM head in the type of the model.
            "hf_overrides": {"head_dtype": str(head_dtype(model_config)).removeprefix("torch.")},
            "max_model_len": self.max_model_len,
            "max_num_seqs": self._max_rows,
            "max_num_batched_tokens": batch_tokens or None,
            # For a prompt in chunks vLLM rewinds the request's generator, which CPU generators do
            # not support.
            "enable_chunked_prefill": not is_cpu,
            "tensor_parallel_size": settings.tensor_parallel,
            # Each rank of a trainer has its own engine, which vLLM treats as data parallelism.
            "distributed_executor_backend": "external_launcher" if is_rank else None,
            "enable_sleep_mode": self._sleeps,
            "enable_expert_parallel": settings.expert_parallel,
            "quantization": None if settings.quantization == "none" else settings.quantization,
            "gpu_memory_utilization": settings.memory_share,
            "kv_cache_memory_bytes": cache_bytes or None,
            "enforce_eager": is_cpu or not settings.compile,
            # vLLM's CPU kernel (`csrc/cpu/pos_encoding.cpp`) reads each head of a query [tokens,
            # heads, width], as in latent attention, as a token; torch's implementation does not.
            "compilation_config": CompilationConfig(custom_ops=["-rotary_embedding"] * is_cpu),
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": WeightTransferConfig(backend=WEIGHT_TRANSFER),
            "worker_extension_cls": "planish.engines.vllm.taken.TellsTaken",
            "disable_log_stats": True,
            # None turns it on wherever vLLM supports it, which excludes the CPU
            # (`platforms/cpu.py`). Experts of a token are read between two steps, when no step may
            # be in progress.
            "async_scheduling": False if self._routing else None,
            "enable_return_routed_experts": self._routing,
        }
        return self._new_llm(EngineArgs, ours, model_config, cache_bytes)

    def _new_llm(
        self, made: Any, ours: dict[str, Any], model_config: dict[str, Any], cache_bytes: int
    ) -> Any:
        """Start vLLM with our options and the options in `engine.vllm`."""
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        given = copy.deepcopy(self._config.vllm)
        if unknown := sorted(given.keys() - {option.name for option in fields(made)}):
            raise ConfigError(
                f"`engine.vllm` must hold options of this vLLM's `EngineArgs`, got {unknown}; "
                "correct or leave them out"
            )
        try:
            # The default of the other usage context is a server's, with fewer tokens per step.
            return LLMEngine.from_engine_args(made(**ours, **given), UsageContext.LLM_CLASS)
        except Exception as error:
            if not given and not isinstance(error, ValueError):
                raise
            raise self._refusal(str(error) or repr(error), model_config, cache_bytes) from None

    def _refusal(self, fault: str, model_config: dict[str, Any], cache_bytes: int) -> PlanishError:
        settings = self._config
        if "AuxOutput" in fault:
            return ConfigError(
                "`rollout.keep_routing` must be false where vLLM can not return the experts of "
                f"a token, and `train.replay_routing`, which asks for them, got true ({fault})"
            )
        if "less than desired" in fault:
            return EngineError(
                f"`engine.memory_share` = {settings.memory_share} of the device must be free "
                f"at the start, got {fault}; lower it (that of the cold start's probe is "
                "`sft.probe_memory_share`), or end what else runs there"
            )
        if "cache" in fault and "validation error" not in fault:
            return EngineError(
                f"the cache must hold one sequence of {self.max_model_len} tokens, got "
                f"`engine.cache_bytes` = {cache_bytes} and `engine.memory_share` = "
                f"{settings.memory_share}; raise them, or take a device with more memory ({fault})"
            )
        kind = ConfigError if settings.vllm else EngineError
        return kind(
            f"a policy and the settings of `engine` must be such that vLLM serves, got "
            f"{model_config.get('architectures')} and {fault}; "
            + (f"change `engine.vllm` = {settings.vllm}, or " if settings.vllm else "")
            + "take the engine `transformers`"
        )

    def _release(self) -> None:
        self._running.clear()
        if self._llm is not None:
            self._llm.engine_core.shutdown()
            self._llm = None
        # After a rank has died, a thread of vLLM ends the others, but nothing waits for them.
        end = time.monotonic() + _RANKS_SECONDS
        for rank in self._ranks:
            rank.join(max(0.0, end - time.monotonic()))
            if rank.is_alive():
                rank.kill()
                rank.join()
        self._ranks = []
        self._scratch.close()
        _living.discard(self)

    def _renew(self) -> None:
        self._counts.update(dict.fromkeys(self._counts, 0))
        self._forget()

    def _sleep(self) -> None:
        if self._sleeps:
            # No copy is kept, since the next weights come from the trainer.
            self._llm.sleep(2)

    def apply(self, function: Callable[[Any], Any]) -> Any:
        """Apply a function to the model of the only rank, and return its result."""
        return self._llm.apply_model(function)[0]

    def keep_choices(self, dtype: str) -> Callable[[int, Tensor], None]:
        """Record the experts of each token although other processes compute them.

        Args:
            dtype: `int8` or `int16`.

        Returns:
            A function to call with the choices of each layer, like `SlotRouting.hear`.
        """
        self._slots, self.routing = SlotRouting(self._llm, len(self._experts), dtype), True
        return self._slots.hear

    # Requests.

    def _check(self, request: Request) -> str:
        if request.sampling.top_k and self._config.guesses:
            # vLLM crashes at a step without a guess, since it takes the largest `top_k` of no rows.
            return (
                "`top_k` must be 0 where vLLM guesses (`engine.vllm.speculative_config`), got "
                f"{request.sampling.top_k}"
            )
        return self._limits.fault(request)

    def _free_rows(self) -> int:
        return self._max_rows - len(self._running)

    def _num_running(self) -> int:
        return len(self._running)

    def _admit(self, requests: Sequence[Request]) -> list[Output]:
        self._tell("admit", list(requests))
        return [failed for request in requests for failed in self._add(request)]

    def _advance(self) -> list[Output]:
        self._tell("step")
        return self._step()

    def _withdraw(self, request_ids: Collection[str]) -> list[Output]:
        names = [name for name in self._running if name in request_ids]
        if names:
            self._tell("drop", names)
        return self._drop(names)

    def _tell(self, call: str, words: Any = None) -> None:
        if self._team is not None:
            self._team.tell(call, words)

    def follow(self) -> None:
        """Follow the engine of the team's first rank, until another message arrives."""
        assert self._team is not None
        while True:
            call, words = self._team.hear()
            if call == "admit":
                for request in words:
                    # Experts are read where outputs are.
                    self._add(
                        replace(request, sampling=replace(request.sampling, want_routing=False))
                    )
            elif call == "step":
                self._step()
                telemetry.mark_progress()
            elif call == "drop":
                self._drop(words)
            else:
                return

    def _add(self, request: Request) -> list[Output]:
        """Add a request to vLLM; return its output if vLLM refuses it."""
        from vllm.sampling_params import RequestOutputKind

        from planish.engines.vllm.params import TrueParams

        sampling, prefix = request.sampling, request.response_prefix
        row = _Running(request, frozenset() if sampling.ignore_eos else self._eos)
        if self._strings is not None and not sampling.ignore_eos:
            row.stop_state = self._strings.advance(0, prefix)
        # A generator of vLLM starts again in each window; with the same seed it would repeat its
        # numbers.
        seed = request_seed(sampling.seed, len(prefix), "", 0) if prefix else sampling.seed
        prompt = {"prompt_token_ids": [*request.prompt_ids, *prefix]}
        try:
            params = TrueParams(
                temperature=float(sampling.temperature),
                top_p=float(sampling.top_p),
                top_k=sampling.top_k,
                max_tokens=min(sampling.max_new_tokens, self.max_model_len),
                stop_token_ids=sorted(row.stop_ids),
                ignore_eos=True,
                seed=seed,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._llm.add_request(request.request_id, prompt, params)
        except ValueError as error:
            return [Output.failed(request.request_id, f"vLLM refuses the request: {error}")]
        (row.internal_id,) = self._llm.output_processor.external_req_ids[request.request_id]
        self._running[request.request_id] = row
        return []

    def _step(self) -> list[Output]:
        rows = len(self._running)
        self._counts["steps"] += 1
        self._counts["row_steps"] += rows
        self._counts["most_rows"] = max(self._counts["most_rows"], rows)
        ended: list[Output] = []
        stopped: list[str] = []
        with self._team.together() if self._team is not None else contextlib.nullcontext():
            parts = self._llm.step()
        for part in parts:
            row = self._running.get(part.request_id)
            if row is None:
                continue
            output = self._take(row, part)
            if output is not None:
                ended.append(output)
                if not part.finished:
                    stopped.append(part.request_id)
        if stopped:
            self._llm.abort_request(stopped)
        return ended

    def _take(self, row: _Running, part: Any) -> Output | None:
        """Add the tokens of a step; return the output if the row has ended."""
        if not row.tokens:
            row.cached_tokens = int(part.num_cached_tokens or 0)
        (new,) = part.outputs
        if new.routed_experts is not None:
            row.routed.append(new.routed_experts)
        for token, entry in zip(new.token_ids, new.logprobs or (), strict=True):
            logprob = entry[token].logprob
            if not math.isfinite(logprob):
                place = len(row.request.prompt_ids) + len(row.request.response_prefix)
                place += len(row.tokens)
                error = f"logits must be finite, got NaN or inf at position {place}"
                return self._end(row, FinishReason.ABORT, error)
            row.tokens.append(int(token))
            row.logprobs.append(float(logprob))
            self._counts["tokens"] += 1
            if token in row.stop_ids:
                return self._end(row, FinishReason.STOP)
            if self._strings is not None and not row.request.sampling.ignore_eos:
                row.stop_state = self._strings.advance(row.stop_state, (int(token),))
                if self._strings.complete[row.stop_state]:
                    return self._end(row, FinishReason.STOP)
        if not part.finished:
            return None
        if new.finish_reason != "length":
            error = f"vLLM ended the request: {new.finish_reason}"
            return self._end(row, FinishReason.ABORT, error)
        return self._end(row, FinishReason.LENGTH)

    def _end(self, row: _Running, reason: FinishReason, error: str = "") -> Output:
        del self._running[row.request.request_id]
        num_inputs = len(row.request.prompt_ids) + len(row.request.response_prefix)
        routing = None
        if row.request.sampling.want_routing and row.tokens:
            num_seen = num_inputs + len(row.tokens) - 1
            if self._slots is not None:
                routing = self._slots.read(row.internal_id, num_seen)
            else:
                # For a request that still runs, vLLM returns no record of experts, so its state is
                # read.
                states = self._llm.output_processor.request_states
                chunks = row.routed or states[row.internal_id].routed_experts_chunks
                routing = inputs_routing(chunks, self._experts, num_seen, self._routing_dtype)
        self._counts["prefill_tokens"] += num_inputs - row.cached_tokens
        return Output(
            row.request.request_id,
            row.tokens,
            row.logprobs,
            [self._version] * len(row.tokens),
            reason,
            routing=routing,
            error=error,
        )

    def _drop(self, names: Sequence[str]) -> list[Output]:
        outputs = [self._end(self._running[name], FinishReason.ABORT) for name in names]
        self._llm.abort_request(list(names))
        return outputs

    def _replace_weights(self, source: WeightSource, version: int) -> WeightUpdate:
        begin = time.monotonic()
        given = source.names()
        check_weights(given, {name: shape for name, (shape, _) in self._names.items()})
        # One after the other, so that the cache is allocated only after the old weights are
        # replaced.
        if wakes := self._sleeps and self._state is EngineState.ASLEEP:
            self._llm.wake_up(["weights"])
        is_here = self._config.tensor_parallel == 1 or self._team is not None
        with contextlib.ExitStack() as scratch:
            announced = {"address": offer(source) if is_here else address_of(source, scratch)}
            # With several ranks one may fail and another not; vLLM would then assign their answers
            # to later calls wrongly.
            with self._failing() if self._config.tensor_parallel > 1 else contextlib.nullcontext():
                self._tell_workers("init_weight_transfer_engine", init_info=announced)
            # A failure from here on may leave a mixture of old and new weights.
            with self._failing():
                self._tell_workers("start_weight_update")
                self._tell_workers("update_weights", update_info={})
                self._tell_workers("finish_weight_update")
                self._check_taken()
                if wakes:
                    self._llm.wake_up(["kv_cache"])
                self._forget()
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in given.values())
        return WeightUpdate(version, len(given), size, time.monotonic() - begin)

    def _check_taken(self) -> None:
        """Refuse weights if no rank has read some of them, because vLLM dropped them."""
        taken: set[str] = set().union(*self._llm.collective_rpc("planish_taken"))
        if self._team is not None:
            taken = self._team.union(taken)
        dropped = sorted(self._wanted - taken)
        if dropped:
            shapes = [f"{name} {list(self._names[name][0])}" for name in dropped[:5]]
            raise EngineError(
                "vLLM must take every tensor of the policy, got a model of vLLM without "
                f"{', '.join(shapes)} ({len(dropped)} in all), which would sample from another "
                "policy; take the engine `transformers`"
            )

    def _tell_workers(self, method: str, **arguments: Any) -> None:
        self._llm.collective_rpc(method, timeout=_UPDATE_SECONDS, kwargs=arguments)

    def _forget(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineError("the cache of prompts must be free to be dropped, got blocks in use")
