"""Query of the planner: the checked options of `planish rollout plan`."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from planish.base.errors import ConfigError
from planish.engines.planner.deployment import Profiles
from planish.engines.planner.documents import read_profile
from planish.engines.planner.gpus import Gpu, changed, find_gpus
from planish.engines.planner.models import MoeModel, find_model
from planish.engines.planner.performance import Constants, Workload

Objective = Literal["gpu", "cost", "watt"]
FIGURES: dict[Objective, str] = {"gpu": "flops", "cost": "price", "watt": "watts"}
"""Map from objective to the figure of a GPU that it needs."""
BaselineName = Literal["ideal", "framework"]


@dataclass(frozen=True)
class Space:
    """The deployments that a search tries."""

    tp_attention: tuple[int, ...] = (1, 2, 4, 8)
    tp_experts: tuple[int, ...] = (1, 2, 4, 8)
    replicas: tuple[int, ...] | Literal["balance", "around"] = "around"
    """Numbers of attention replicas. `balance`: the two whole numbers next to the balanced one, at
    which attention and experts take equally long (as in the paper). `around`: also half to twice as
    many, and more as long as the result improves."""
    micro_batches: tuple[int, ...] = (3, 4)
    expert_nodes: tuple[int, ...] = ()
    """Numbers of nodes for the experts of a layer. Empty: one expert on each node, as in the paper;
    for more than 32 experts also the divisors of their number from 8 on."""
    batch: int = 0
    """Number of requests decoded together; 0: as many as fit."""
    slo_seconds: float = math.inf
    """Longest time between two tokens of a response, in seconds."""
    max_gpus: int = 0
    """Most GPUs of a deployment; 0: any number."""


@dataclass(frozen=True)
class Query:
    """Model, workload and GPUs of a plan."""

    model: MoeModel
    attention_gpus: Sequence[Gpu]
    expert_gpus: Sequence[Gpu]
    workload: Workload = field(default_factory=Workload)
    objective: Objective = "gpu"
    """What is maximised: tokens per second per GPU, per price or per watt."""
    space: Space = field(default_factory=Space)
    constants: Constants = field(default_factory=Constants)
    profiles: Profiles = field(default_factory=dict)
    baseline_gpus: Sequence[Gpu] = ()
    """GPU types of the baseline, which is the best colocated deployment on one of them."""
    baseline: BaselineName = "ideal"
    """Name of the baseline: `ideal` or `framework`."""


def read_query(options: argparse.Namespace) -> Query:
    """Return the query that the options describe, or raise ConfigError."""
    if math.inf in (options.input, options.output):
        raise ConfigError("`--input` and `--output` must be finite; give numbers")
    model = find_model(options.model)
    # Upper bounds: all rows go to one node; every node has all experts.
    most = model.num_experts
    if not 1 <= options.imbalance <= most or not 0 <= options.redundancy <= most:
        raise ConfigError(
            f"`--imbalance` must be from 1, and `--redundancy` from 0, to the {most} experts of "
            f"{model.name}, got {options.imbalance:g} and {options.redundancy:g}; correct them"
        )
    workload = Workload(
        options.input, options.output, options.imbalance, options.combine, options.redundancy
    )
    constants = read_constants(options.constant)
    measured: Gpu | None = None
    profiles: Profiles = {}
    if options.profile is not None:
        measured, constants, profiles = read_profile(
            options.profile, model, workload.length, constants
        )

    def gpus(names: str) -> list[Gpu]:
        return changed(find_gpus(names, measured), options.gpu_data)

    attention, experts = gpus(options.attention_gpus), gpus(options.expert_gpus)
    named = {gpu.name: gpu for gpu in (*attention, *experts)}
    if measured is not None and measured.name not in named:
        raise ConfigError(
            f"`--profile` must be of a GPU that is tried, got one of {measured.name} beside "
            f"{', '.join(named)}; add {measured.name} or leave the profile out"
        )
    compared = gpus(options.baseline_gpu) if options.baseline_gpu else list(named.values())
    figure = FIGURES[options.objective]
    if options.baseline_gpu and not all(getattr(gpu, figure) for gpu in compared):
        raise ConfigError(
            f"the objective `{options.objective}` needs the {figure} of the baseline's GPU, "
            f"got none for {compared[0].name}; give yours with `--gpu-data "
            f"{compared[0].name}.{figure}=...`"
        )
    return Query(
        model=model,
        attention_gpus=attention,
        expert_gpus=experts,
        workload=workload,
        objective=options.objective,
        space=Space(
            tp_attention=options.tp_a,
            tp_experts=options.tp_e,
            replicas=options.replicas,
            micro_batches=options.micro_batches,
            expert_nodes=options.expert_nodes,
            batch=options.batch,
            slo_seconds=options.slo_ms / 1000,
            max_gpus=options.max_gpus,
        ),
        constants=constants,
        profiles=profiles,
        baseline_gpus=compared,
        baseline=options.baseline,
    )


def read_constants(changes: Sequence[str]) -> Constants:
    """Return the constants with changes of the form `name=number`, or raise ConfigError."""
    given = {name: text for name, _, text in (change.partition("=") for change in changes)}
    try:
        return TypeAdapter(Constants).validate_strings(given)
    except ValidationError:
        names = ", ".join(one.name for one in dataclasses.fields(Constants))
        raise ConfigError(
            f"`--constant` must be <name>=<number> with a name of {names} and efficiencies in "
            f"(0, 1], got {', '.join(map(repr, changes))}; correct it"
        ) from None
