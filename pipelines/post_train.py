"""The reinforcement-learning run: prepare, curate, sft, iterations, evaluate, next, report.

KFP has no loop of unknown length, so the iterations of one run are unrolled when the pipeline is
compiled, and a longer training is a chain of runs on the same root.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from kfp import dsl, kubernetes

from components import curate, evaluate, next_run, prepare, report, sft
from components.images import (
    CPU_TINY,
    GPU,
    GPU_NODE_LABEL,
    ITERATION_STAGES,
    MODEL_STAGES,
    PROFILES,
    Profile,
    resolve_images,
)
from components.pod_settings import WEBHOOK_ENV, with_pod_settings
from pipelines.compiled import MAX_OBJECT_BYTES, POD_STATUS_BYTES, TASK_BYTES
from pipelines.iteration import add_block, build_iteration
from pipelines.monitor import Monitor
from planish.base.errors import ConfigError

MAX_SHARDS = 32

DEFAULT_PRESET = "dapo-tiny"


def check_profile(profile: Profile) -> None:
    """Refuse what KFP or Argo cannot carry.

    Raises:
        ConfigError: names each limit and its reason.
    """
    faults = []
    size = profile.iterations_per_task
    tasks = profile.num_rollout_tasks + 3
    pods = 2 if size else 1 + 2 * tasks
    each = POD_STATUS_BYTES * pods + TASK_BYTES * (1 if size else tasks + 1)
    most = MAX_OBJECT_BYTES // each * max(1, size)
    per = f"for {size} iterations" if size > 1 else "an iteration"
    if not 1 <= profile.num_iterations <= most:
        faults.append(
            f"`num_iterations` must be 1 to {most}, got {profile.num_iterations}; the workflow "
            f"object of a longer run with {pods} pods {per} outgrows what the cluster "
            "stores (1 MiB): chain several runs instead"
        )
    if size < 0:
        faults.append(
            f"`iterations_per_task` must be 0 (a task for each stage) or more, got {size}"
        )
    if not 1 <= profile.num_shards <= MAX_SHARDS:
        faults.append(
            f"`num_shards` must be 1 to {MAX_SHARDS}, got {profile.num_shards}; every shard adds "
            "pods to one workflow object, and wide loops stall its updates"
        )
    if not 0 <= profile.parallelism <= max(profile.num_shards, 0):
        faults.append(
            f"`parallelism` must be 0 (all shards) to `num_shards` ({profile.num_shards}), got "
            f"{profile.parallelism}; a loop cannot run more tasks than it has"
        )
    if not 1 <= profile.gpu_memory_gb <= 10_000:
        faults.append(
            f"`gpu_memory_gb` must be 1 to 10000, got {profile.gpu_memory_gb}; it is the memory of "
            "one GPU in 10**9 bytes"
        )
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", profile.name):
        faults.append(
            f"a profile name must match [a-z0-9-], got {profile.name!r}; it becomes part of the "
            "pipeline's name"
        )
    if faults:
        raise ConfigError("; ".join(faults))


def profile_named(
    name: str,
    *,
    num_iterations: int | None = None,
    num_shards: int | None = None,
    parallelism: int | None = None,
    iterations_per_task: int | None = None,
    gpu_memory_gb: int = 0,
    cold_start: bool = False,
) -> Profile:
    """Return a profile of the table, with its counts replaced where given.

    Fewer shards lower the parallelism with them unless it is given too. With `cold_start` curate
    and sft have the accelerators of an engine, to measure pass rates and to learn from traces.

    Raises:
        ConfigError: no such profile, or a count outside its limits.
    """
    if name not in PROFILES:
        raise ConfigError(f"a profile must be one of {sorted(PROFILES)}, got {name!r}")
    profile = PROFILES[name]
    shards = profile.num_shards if num_shards is None else num_shards
    if parallelism is None:
        parallelism = profile.parallelism if num_shards is None else shards
    stages = dict(profile.stages)
    if cold_start:
        stages["curate"] = stages["evaluate"]
        # It trains in one process, beside the engine that measures.
        seconds = stages["train"].timeout_seconds
        stages["sft"] = dataclasses.replace(stages["evaluate"], timeout_seconds=seconds)
    profile = dataclasses.replace(
        profile,
        stages=stages,
        num_iterations=profile.num_iterations if num_iterations is None else num_iterations,
        num_shards=shards,
        parallelism=parallelism,
        iterations_per_task=(
            profile.iterations_per_task if iterations_per_task is None else iterations_per_task
        ),
        gpu_memory_gb=gpu_memory_gb or profile.gpu_memory_gb,
    )
    check_profile(profile)
    return profile


def largest_requests(profile: Profile) -> str:
    """Return, as JSON, what the cluster must be able to hold; the prepare stage checks it.

    `pod` is the largest request of a single pod by resource; `total` is the largest sum of pods
    that run at the same time (rollout shards, pods that train together, or one pod); `stages` are
    GPUs and memory of each pod that runs a model (`iterate` in place of `rollout` and `train` where
    one task runs both), and `gpu_bytes` is the memory of one GPU;
    `num_nodes` pods train together, and `rank` is what each of them requests; `moments` are other
    pods that run at the same time, and `gpu_labels` those of nodes for pods with GPUs.
    """
    pod: dict[str, str] = {}
    total: dict[str, str] = {}
    counts = {"rollout": profile.parallelism or profile.num_shards, "train": profile.num_nodes}
    moments: dict[str, Any] = {}
    unused: set[str] = {"iterate"}
    models: tuple[str, ...] = MODEL_STAGES
    if profile.iterations_per_task:
        counts, unused = {"iterate": profile.num_nodes}, {*ITERATION_STAGES}
        models = ("iterate", *(stage for stage in models if stage not in unused))
    for stage, resources in profile.stages.items():
        if stage in unused:
            continue
        count = counts.get(stage, 1)
        gpus = {GPU: str(resources.gpus)} if resources.gpus else {}
        wanted = {"cpu": resources.cpu, "memory": resources.memory, **gpus}
        if stage == "rollout":
            moments[stage] = (count, wanted)
        for name, text in wanted.items():
            if _amount(text) > _amount(pod.get(name, "0")):
                pod[name] = text
            together = count * _amount(text)
            if together > _amount(total.get(name, "0")):
                is_cpu = name == "cpu"
                total[name] = f"{round(together * 1000)}m" if is_cpu else str(int(together))
    stages = {
        stage: {"gpus": profile.stages[stage].gpus, "memory": profile.stages[stage].memory}
        for stage in models
    }
    gpu_bytes = profile.gpu_memory_gb * 10**9
    train = profile.stages["train"]
    rank = {"cpu": train.cpu, "memory": train.memory}
    if train.gpus:
        rank[GPU] = str(train.gpus)
    found = {"pod": pod, "total": total, "stages": stages, "gpu_bytes": gpu_bytes}
    found |= {"num_nodes": profile.num_nodes, "rank": rank, "moments": moments}
    if pod.keys() > {"cpu", "memory"}:
        found["gpu_labels"] = dict([GPU_NODE_LABEL])
    return json.dumps(found, sort_keys=True)


_UNITS = {"m": 1e-3, "": 1.0, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _amount(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+)(m|Ki|Mi|Gi|Ti|)", text)
    if match is None:
        raise ValueError(f"an amount must read like 500m, 2 or 4Gi, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def build_post_train(
    profile: Profile = CPU_TINY,
    *,
    images: Mapping[str, str] | None = None,
    monitor: Monitor | None = None,
    one_machine: bool = False,
) -> Callable[..., Any]:
    """Return the pipeline of one run; call it to run locally, or compile it.

    Args:
        profile: counts, resources, retries.
        images: image name to reference, replacing those of the table.
        monitor: options of a task beside each train task that looks for a faulty machine, and of
            what follows when it has named one; None for no such task.
        one_machine: for the local runner, which runs at the same time only turns of a loop.

    Raises:
        ValueError: a count outside its limits, or an unknown image name.
    """
    check_profile(profile)
    table = resolve_images(images)
    iterations = [
        build_iteration(profile, table, number, monitor, one_machine=one_machine)
        for number in range(1, profile.num_iterations + 1)
        if not profile.iterations_per_task
    ]
    max_restarts = monitor.max_restarts if monitor else 0

    def post_train(
        root: str,
        preset: str = DEFAULT_PRESET,
        config: str = "",
        overrides: str = "",
        model: str = "",
        dataset: str = "",
        seed: int = -1,
        chain: str = "",
    ) -> None:
        settings = {
            "preset": preset,
            "config": config,
            "overrides": overrides,
            "model": model,
            "dataset": dataset,
            "seed": seed,
            "chain": chain,
        }
        in_pod = partial(with_pod_settings, profile=profile, images=table)
        reported = in_pod(report(root=root, max_restarts=max_restarts), "report", is_exit_task=True)
        kubernetes.use_secret_as_env(
            reported, profile.store_secret, dict(WEBHOOK_ENV), optional=True
        )
        with dsl.ExitHandler(reported, name="post-train"):
            _steps(in_pod, root, settings, iterations, monitor, one_machine=one_machine)

    post_train.__doc__ = DESCRIPTION
    decorate = dsl.pipeline(
        name="post-train",
        display_name=f"post-train {profile.name}",
        pipeline_config=dsl.PipelineConfig(
            active_deadline_seconds=profile.deadline_seconds,
            ttl_seconds_after_finished=profile.retention_seconds,
            ttl_seconds_after_success=profile.retention_seconds,
            ttl_seconds_after_failure=profile.retention_seconds,
        ),
    )
    return decorate(post_train)  # type: ignore[no-any-return]


DESCRIPTION = """Post-train a reasoning language model by reinforcement learning.

Fill in three fields: `root`, the folder of the run; `preset`, the algorithm and its sizes; `model`,
what training starts from (empty for a preset that ends with `-tiny`). The rest may stay as it is.
Above them the form asks for three more: an experiment, the service account `planish-runner`, and as
custom pipeline root `kfp` in the bucket of `root`, `s3://bucket/kfp`. The defaults of Kubeflow have
neither the rights of a run nor its bucket.

Args:
    root: URI under which the run lives, `s3://bucket/prefix` or `file:///folder`.
    preset: Name of the shipped configuration to start from.
    config: URI or path of a TOML file laid over the preset, optionally pinned by
        `#sha256=<digest>`; empty for none.
    overrides: Settings laid over both, `section.key=value` separated by spaces.
    model: Model to start from: `owner/name` or `hf://owner/name[@revision]` on the hub,
        `s3://bucket/folder`, `https://...#sha256=<digest>` of a tar archive, or a mounted folder;
        empty for the configured one.
    dataset: Data to train on, JSONL or Parquet: `owner/name` or `hf://owner/name[/file][@revision]`
        on the hub, `s3://bucket/key`, `https://...#sha256=<digest>`, or a mounted file; empty for
        the configured one.
    seed: Seed of every random choice; -1 for the configured one.
    chain: JSON that programs set, `{"index": 0, "runs": 1, "resume_from": "",
        "allow_config_change": false, "assume_autoscaling": false}` or a part of it; empty for a
        single run. Up to `runs` runs on this root follow each other.
"""
"""Docstring of the pipeline: what a person reads beside each field of the run form."""


def _steps(
    in_pod: partial[dsl.PipelineTask],
    root: Any,
    settings: Mapping[str, Any],
    iterations: Sequence[Callable[..., Any]],
    monitor: Monitor | None,
    *,
    one_machine: bool,
) -> None:
    """Wire everything that the exit handler watches; parameters are pipeline channels."""
    profile = in_pod.keywords["profile"]
    max_restarts = monitor.max_restarts if monitor else 0
    prepared = prepare(
        root=root,
        **settings,
        num_iterations=profile.num_iterations,
        num_shards=profile.num_shards,
        requests=largest_requests(profile),
        max_avoided_nodes=max_restarts,
    )
    in_pod(prepared, "prepare")
    if max_restarts:
        in_pod = partial(in_pod, node_affinity=prepared.outputs["node_affinity"])
    of_run = {"root": root, "config_sha256": prepared.outputs["config_sha256"]}
    # A finished run that is submitted again starts no pod below; on one machine that saves little.
    is_open = prepared.outputs["unfinished"] == True  # noqa: E712
    with nullcontext() if one_machine else dsl.If(is_open, name="training"):
        _training(in_pod, prepared, settings, iterations, of_run, monitor)


def _training(
    in_pod: partial[dsl.PipelineTask],
    prepared: dsl.PipelineTask,
    settings: Mapping[str, Any],
    iterations: Sequence[Callable[..., Any]],
    of_run: Mapping[str, Any],
    monitor: Monitor | None,
) -> None:
    """Wire what has work to do while the run is unfinished."""
    profile = in_pod.keywords["profile"]
    curated = in_pod(curate(**of_run), "curate")
    started = in_pod(sft(**of_run, prompts=curated.outputs["prompts"]), "sft")
    pins = started
    if size := profile.iterations_per_task:
        offset = prepared.outputs["offset"]
        for first in range(1, profile.num_iterations + 1, size):
            count = min(size, profile.num_iterations + 1 - first)
            pins = add_block(in_pod, of_run, offset, pins, first, count, monitor)
    for number, iteration in enumerate(iterations, start=1):
        pins = iteration(
            **of_run,
            number=number,
            offset=prepared.outputs["offset"],
            policy_pin=pins.outputs["policy_pin"],
            state_pin=pins.outputs["state_pin"],
            node_affinity=prepared.outputs["node_affinity"],
        ).set_display_name(f"iteration {number}")
    evaluated = evaluate(
        **of_run,
        baseline_pin=started.outputs["policy_pin"],
        policy_pin=pins.outputs["policy_pin"],
    )
    in_pod(evaluated, "evaluate")
    followed = next_run(
        **of_run, chain_index=prepared.outputs["chain_index"], chain=settings["chain"]
    )
    in_pod(followed, "next").after(evaluated)
