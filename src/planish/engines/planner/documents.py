"""Readers of the documents of `planish rollout plan` and `planish rollout profile`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from planish.base.errors import ConfigError
from planish.engines.planner.cli import LARGEST
from planish.engines.planner.deployment import Deployment, Profiles
from planish.engines.planner.gpus import Gpu
from planish.engines.planner.models import MoeModel
from planish.engines.planner.performance import (
    Constants,
    Cost,
    Measured,
    Workload,
    all_reduce,
    attention_core,
)


class _Stored(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class PlannedSizes(_Stored):
    """The sizes of a plan; docs/moe-rollout.md explains their names."""

    attention_gpu: str
    expert_gpu: str
    tp_a: PositiveInt
    tp_e: PositiveInt
    n_a: PositiveInt
    n_e: PositiveInt
    m: PositiveInt
    b_a: PositiveInt


@dataclass(frozen=True, kw_only=True)
class PlannedStage(Measured):
    """A measured stage from which a plan was computed."""

    stage: str
    gpu: str
    tp: int


class PlannedRun(_Stored):
    """The part of a plan's document from which the plan can be computed again."""

    schema_: Literal["rollout-plan/1"] = Field(alias="schema")
    plan: PlannedSizes
    times_s: dict[str, float]
    tokens_per_s: float
    model: MoeModel
    workload: Workload
    constants: Constants
    gpus: dict[str, Gpu]
    profiles: list[PlannedStage]
    verdict: str
    """`disaggregate`, `no clear gain` or `do not disaggregate`."""

    @cached_property
    def deployment(self) -> Deployment:
        """GPUs, ranks and stages."""
        return Deployment(
            model=self.model,
            workload=self.workload,
            constants=self.constants,
            profiles={(one.stage, one.gpu, one.tp): one for one in self.profiles},
            attention_gpu=self.gpus[self.plan.attention_gpu],
            expert_gpu=self.gpus[self.plan.expert_gpu],
            **self.plan.model_dump(include={"tp_a", "tp_e", "n_a", "n_e"}),
        )

    @cached_property
    def cache_seconds(self) -> float:
        """Seconds of attention for one row and one cached token of a layer."""
        gpu = self.gpus[self.plan.attention_gpu]
        return attention_core(self.model, gpu, self.plan.tp_a, 1.0, self.constants)

    @property
    def places(self) -> int:
        """Most requests that are decoded together."""
        return self.plan.n_a * self.plan.m * self.plan.b_a

    @model_validator(mode="after")
    def _fits(self) -> PlannedRun:
        try:
            _ = self.deployment.total(1.0, self.plan.m) / self.times_s["total"]
        except (LookupError, ArithmeticError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        return self


class _ProfiledStage(_Stored):
    stage: Literal["attention", "experts"]
    tp: PositiveInt
    rows: tuple[PositiveFloat, ...] = Field(min_length=2)
    seconds: tuple[PositiveFloat, ...]

    @model_validator(mode="after")
    def _rises(self) -> _ProfiledStage:
        if len(self.rows) != len(self.seconds) or sorted(set(self.rows)) != list(self.rows):
            raise ValueError("rows must rise, with one time each")
        return self


class _ProfiledFrames(_Stored):
    slope: Annotated[float, Field(gt=1e-18, lt=LARGEST)]
    offset: Cost


class _Profile(_Stored):
    model: MoeModel
    gpu: Gpu
    length: float
    stages: list[_ProfiledStage]
    network: _ProfiledFrames | None = None


DocumentT = TypeVar("DocumentT", PlannedRun, _Profile)


def _read(kind: type[DocumentT], path: Path, command: str) -> DocumentT:
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        found = [
            f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}, got {one['input']!r:.60}"
            for one in error.errors()
        ]
        fault = "; ".join(found[:3])
    except OSError as error:
        fault = str(error)
    raise ConfigError(f"{path} must be a file of `{command}`, got {fault}; write it anew")


def read_plan(path: Path) -> PlannedRun:
    """Return the plan of a document; ConfigError if the document has no plan."""
    return _read(PlannedRun, path, "planish rollout plan --json")


def read_profile(
    path: Path, model: MoeModel, length: float, constants: Constants
) -> tuple[Gpu, Constants, Profiles]:
    """Return (measured GPU, constants, stages); stages are smoothed so that more rows never take
    less time.

    The data sheet gives the figures that were not measured: sums over GPUs, norms and the router,
    and the cache of a request with another `length` in tokens than measured. If frames were
    measured, a line through them replaces the network's rate and constants.
    """
    document = _read(_Profile, path, "planish rollout profile")
    gpu = document.gpu
    # The names may differ, e.g. folders; the shapes may not.
    if vars(document.model) | {"name": ""} != vars(model) | {"name": ""}:
        raise ConfigError(
            f"`--profile` must be of the model that is planned, {model.name}, got one of "
            f"{document.model.name} in {path}; measure with `planish rollout profile`"
        )
    if document.network is not None:
        gpu = replace(gpu, network_rate=1 / document.network.slope)
        line = {"network_seconds": document.network.offset, "half_rate_bytes": 0.0}
        constants = replace(constants, **line)
    stages: dict[tuple[str, str, int], Measured] = {}
    for one in document.stages:
        per_row, latency = all_reduce(model.hidden_size, one.tp, gpu, constants)
        if one.stage == "attention":
            sums = 2 if model.shared_size else 1
            per_row, latency = sums * per_row, sums * latency
            per_row += attention_core(model, gpu, one.tp, length - document.length, constants)
        seconds = tuple(itertools.accumulate(one.seconds, max))
        fixed = latency + constants.layer_seconds
        stages[one.stage, gpu.name, one.tp] = Measured(one.rows, seconds, per_row, fixed)
    return gpu, constants, stages
