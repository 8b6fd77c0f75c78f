"""Check that the settings fit the pods of a profile: devices, processes, memory of each device."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from planish.base.config import nearest, parse_section
from planish.base.errors import ConfigError
from planish.base.parallel import grid_fault, num_trainers, package_fault
from planish.base.text import bytes_text
from planish.engines import APART
from planish.models.config import ModelConfig
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
    parts: tuple[MemoryPart, ...]
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
    settings = parse_section(ModelConfig, config["model"], section="model")
    if not settings.path:
        return built_shape(settings)
    known = None if (Path(settings.path) / "config.json").is_file() else known_shape(settings.path)
    if known:
        return known
    source = parse_source(settings.path, key="model.path")
    return shape_of(read_config(open_folder(source, key="model.path", revision=settings.revision)))


def device_faults(config: Config, requests: PodRequests) -> list[str]:
    """Return faults of settings that do not match the devices of the pods.

    Outside a cluster all stages run on this machine, so missing packages are faults too. In a
    cluster each stage checks its own image, which has other packages than that of `prepare`.
    """
    faults = []
    if not requests.num_nodes:
        engine = config["engine"]
        faults += [
            package_fault("train.trainer", config["train"]["trainer"]),
            package_fault("engine.name", engine.get("name", "")),
            package_fault("engine.transport", engine.get("transport", "")),
        ]
    if requests.have_gpus and not config["model"]["path"]:
        faults.append(
            "`model.path` must name a model in pods with GPUs, got none; what is built from "
            f"scratch is for a machine without: take a preset for GPUs, {SMALLEST!r} is the "
            "smallest, or give a model by `model`"
        )
    for stage, path in DEVICES.items():
        pod = requests.pod_of(stage)
        section, _, key = path.partition(".")
        seen = config.get(section, {}).get(key, "auto")
        if pod and seen not in ("auto", "cuda" if pod.gpus else "cpu"):
            faults.append(
                f"`{path}` must be 'auto' or {'cuda' if pod.gpus else 'cpu'!r} in {pod}, got "
                f"{seen!r}; change it, or take another profile"
            )
    faults += _rank_faults(config, requests)
    for stage, setting in (("sft", "force"), ("curate", "pass_rate_policy")):
        pod, asked = requests.stages.get(stage), config[stage].get(setting)
        if asked and pod and not pod.gpus and requests.have_gpus:
            faults.append(
                f"`{stage}.{setting}` must be off in a pipeline whose `{stage}` has {pod}, got "
                f"{asked!r}; compile it with GPUs for it (`python -m pipelines.compile "
                "--cold-start`, then `planish submit --pipeline FILE`)"
            )
    ranks, setting = config["engine"].get("tensor_parallel", 1), "`engine.tensor_parallel`"
    if requests.in_turn and config["engine"].get("name") in APART:
        faults.append(
            "a task of several iterations needs its engine in the training processes: "
            f"`engine.name` = {config['engine'].get('name')!r} needs iterations apart (`python -m "
            "pipelines.compile --resident 0`, then `planish submit --pipeline FILE`)"
        )
    if is_ahead(config) and not requests.in_turn:
        faults.append(
            "`rollout.ahead` must be 0 where every stage of an iteration is a task of its own, got "
            "1; run several iterations in one task (`--resident` of `planish run` and of `python "
            "-m pipelines.compile`, as the profiles for GPUs have it)"
        )
    if config["engine"].get("name") in APART:
        ranks = sum(ranks_apart(config))
        setting = "`engine.attention_ranks` + `engine.expert_ranks`"
    for stage in ("rollout", "evaluate"):
        pod = requests.pod_of(stage)
        if pod and pod.gpus and ranks > pod.gpus:
            faults.append(
                f"{setting} must be at most the GPUs of a pod of `{stage}` "
                f"({pod.gpus}), got {ranks}; lower it, or take a profile with more"
            )
    return list(filter(None, faults))


def _rank_faults(config: Config, requests: PodRequests) -> list[str]:
    faults = []
    pod = requests.pod_of("train")
    gpus = pod.gpus if pod else 0
    processes, num_nodes = config["train"]["num_processes"], config["train"]["num_nodes"]
    at_once, _ = requests.moments.get("rollout", (1, {}))
    if config["engine"].get("peers") and at_once > 1:
        faults.append(
            f"a pipeline with `engine.peers` must run one rollout task at a time, got {at_once}; "
            "compile it with one shard (`python -m pipelines.compile --shards 1`), whose attention "
            "ranks all share the experts"
        )
    if gpus and processes not in (0, gpus):
        faults.append(
            f"`train.num_processes` must be 0 or {gpus} in {pod}, got {processes}; 0 is one "
            "for each GPU"
        )
    if num_nodes > 1 and not requests.num_nodes:
        faults.append(
            f"`train.num_nodes` must be 0 or 1 outside a cluster, got {num_nodes}; submit the run "
            "to a cluster, or take `train.num_processes`"
        )
    if gpus and num_nodes > 1 and not requests.has_gang_pods:
        faults.append(
            f"`train.num_nodes` must be 0 or 1 in a profile whose train stage is {pod}, got "
            f"{num_nodes}: it would wait in that pod for others like it; take the profile gpu-4x8 "
            f"or gpu-16x8 with `train.num_nodes={num_nodes}`"
        )
    if pod:
        num_ranks = (processes or max(1, gpus)) * (num_nodes or requests.num_nodes or 1)
        replicas = config["train"].get("replicas", 1)
        ranks = config["engine"].get("tensor_parallel", 1)
        sampling = num_ranks - is_ahead(config) * num_trainers(split_of(config), num_ranks)
        if requests.in_turn and (sampling % ranks or (processes or max(1, gpus)) % ranks):
            faults.append(
                "`engine.tensor_parallel` must divide the training processes of a pod, and of all "
                f"those that sample, in a task of several iterations, got {ranks} for "
                f"{processes or max(1, gpus)} and {sampling}; `train.num_processes` sets them, or "
                "run iterations apart (`--resident 0`)"
            )
        if is_ahead(config):
            split = split_of(config)
            if not num_trainers(split, num_ranks):
                return [
                    *faults,
                    f"`train.split` = {split!r} must divide the number of training processes with "
                    f"`rollout.ahead`, got {num_ranks}; `train.num_processes` sets it, or take "
                    "another split",
                ]
            num_ranks = num_trainers(split, num_ranks)
        if fault := grid_fault(num_ranks, **grid_of(config), replicas=replicas):
            faults.append(fault)
    return faults


def is_ahead(config: Config) -> bool:
    """Return whether some processes sample while the others train."""
    return bool(config["rollout"].get("ahead"))


def split_of(config: Config) -> str:
    """Return the ratio of sampling to training processes, such as `3:1`, for `rollout.ahead`."""
    return str(config["train"].get("split", "3:1"))


def ranks_apart(config: Config) -> tuple[int, int]:
    """Return the numbers of attention and expert ranks of a pod; rank i has device i."""
    engine = memory.settings_of_engine(config)
    return (0, 0) if engine.peers else (engine.attention_ranks, engine.expert_ranks)


def grid_of(config: Config) -> dict[str, int]:
    """Return the degrees of tensor, pipeline, expert and context parallelism of the trainer."""
    keys = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel"}
    keys["cp"] = "context_parallel"
    return {axis: config["train"].get(key, 1) for axis, key in keys.items()}


def trainer_faults(config: Config, shape: ModelShape) -> list[str]:
    """Return the faults that prevent the trainer from sharding this model over its ranks."""
    train, grid = config["train"], grid_of(config)
    parts = grid["tp"]
    heads = shape.num_heads // parts, max(1, shape.num_kv_heads // parts)
    fault = context_fault(shape.family, *heads, grid["cp"], has_windows=shape.has_windows)
    faults = [fault] if fault else []
    if train["trainer"] != "megatron":
        return faults
    counts = {"heads": shape.num_heads, "heads of keys and values": shape.num_kv_heads}
    if not shape.num_experts:
        counts["features between the projections of a layer"] = shape.intermediate_size
    faults += [
        f"`train.tensor_parallel` must divide the {count} {name} of the model, got {parts}"
        for name, count in counts.items()
        if count % parts
    ]
    if shape.layers % grid["pp"]:
        faults.append(
            f"`train.pipeline_parallel` must divide the {shape.layers} layers of the model, got "
            f"{grid['pp']}"
        )
    shares_tokens = train.get("sequence_parallel", False)
    if fault := sharing_fault(
        shape.num_experts, grid["ep"], tensor_parallel=parts, shares_tokens=shares_tokens
    ):
        faults.append(fault)
    if shape.beside_megatron:
        faults.append(
            f"`train.trainer` must be 'fsdp2' for a model with {', '.join(shape.beside_megatron)}, "
            f"got 'megatron', which trains {', '.join(MEGATRON_FAMILIES)} as published"
        )
    if rank := config["model"].get("lora_rank", 0):
        faults.append(
            f"`model.lora_rank` must be 0 for the trainer 'megatron', got {rank}; "
            "`train.trainer = 'fsdp2'` trains adapters"
        )
    return faults


def device_warnings(config: Config, requests: PodRequests) -> list[str]:
    """Return warnings for settings that work but waste the GPUs of the pods."""
    pod = requests.pod_of("train")
    is_wide = config["train"]["compute_dtype"] == "float32"
    if not (pod and pod.gpus and config["model"]["path"] and is_wide):
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
    num_nodes = config["train"]["num_nodes"] or requests.num_nodes or 1
    in_turn = requests.in_turn and config["engine"].get("name") not in APART
    if in_turn and (pod := requests.pod_of("train")):
        found += _demands_in_turn(config, shape, pod, gpu_bytes, num_nodes)
    elif pod := requests.pod_of("train"):
        found += _train_demands(config, shape, pod, gpu_bytes, num_nodes)
    has_model = bool(config["model"]["path"])
    if (pod := requests.stages.get("sft")) and (config["sft"]["force"] or not has_model):
        parts = memory.cold_start_parts(config, shape, gpu_bytes, on_cpu=not pod.gpus)
        remedy = "lower `sft.traces_per_minibatch` or `sft.max_rows`"
        if has_model:
            remedy += ", or begin with the model as it is (`sft.force=false`)"
        device, room = "one GPU" if pod.gpus else HOST, _room(pod, 1, gpu_bytes)
        found.append(Demand("sft", device, tuple(parts), room, remedy))
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
    name = config["engine"].get("name", "")
    is_apart = name in APART
    attention, experts = ranks_apart(config) if is_apart else (1, 0)
    if not attention:
        return []
    remedy = "take a smaller model, `model.dtype=bfloat16`, or devices with more memory"
    more = f"lower `{stage}.max_rows` or `{stage}.max_response_tokens`, {remedy}"
    parts = memory.engine_parts(config, shape, stage, gpu_bytes, on_cpu=not pod.gpus)
    others, num_frame_bytes = [], 0
    if experts:
        parts.insert(-1, memory.frames_part(config, shape, stage, experts))
        num_frame_bytes = parts[-2].num_bytes
        others.append(memory.expert_rank_part(config, shape))
        others.append(memory.frames_part(config, shape, stage, attention))
    room = room_of_experts = _room(pod, 1 + is_apart * (attention + experts), gpu_bytes)
    if not pod.gpus:
        total = (*_times(parts, attention), *_times(others, experts))
        return [Demand(stage, HOST, total, room, more)]
    if name.startswith("vllm"):
        # The share limits vLLM itself; memory of frames comes on top.
        share = int(memory.memory_share(config) * gpu_bytes)
        room = min(share + num_frame_bytes, max(share, room))
        more = f"raise `engine.memory_share`, lower `{stage}.max_response_tokens`, {remedy}"
    device = f"each of {pod.gpus} GPUs" if pod.gpus > 1 else "a GPU"
    if not experts:
        return [Demand(stage, device, tuple(parts), room, more)]
    remedy = f"raise `engine.expert_ranks`, {remedy}"
    of_experts = f"{_gpus(attention, experts)} of experts"
    return [
        Demand(stage, f"{_gpus(0, attention)} of attention", tuple(parts), room, more),
        Demand(stage, of_experts, tuple(others), room_of_experts, remedy),
    ]


def _gpus(first: int, count: int) -> str:
    """Return the GPUs of `count` ranks in words; rank i of a pod has GPU i."""
    return f"GPU {first}" if count == 1 else f"each of GPUs {first} to {first + count - 1}"


def _demands_in_turn(
    config: Config, shape: ModelShape, pod: Pod, gpu_bytes: int, num_nodes: int
) -> list[Demand]:
    """Return the demands of a device on which engine and trainer work in turn.

    While the engine samples, the trainer keeps weights and moments on the device. While the trainer
    works, vLLM keeps nothing there, and the engine `transformers` keeps its weights. With
    `rollout.ahead`, engine and trainer have separate devices.
    """
    train, *others = _train_demands(config, shape, pod, gpu_bytes, num_nodes)
    ranks = config["train"]["num_processes"] or max(1, pod.gpus)

    def in_turn(count: int) -> list[Demand]:
        engines = _times(list(sampling.parts), count)
        return [replace(train, stage="iterate", parts=(*train.parts, *engines)), *others]

    if is_ahead(config):
        (sampling,) = _engine_demands(config, shape, "rollout", pod, gpu_bytes)
        if pod.gpus:
            return [train, *others, sampling]
        return in_turn(ranks - num_trainers(split_of(config), ranks))
    share = engine_share(config, shape, ranks * num_nodes, gpu_bytes)
    beside = {**config, "engine": {**config["engine"], "memory_share": share}}
    # One vLLM serves rollout and evaluation; an evaluation does not limit its prompts.
    is_both = config["evaluate"]["every"] and config["engine"].get("name") == "vllm"
    section = "evaluate" if is_both else "rollout"
    (sampling,) = _engine_demands(beside, shape, section, pod, gpu_bytes)
    if not pod.gpus:
        return in_turn(ranks)
    apart = "or run iterations apart (`python -m pipelines.compile --resident 0`)"
    if not config["engine"].get("name", "").startswith("vllm"):
        held = _at_rest(config, shape, ranks * num_nodes)
        at_rest = MemoryPart("the trainer at rest", held, "its weights and moments")
        asleep = replace(sampling.parts[0], name="weights of the engine")
        sampling = replace(sampling, parts=(*sampling.parts, at_rest))
        train = replace(train, parts=(*train.parts, asleep))
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
    return min(memory.memory_share(config), max(left, 0.01))


def _at_rest(config: Config, shape: ModelShape, num_ranks: int) -> int:
    """Return the bytes of the trainer's weights and moments on a device; 0 with offload."""
    if config["train"].get("offload"):
        return 0
    weights, moments, _ = memory.state_parts(config, shape, _sharing(config, num_ranks))
    return weights.num_bytes + moments.num_bytes


def _sharing(config: Config, num_ranks: int) -> Sharing:
    train = config["train"]
    if train["trainer"] != "megatron":
        ranks = max(1, num_ranks // train.get("replicas", 1))
        return Sharing(ranks, ranks, gathers=num_ranks > 1 or train.get("offload", False))
    # Each data-parallel rank of Megatron has a copy.
    grid = grid_of(config)
    return Sharing(grid["tp"] * grid["pp"], grid["ep"] * grid["pp"], gathers=False)


def _times(parts: list[MemoryPart], ranks: int) -> list[MemoryPart]:
    if ranks == 1:
        return parts
    return [MemoryPart(p.name, p.num_bytes * ranks, f"{p.how} x {ranks}") for p in parts]


def _train_demands(
    config: Config, shape: ModelShape, pod: Pod, gpu_bytes: int, num_nodes: int
) -> list[Demand]:
    """Return the demands of a training step: of each device of `num_nodes` pods, and of a host."""
    train = config["train"]
    ranks = train["num_processes"] or max(1, pod.gpus)
    is_long = train["tokens_per_microbatch"] < memory.tokens_of_rank(config)
    steps = [
        *["set `train.activation_checkpointing=true`"] * (not train["activation_checkpointing"]),
        *["lower `train.replicas`"] * (train.get("replicas", 1) > 1),
        *["set `train.offload=true`"] * (train["trainer"] == "fsdp2" and not train.get("offload")),
        "lower `train.tokens_per_microbatch` and `rollout.max_response_tokens`",
        *["raise `train.context_parallel`"] * is_long,
    ]
    remedy = f"{', '.join(steps)}, or take a smaller model or a profile with more memory"
    total = ranks * num_nodes
    if is_ahead(config):
        # `device_faults` refuses a split that does not divide the processes.
        total = num_trainers(split_of(config), total) or total
        ranks = min(ranks, total)
    sharing = _sharing(config, total)
    parts = memory.train_parts(config, shape, sharing, on_cpu=not pod.gpus)
    room = _room(pod, ranks, gpu_bytes)
    axes = grid_of(config)
    groups = max(1, total // (axes["tp"] * axes["pp"] * axes["cp"]))
    state, batch = memory.state_parts(config, shape, sharing), memory.batch_part(config, groups)
    if not pod.gpus:
        parts = [*state, *parts] if train.get("offload") else parts
        parts = [*parts, batch]
        return [Demand("train", HOST, tuple(_times(parts, ranks)), room, remedy)]
    device = f"each of {total if is_ahead(config) else num_nodes * pod.gpus} GPUs"
    found = [Demand("train", device, tuple(parts), room, remedy)]
    host: list[MemoryPart] = []
    if train.get("offload"):
        host = state
    elif train["trainer"] == "megatron":
        host = [replace(state[0], name="weights on their way to the GPUs")]
    whole = (
        "lower `rollout.prompts_per_iteration`, or take a smaller model or a profile with more "
        "memory"
    )
    room = pod.memory_bytes - ranks * PROGRAM_BYTES
    held = _times([*host, batch], ranks)
    return [*found, Demand("train", HOST, tuple(held), room, whole)]


def memory_faults(
    config: Config, shape: ModelShape, found: Iterable[Demand]
) -> tuple[list[str], list[str]]:
    """Return faults and warnings: faults of the trainer, and demands that do not fit.

    Demands on GPUs are estimates, within a few per cent of measured peaks, so they only warn.
    Demands on the host are faults: the kernel kills a process over its pod's limit without a
    message.
    """
    tight = [each for each in found if each.fault]
    faults = [each.fault for each in tight if each.device == HOST]
    warnings = [f"{each.fault} (an estimate)" for each in tight if each.device != HOST]
    return [*trainer_faults(config, shape), *faults], warnings


def memory_rows(
    config: Config, model_config: Mapping[str, Any], requests: PodRequests
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the memory demands as rows (what, value in Markdown), and warnings.

    `model_config` is the model's config.json; empty if `prepare` did not open the model.

    Raises:
        ConfigError: a stage does not fit, or the trainer cannot shard the model.
    """
    if config["model"]["path"] and not model_config:
        return [], []
    try:
        shape = shape_of(model_config) if config["model"]["path"] else find_shape(config)
    except ConfigError as error:
        if config["train"]["trainer"] == "megatron":
            raise ConfigError(
                f"`train.trainer` must be 'fsdp2' for such a model, got 'megatron': {error}"
            ) from None
        return [("memory", f"not counted: {error}")], []
    found = demands(config, shape, requests)
    faults, warnings = memory_faults(config, shape, found)
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
