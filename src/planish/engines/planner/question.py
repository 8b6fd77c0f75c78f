"""What a user asks of the planner: options of `planish rollout plan`, checked."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

from planish.base.errors import ConfigError
from planish.engines.planner.baseline import BaselineName, ColocatedPlan, baselines
from planish.engines.planner.cli import LARGEST
from planish.engines.planner.deployment import Deployment, Profiles, deploy
from planish.engines.planner.documents import read_profile
from planish.engines.planner.gpus import Gpu, changed, find_gpus
from planish.engines.planner.models import MoeModel, find_model
from planish.engines.planner.performance import Constants, Workload
from planish.engines.planner.search import Objective, Plan, Search, Space, search


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a user asks of the planner."""

    model: MoeModel
    """Shapes."""
    workload: Workload
    """Lengths and spread."""
    attention_gpus: list[Gpu]
    """Types tried for attention."""
    expert_gpus: list[Gpu]
    """Types tried for experts."""
    baseline_gpus: list[Gpu]
    """Types of which the best colocated deployment is the baseline."""
    objective: Objective
    """What is maximised."""
    space: Space
    """What is tried."""
    constants: Constants
    """What data sheets leave out."""
    profiles: Profiles
    """Measured stages."""
    baseline: BaselineName
    """Which calibration the ratio is to."""

    def search(self) -> Search:
        """Evaluate every deployment."""
        return search(
            self.model,
            self.workload,
            self.attention_gpus,
            self.expert_gpus,
            objective=self.objective,
            space=self.space,
            constants=self.constants,
            profiles=self.profiles,
        )

    def colocated(self, name: BaselineName) -> list[ColocatedPlan]:
        """Return every colocated deployment that fits, the best for the objective first."""
        found = [
            one
            for gpu in self.baseline_gpus
            for one in baselines(
                self.model,
                self.workload,
                gpu,
                name=name,
                slo_seconds=self.space.slo_seconds,
                constants=self.constants,
            )
        ]
        return sorted(found, key=lambda one: -value_of(one, self.objective))

    def deployment(self, chosen: Plan) -> Deployment:
        """Return the deployment of a plan, with its stages."""
        table = {gpu.name: gpu for gpu in (*self.attention_gpus, *self.expert_gpus)}
        return deploy(
            self.model,
            self.workload,
            (table[chosen.attention_gpu], table[chosen.expert_gpu]),
            self.constants,
            self.profiles,
            tp_a=chosen.tp_a,
            tp_e=chosen.tp_e,
            n_a=chosen.n_a,
            n_e=chosen.n_e,
        )


def value_of(one: Plan | ColocatedPlan, objective: Objective) -> float:
    """Return tokens per second by the unit of the objective."""
    return {"gpu": one.per_gpu, "cost": one.per_cost, "watt": one.per_watt}[objective]


def read_options(options: argparse.Namespace) -> Asked:
    """Return what the options ask for.

    Raises:
        ConfigError: a value that can not be.
    """
    if math.inf in (options.input, options.output):
        raise ConfigError("`--input` and `--output` must be finite; give numbers")
    model = find_model(options.model)
    # All rows on one node, and every expert on every node, are the most that there can be.
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
        measured, profiles = read_profile(options.profile, model, workload.length, constants)
    attention = changed(find_gpus(options.attention_gpus, measured), options.gpu_data)
    experts = changed(find_gpus(options.expert_gpus, measured), options.gpu_data)
    named = {gpu.name: gpu for gpu in (*attention, *experts)}
    if measured is not None and measured.name not in named:
        raise ConfigError(
            f"`--profile` must be of a GPU that is tried, got one of {measured.name} beside "
            f"{', '.join(named)}; add {measured.name} or leave the profile out"
        )
    compared = list(named.values())
    if options.baseline_gpu:
        compared = changed(find_gpus(options.baseline_gpu, measured), options.gpu_data)
        figure = {"gpu": "flops", "cost": "price", "watt": "watts"}[options.objective]
        if not all(getattr(gpu, figure) for gpu in compared):
            raise ConfigError(
                f"the objective `{options.objective}` needs the {figure} of the baseline's GPU, "
                f"got none for {compared[0].name}; give yours with `--gpu-data "
                f"{compared[0].name}.{figure}=...`"
            )
    return Asked(
        model=model,
        workload=workload,
        attention_gpus=attention,
        expert_gpus=experts,
        baseline_gpus=compared,
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
        baseline=options.baseline,
    )


def read_constants(changes: Sequence[str]) -> Constants:
    """Return the constants with changes of the form `name=number`.

    Raises:
        ConfigError: no such constant, or no number in its range.
    """
    constants = Constants()
    for change in changes:
        name, _, text = change.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        share = name.endswith("_efficiency")
        usable = 0 < value <= 1 if share else 0 <= value < (1 if "reserve" in name else LARGEST)
        if name not in {field.name for field in dataclasses.fields(Constants)} or not usable:
            names = ", ".join(field.name for field in dataclasses.fields(Constants))
            raise ConfigError(
                f"`--constant` must be <name>=<number> with a name of {names} and efficiencies "
                f"in (0, 1], got {change!r}; correct it"
            )
        constants = dataclasses.replace(constants, **{name: value})
    return constants
