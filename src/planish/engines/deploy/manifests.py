"""`planish rollout manifests`: YAML of the objects that run the ranks of a plan on a cluster.

One pod is one rank, with the GPUs of its role (attention or expert) in the plan. The pods wait for
a coordinator: a rollout task with the settings at the top of the YAML. This module does not render
the pod of that task. A LeaderWorkerSet has groups of one pod, since a rank does not span
machines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from planish.base.errors import ConfigError
from planish.base.parallel import GPU_POD_VARIABLE
from planish.engines.config import EngineConfig
from planish.engines.deploy.connections import TOKEN_ENV
from planish.engines.planner.cli import write_output
from planish.engines.planner.documents import PlannedRun, read_plan

ANY_GPU_NODE = ("nvidia.com/gpu.present", "true")
"""Node label of GPU feature discovery, for clusters with one type of GPU."""

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_IMAGE = re.compile(r"[^\s\"']+")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[KMGT]i)?")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?")


class Role(NamedTuple):
    """The pods of one role (attention or expert), one for each rank."""

    role: str
    name: str
    """Name of the role's service and of its set of pods."""
    replicas: int
    gpus: int
    """GPUs of each pod; 0 for ranks on the CPU."""
    label: tuple[str, str]
    """Label and value of nodes with the plan's type of GPU."""


def manifests(options: argparse.Namespace, _: object) -> Iterator[str]:
    """Render the YAML; yield it or write it into `--out`."""
    planned = read_plan(options.plan)
    text = render(planned, options)
    if options.out is None:
        yield text.rstrip("\n")
        return
    write_output("--out", options.out, text)
    yield f"wrote {options.out}; apply it with `kubectl apply -f {options.out}`"


def render(planned: PlannedRun, options: argparse.Namespace) -> str:
    """Return the YAML of all objects."""
    import jinja2

    check(planned, options)
    one = planned.deployment
    labels = node_labels(planned, options.nodes)
    on_gpu = options.device == "cuda"
    roles = [
        Role(role, f"{options.name}-{role}", replicas, tp if on_gpu else 0, labels[gpu.name])
        for role, replicas, tp, gpu in (
            ("attention", one.n_a, one.tp_a, one.attention_gpu),
            ("expert", one.n_e, one.tp_e, one.expert_gpu),
        )
    ]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("planish.engines.deploy"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template("ranks.yaml.j2").render(
        **vars(options),
        model=" ".join(one.model.name.split()),
        source=" ".join(options.plan.name.split()),
        plan_sha256=hashlib.sha256(options.plan.read_bytes()).hexdigest(),
        settings=engine_settings(planned, options, roles),
        roles=roles,
        token_env=TOKEN_ENV,
        gpu_variable=GPU_POD_VARIABLE,
    )


def check(planned: PlannedRun, options: argparse.Namespace) -> None:
    """Refuse a plan that these ranks cannot run, and options that no cluster accepts."""
    one, faults = planned.deployment, []
    if planned.verdict == "do not disaggregate" and not options.anyway:
        faults.append(
            "the plan must be for disaggregating, got its verdict 'do not disaggregate': take the "
            "engine `vllm`, or say `--anyway`"
        )
    if (one.tp_a, one.tp_e) != (1, 1):
        faults.append(
            f"ranks compute on one GPU each, got {one.tp_a} for attention and {one.tp_e} for "
            "experts: plan with `--tp-a 1 --tp-e 1`"
        )
    if planned.plan.m > 4:
        faults.append(
            f"attention ranks have at most 4 micro-batches, got {planned.plan.m}: plan with "
            "`--micro-batches 3,4`"
        )
    kubernetes_name = "must be a name of Kubernetes of at most 40 characters"
    quantity = "must be a quantity such as 10 or 100Gi"
    for option, form, rule in (
        *((name, _NAME, kubernetes_name) for name in ("name", "namespace", "secret")),
        ("image", _IMAGE, "must be a reference of an image"),
        *((name, _QUANTITY, quantity) for name in ("cpu", "memory", "shared_memory")),
    ):
        given = getattr(options, option)
        if not form.fullmatch(given):
            faults.append(f"`--{option.replace('_', '-')}` {rule}, got {given!r}")
    if faults:
        raise ConfigError("; ".join(faults))


def node_labels(planned: PlannedRun, given: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the node label for each type of GPU of a plan, from the options `--nodes`."""
    used = {planned.deployment.attention_gpu.name, planned.deployment.expert_gpu.name}
    labels = {}
    for word in given:
        gpu, _, label = word.partition(":")
        key, equals, value = label.partition("=")
        if not equals or not all(_LABEL.fullmatch(text) for text in (key, value)):
            raise ConfigError(
                f"`--nodes` must read GPU:LABEL=VALUE such as h100:nvidia.com/gpu.product="
                f"NVIDIA-H100-80GB-HBM3, got {word!r}"
            )
        if gpu not in used:
            raise ConfigError(
                f"`--nodes` must name a type of GPU of the plan, {sorted(used)}, got {gpu!r}"
            )
        labels[gpu] = key, value
    if len(used) > 1 and (used != labels.keys() or len(set(labels.values())) < len(used)):
        raise ConfigError(
            f"`--nodes` must give each of the types {sorted(used)} a label of its nodes, got "
            f"{list(given)}; without them pods of one would come to nodes of the other"
        )
    return {gpu: labels.get(gpu, ANY_GPU_NODE) for gpu in used}


def engine_settings(
    planned: PlannedRun, options: argparse.Namespace, roles: Sequence[Role]
) -> list[str]:
    """Return the TOML settings that make a rollout task the coordinator of these ranks."""
    one = planned.deployment
    local = one.model.num_experts // one.n_e
    settings: dict[str, Any] = {
        "name": options.engine,
        "attention_ranks": one.n_a,
        "expert_ranks": one.n_e,
        "peers": tuple(
            f"{role.name}-{index}.{role.name}.{options.namespace}.svc:{options.port}"
            for role in roles
            for index in range(role.replicas)
        ),
    }
    if options.engine == "disagg":
        settings["micro_batches"] = planned.plan.m
    if planned.workload.redundancy:
        settings["redundant_experts"] = max(1, round(planned.workload.redundancy * local))
    # This raises for settings that the coordinator would refuse.
    EngineConfig(**settings)
    lines = ["[engine]"]
    for key, value in settings.items():
        if key == "peers":
            lines += ["peers = [", *(f"  {json.dumps(peer)}," for peer in value), "]"]
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    return [*lines, "[rollout]", f"max_rows = {planned.places}"]
