"""Check that the settings fit the pods of a profile: devices, processes, memory of each device."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from planish.base.config import nearest
from planish.base.errors import ConfigError
from planish.base.parallel import grid_fault, num_trainers, package_fault
from planish.base.text import bytes_text
from planish.engines import APART
from planish.models.experts import sharing_fault
from planish.models.headers import read_config
from planish.models.shapes import (
    MEGATRON_FAMILIES,
    ModelShape,
    built_shape,
    context_fault,
    known_shape,
    shape_of,
)
from planish.stages.prepare import memory
from planish.stages.prepare.cluster import Pod, PodRequests
from planish.stages.prepare.memory import Config, MemoryPart, Sharing
from planish.store.sources import open_folder, parse_source

USABLE = 0.92
"""Usable part of a GPU's memory; CUDA, NCCL, kernels and fragmentation take the rest."""
PROGRAM_BYTES = 1 << 29
"""Host memory of a process with torch, in bytes, before it loads a model."""

HOST = "the host memory"

SMALLEST = "dapo-qwen2.5-0.5b"
"""The smallest preset for pods with GPUs."""

DEVICES = {
    "curate": "curate.pass_rate_device",
    "sft": "sft.device",
    "rollout": "rollout.device",
    "train": "train.device",
    "evaluate": "evaluate.device",
}
"""Stage to the setting with its device."""


@dataclass(frozen=True)
class Demand:
    """Memory that a stage needs on one device."""

    stage: str
    device: str
    """Device in words: `each of 8 GPUs`."""
    parts: Sequence[MemoryPart]
    room_bytes: int
    remedy: str

    @property
    def num_bytes(self) -> int:
        """Sum of the parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def fault(self) -> str:
        """Message if the demand does not fit, else empty."""
        if self.num_bytes <= self.room_bytes:
            return ""
        largest = max(self.parts, key=lambda part: part.num_bytes)
        return (
            f"`{self.stage}` must fit in the {bytes_text(self.room_bytes)} that {self.device} "
            f"leaves for it, got {bytes_text(self.num_bytes)}, of which "
            f"{bytes_text(largest.num_bytes)} are {largest.name}; {self.remedy}"
        )

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "stage": self.stage,
            "device": self.device,
            "parts": [vars(part) for part in self.parts],
            "num_bytes": self.num_bytes,
            "room_bytes": self.room_bytes,
            "fits": not self.fault,
        }


def profile_requests(name: str) -> PodRequests:
    """Return the pod requests of a profile; raises ConfigError if there is no such profile."""
    text = (resources.files("planish") / "stages/prepare/profiles.json").read_text("utf-8")
    profiles = json.loads(text)
    if name not in profiles:
        raise ConfigError(
            f"a profile must be one of {sorted(profiles)}, got {name!r}{nearest(name, profiles)}"
        )
    return PodRequests.parse(json.dumps(profiles[name]))


def this_machine(*, in_turn: bool = False) -> PodRequests:
    """Return pods with this machine's host memory for every stage; no pods if it has GPUs.

    With `in_turn`, rollout and train share their processes.
    """
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return PodRequests({}, {}, num_nodes=0, in_turn=in_turn)
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    stages = [*DEVICES, *["iterate"] * in_turn]
    pods = dict.fromkeys(stages, Pod(0, str(size)))
    return PodRequests({}, {}, pods, num_nodes=0, in_turn=in_turn)


def find_shape(config: Config) -> ModelShape:
    """Return the sizes of the configured model: by its name, or from its config.json.

    Raises:
        ConfigError: there is no config.json, or its memory cannot be counted.
        StoreUnavailable: the store does not answer.
    """
    model = config.model
    if not model.path:
        return built_shape(model)
    known = None if (Path(model.path) / "config.json").is_file() else known_shape(model.path)
    if known:
        return known
    source = parse_source(model.path, key="model.path")
    return shape_of(read_config(open_folder(source, key="model.path", revision=model.revision)))


class Processes(NamedTuple):
    """Numbers of training processes."""

    pod: int
    """Processes of one pod."""
    total: int
    """Processes of all pods that train together."""
    trainers: int
    """Processes that train; with `rollout.ahead` the others sample, and 0 means that `train.split`
    does not divide the processes."""

    @classmethod
    def of(cls, config: Config, pod: Pod, requests: PodRequests) -> Processes:
        """Return the processes in pods of a profile, or on this machine."""
        train = config.train
        each = train.num_processes or max(1, pod.gpus)
        total = each * (train.num_nodes or requests.num_nodes or 1)
        return cls(each, total, num_trainers(train.split, total) if config.rollout.ahead else total)


def device_faults(config: Config, requests: PodRequests) -> list[str]:
    """Return faults of settings that do not match the devices of the pods.

    Outside a cluster all stages run on this machine, so missing packages are faults too. In a
    cluster each stage checks its own image, which has other packages than that of `prepare`.
    """
    train, engine = config.train, config.engine
    packages = {
        "train.trainer": train.trainer,
        "engine.name": engine.name,
        "engine.transport": engine.transport,
    }
    missing = [] if requests.num_nodes else [package_fault(*each) for each in packages.items()]
    checks = (_pod_faults, _engine_faults, _rank_faults)
    return [
        *filter(None, missing),
        *(fault for check in checks for fault in check(config, requests)),
    ]


def _pod_faults(config: Config, requests: PodRequests) -> Iterator[str]:
    if requests.have_gpus and not config.model.path:
        yield (
            "`model.path` must name a model in pods with GPUs, got none; what is built from "
            f"scratch is for a machine without: take a preset for GPUs, {SMALLEST!r} is the "
            "smallest, or give a model by `model`"
        )
    for stage, path in DEVICES.items():
        pod, seen = requests.pod_of(stage), attrgetter(path)(config)
        wanted = "cuda" if pod and pod.gpus else "cpu"
        if pod and seen not in ("auto", wanted):
            yield (
                f"`{path}` must be 'auto' or {wanted!r} in {pod}, got {seen!r}; change it, or take "
                "another profile"
            )
    for stage, path in (("sft", "sft.force"), ("curate", "curate.pass_rate_policy")):
        pod, seen = requests.stages.get(stage), attrgetter(path)(config)
        if seen and pod and not pod.gpus and requests.have_gpus:
            yield (
                f"`{path}` must be off in a pipeline whose `{stage}` has {pod}, got {seen!r}; "
                "compile it with GPUs for it (`python -m pipelines.compile --cold-start`, then "
                "`planish submit --pipeline FILE`)"
            )


def _engine_faults(config: Config, requests: PodRequests) -> Iterator[str]:
    engine, is_apart = config.engine, config.engine.name in APART
    if requests.in_turn and is_apart:
        yield (
            "a task of several iterations needs its engine in the training processes: "
            f"`engine.name` = {engine.name!r} needs iterations apart (`python -m "
            "pipelines.compile --resident 0`, then `planish submit --pipeline FILE`)"
        )
    if config.rollout.ahead and not requests.in_turn:
        yield (
            "`rollout.ahead` must be 0 where every stage of an iteration is a task of its own, got "
            "1; run several iterations in one task (`--resident` of `planish run` and of `python "
            "-m pipelines.compile`, as the profiles for GPUs have it)"
        )
    at_once, _ = requests.moments.get("rollout", (1, {}))
    if engine.peers and at_once > 1:
        yield (
            f"a pipeline with `engine.peers` must run one rollout task at a time, got {at_once}; "
            "compile it with one shard (`python -m pipelines.compile --shards 1`), whose attention "
            "ranks all share the experts"
        )
    setting, ranks = "`engine.tensor_parallel`", engine.tensor_parallel
    if is_apart:
        setting, ranks = "`engine.attention_ranks` + `engine.expert_ranks`", engine.num_ranks
    for stage in ("rollout", "evaluate"):
        pod = requests.pod_of(stage)
        if pod and pod.gpus and not engine.peers and ranks > pod.gpus:
            yield (
                f"{setting} must be at most the GPUs of a pod of `{stage}` "
                f"({pod.gpus}), got {ranks}; lower it, or take a profile with more"
            )


def _rank_faults(config: Config, requests: PodRequests) -> Iterator[str]:
    train, pod = config.train, requests.pod_of("train")
    if train.num_nodes > 1 and not requests.num_nodes:
        yield (
            f"`train.num_nodes` must be 0 or 1 outside a cluster, got {train.num_nodes}; submit "
            "the run to a cluster, or take `train.num_processes`"
        )
    if not pod:
        return
    if pod.gpus and train.num_processes not in (0, pod.gpus):
        yield (
            f"`train.num_processes` must be 0 or {pod.gpus} in {pod}, got {train.num_processes}; 0 "
            "is one for each GPU"
        )
    if pod.gpus and train.num_nodes > 1 and not requests.has_gang_pods:
        yield (
            f"`train.num_nodes` must be 0 or 1 in a profile whose train stage is {pod}, got "
            f"{train.num_nodes}: it would wait in that pod for others like it; take the profile "
            f"gpu-4x8 or gpu-16x8 with `train.num_nodes={train.num_nodes}`"
        )
    ranks, processes = config.engine.tensor_parallel, Processes.of(config, pod, requests)
    sampling = processes.total - config.rollout.ahead * processes.trainers
    if requests.in_turn and (sampling % ranks or processes.pod % ranks):
        yield (
            "`engine.tensor_parallel` must divide the training processes of a pod, and of all "
            f"those that sample, in a task of several iterations, got {ranks} for {processes.pod} "
            f"and {sampling}; `train.num_processes` sets them, or run iterations apart "
            "(`--resident 0`)"
        )
    if not processes.trainers:
        yield (
            f"`train.split` = {train.split!r} must divide the number of training processes with "
            f"`rollout.ahead`, got {processes.total}; `train.num_processes` sets it, or take "
            "another split"
        )
    elif fault := grid_fault(processes.trainers, **train.degrees, replicas=train.replicas):
        yield fault


def trainer_faults(config: Config, shape: ModelShape) -> list[str]:
    """Return the faults that prevent the trainer from sharding this model over its ranks."""
    train = config.train
    parts = train.tensor_parallel
    heads = shape.num_heads // parts, max(1, shape.num_kv_heads // parts)
    context = context_fault(
        shape.family, *heads, train.context_parallel, has_windows=shape.has_windows
    )
    if train.trainer != "megatron":
        return list(filter(None, [context]))
    divided = {
        f"{shape.num_heads} heads": ("tensor_parallel", shape.num_heads),
        f"{shape.num_kv_heads} heads of keys and values": ("tensor_parallel", shape.num_kv_heads),
        f"{shape.layers} layers": ("pipeline_parallel", shape.layers),
    }
    if not shape.num_experts:
        width = shape.intermediate_size
        name = f"{width} features between the projections of a layer"
        divided[name] = ("tensor_parallel", width)
    faults = [
        f"`train.{key}` must divide the {name} of the model, got {getattr(train, key)}"
        for name, (key, count) in divided.items()
        if count % getattr(train, key)
    ]
    sharing = sharing_fault(
        shape.num_experts,
        train.expert_parallel,
        tensor_parallel=parts,
        shares_tokens=train.sequence_parallel,
    )
    if shape.beside_megatron:
        faults.append(
            f"`train.trainer` must be 'fsdp2' for a model with {', '.join(shape.beside_megatron)}, "
            f"got 'megatron', which trains {', '.join(MEGATRON_FAMILIES)} as published"
        )
    return list(filter(None, [context, *faults, sharing]))


def device_warnings(config: Config, requests: PodRequests) -> list[str]:
    """Return warnings for settings that work but waste the GPUs of the pods."""
    pod = requests.pod_of("train")
    is_wide = config.train.compute_dtype == "float32"
    if not (pod and pod.gpus and config.model.path and is_wide):
        return []
    return [
        "`train.compute_dtype` is float32: GPUs multiply several times as fast in bfloat16, "
        "and the master weights stay float32"
    ]


def demands(config: Config, shape: ModelShape, requests: PodRequests) -> list[Demand]:
    """Return the demands per device of the cold start, the iteration's stages and the evaluation.

    Stages without a pod and ranks at `engine.peers` are left out.
    """
    found, gpu_bytes = [], requests.gpu_bytes
    in_turn = requests.in_turn and config.engine.name not in APART
    if pod := requests.pod_of("train"):
        train = _demands_in_turn if in_turn else _train_demands
        found += train(config, shape, pod, requests)
    has_model = bool(config.model.path)
    if (pod := requests.stages.get("sft")) and (config.sft.force or not has_model):
        parts = memory.cold_start_parts(config, shape, gpu_bytes, on_cpu=not pod.gpus)
        remedy = "lower `sft.traces_per_minibatch` or `sft.max_rows`"
        if has_model:
            remedy += ", or begin with the model as it is (`sft.force=false`)"
        device, room = "one GPU" if pod.gpus else HOST, _room(pod, 1, gpu_bytes)
        found.append(Demand("sft", device, parts, room, remedy))
    for stage in ("evaluate",) if in_turn else ("rollout", "evaluate"):
        if pod := requests.pod_of(stage):
            found += _engine_demands(config, shape, stage, pod, gpu_bytes)
    return found


def _room(pod: Pod, processes: int, gpu_bytes: int) -> int:
    """Return the usable bytes of a GPU, or of the host if the pod has no GPU."""
    return int(USABLE * gpu_bytes) if pod.gpus else pod.memory_bytes - processes * PROGRAM_BYTES


def _engine_demands(
    config: Config, shape: ModelShape, stage: str, pod: Pod, gpu_bytes: int
) -> list[Demand]:
    engine = config.engine
    if engine.peers:
        return []
    attention, experts = engine.attention_ranks, engine.expert_ranks
    is_apart = engine.name in APART
    remedy = "take a smaller model, `model.dtype=bfloat16`, or devices with more memory"
    more = f"lower `{stage}.max_rows` or `{stage}.max_response_tokens`, {remedy}"
    parts = memory.engine_parts(config, shape, stage, gpu_bytes, on_cpu=not pod.gpus)
    others, num_frame_bytes = [], 0
    if is_apart:
        frames = memory.frames_part(config, shape, stage, experts)
        parts.insert(-1, frames)
        num_frame_bytes = frames.num_bytes
        arriving = memory.frames_part(config, shape, stage, attention)
        others = [memory.expert_rank_part(config, shape), arriving]
    room = room_of_experts = _room(pod, 1 + is_apart * engine.num_ranks, gpu_bytes)
    if not pod.gpus:
        total = [*_times(parts, attention), *_times(others, experts)]
        return [Demand(stage, HOST, total, room, more)]
    if engine.name.startswith("vllm"):
        # The share limits vLLM itself; memory of frames comes on top.
        share = int(engine.memory_share * gpu_bytes)
        room = min(share + num_frame_bytes, max(share, room))
        more = f"raise `engine.memory_share`, lower `{stage}.max_response_tokens`, {remedy}"
    device = f"each of {pod.gpus} GPUs" if pod.gpus > 1 else "a GPU"
    if not is_apart:
        return [Demand(stage, device, parts, room, more)]
    remedy = f"raise `engine.expert_ranks`, {remedy}"
    of_experts = f"{_gpus(attention, experts)} of experts"
    return [
        Demand(stage, f"{_gpus(0, attention)} of attention", parts, room, more),
        Demand(stage, of_experts, others, room_of_experts, remedy),
    ]


def _gpus(first: int, count: int) -> str:
    """Return the GPUs of `count` ranks in words; rank i of a pod has GPU i."""
    return f"GPU {first}" if count == 1 else f"each of GPUs {first} to {first + count - 1}"


def _demands_in_turn(
    config: Config, shape: ModelShape, pod: Pod, requests: PodRequests
) -> list[Demand]:
    """Return the demands of a device on which engine and trainer work in turn.

    While the engine samples, the trainer keeps weights and moments on the device. While the trainer
    works, vLLM keeps nothing there, and the engine `transformers` keeps its weights. With
    `rollout.ahead`, engine and trainer have separate devices.
    """
    gpu_bytes, is_ahead = requests.gpu_bytes, config.rollout.ahead
    train, *others = _train_demands(config, shape, pod, requests)
    processes, section, count = Processes.of(config, pod, requests), "rollout", 0
    beside = config
    if not is_ahead:
        count = processes.pod
        share = engine_share(config, shape, processes.total, gpu_bytes)
        beside = memory.with_share(config, share)
        # One vLLM serves rollout and evaluation; an evaluation does not limit its prompts.
        if config.evaluate.every and config.engine.name == "vllm":
            section = "evaluate"
    (sampling,) = _engine_demands(beside, shape, section, pod, gpu_bytes)
    if not pod.gpus:
        count = count or processes.pod - num_trainers(config.train.split, processes.pod)
        engines = _times(sampling.parts, count)
        return [replace(train, stage="iterate", parts=(*train.parts, *engines)), *others]
    if is_ahead:
        return [train, *others, sampling]
    if not config.engine.name.startswith("vllm"):
        held = _at_rest(config, shape, processes.total)
        at_rest = MemoryPart("the trainer at rest", held, "its weights and moments")
        asleep = replace(sampling.parts[0], name="weights of the engine")
        sampling = replace(sampling, parts=(*sampling.parts, at_rest))
        train = replace(train, parts=(*train.parts, asleep))
    apart = "or run iterations apart (`python -m pipelines.compile --resident 0`)"
    train = replace(train, remedy=f"{train.remedy}, {apart}")
    sampling = replace(
        sampling, stage="rollout", device=train.device, remedy=f"{sampling.remedy}, {apart}"
    )
    return [train, *others, sampling]


def engine_share(config: Config, shape: ModelShape, num_ranks: int, gpu_bytes: int) -> float:
    """Return the part of a GPU that vLLM may take beside a trainer of `num_ranks` ranks.

    It is `engine.memory_share`, or less if weights and moments of the trainer need the memory.
    """
    left = math.floor(100 * (USABLE - _at_rest(config, shape, num_ranks) / gpu_bytes)) / 100
    share: float = config.engine.memory_share
    return min(share, max(left, 0.01))


def _at_rest(config: Config, shape: ModelShape, num_ranks: int) -> int:
    """Return the bytes of the trainer's weights and moments on a device; 0 with offload."""
    if config.train.offload:
        return 0
    weights, moments, _ = memory.state_parts(config, shape, _sharing(config.train, num_ranks))
    return weights.num_bytes + moments.num_bytes


def _sharing(train: Any, num_ranks: int) -> Sharing:
    if train.trainer != "megatron":
        ranks = max(1, num_ranks // train.replicas)
        return Sharing(ranks, ranks, gathers=num_ranks > 1 or train.offload)
    # Each data-parallel rank of Megatron has a copy.
    stages = train.pipeline_parallel
    return Sharing(train.tensor_parallel * stages, train.expert_parallel * stages, gathers=False)


def _times(parts: Sequence[MemoryPart], ranks: int) -> Sequence[MemoryPart]:
    if ranks == 1:
        return parts
    return [MemoryPart(p.name, p.num_bytes * ranks, f"{p.how} x {ranks}") for p in parts]


def _train_demands(
    config: Config, shape: ModelShape, pod: Pod, requests: PodRequests
) -> list[Demand]:
    """Return the demands of a training step: of each device of all pods, and of a host."""
    train, is_ahead = config.train, config.rollout.ahead
    processes = Processes.of(config, pod, requests)
    remedies = {
        "set `train.activation_checkpointing=true`": not train.activation_checkpointing,
        "lower `train.replicas`": train.replicas > 1,
        "set `train.offload=true`": train.trainer == "fsdp2" and not train.offload,
        "lower `train.tokens_per_microbatch` and `rollout.max_response_tokens`": True,
        "raise `train.context_parallel`": train.tokens_per_microbatch
        < memory.tokens_of_rank(config),
        "or take a smaller model or a profile with more memory": True,
    }
    remedy = ", ".join(words for words, helps in remedies.items() if helps)
    # `device_faults` refuses a split that does not divide the processes.
    total = processes.trainers or processes.total
    ranks = min(processes.pod, total)
    sharing = _sharing(train, total)
    model_ranks = train.tensor_parallel * train.pipeline_parallel * train.context_parallel
    batch = memory.batch_part(config, max(1, total // model_ranks))
    state = memory.state_parts(config, shape, sharing)
    parts = memory.train_parts(config, shape, sharing, on_cpu=not pod.gpus)
    room = _room(pod, ranks, requests.gpu_bytes)
    host = state if train.offload else []
    if not pod.gpus:
        parts = [*host, *parts, batch]
        return [Demand("train", HOST, _times(parts, ranks), room, remedy)]
    num_gpus = total if is_ahead else processes.total // processes.pod * pod.gpus
    found = [Demand("train", f"each of {num_gpus} GPUs", parts, room, remedy)]
    if train.trainer == "megatron":
        host = [replace(state[0], name="weights on their way to the GPUs")]
    whole = (
        "lower `rollout.prompts_per_iteration`, or take a smaller model or a profile with more "
        "memory"
    )
    room = pod.memory_bytes - ranks * PROGRAM_BYTES
    return [*found, Demand("train", HOST, _times([*host, batch], ranks), room, whole)]


def judge(
    config: Config, shape: ModelShape, requests: PodRequests
) -> tuple[list[Demand], list[str], list[str]]:
    """Return all demands, faults and warnings: faults of the trainer, and what does not fit.

    Demands on GPUs are estimates, within a few per cent of measured peaks, so they only warn.
    Demands on the host are faults: the kernel kills a process over its pod's limit without a
    message.
    """
    found = demands(config, shape, requests)
    tight = [each for each in found if each.fault]
    faults = [each.fault for each in tight if each.device == HOST]
    warnings = [f"{each.fault} (an estimate)" for each in tight if each.device != HOST]
    return found, [*trainer_faults(config, shape), *faults], warnings


def memory_rows(
    config: Config, model_config: Mapping[str, Any], requests: PodRequests
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the memory demands as rows (what, value in Markdown), and warnings.

    `model_config` is the model's config.json; empty if `prepare` did not open the model.

    Raises:
        ConfigError: a stage does not fit, or the trainer cannot shard the model.
    """
    path = config.model.path
    if path and not model_config:
        return [], []
    try:
        shape = shape_of(model_config) if path else find_shape(config)
    except ConfigError as error:
        if config.train.trainer == "megatron":
            raise ConfigError(
                f"`train.trainer` must be 'fsdp2' for such a model, got 'megatron': {error}"
            ) from None
        return [("memory", f"not counted: {error}")], []
    found, faults, warnings = judge(config, shape, requests)
    if faults:
        raise ConfigError("; ".join(faults))
    rows = [
        (
            f"- {each.stage} on {each.device}",
            f"{bytes_text(each.num_bytes)} of {bytes_text(each.room_bytes)} at most",
        )
        for each in found
    ]
    return rows, warnings
