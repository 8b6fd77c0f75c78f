"""Reads the documents that `planish rollout plan` and `planish rollout profile` have written."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from planish.base.errors import ConfigError
from planish.engines.planner.deployment import Deployment, Profiles, deploy
from planish.engines.planner.gpus import Gpu
from planish.engines.planner.models import MoeModel
from planish.engines.planner.performance import (
    Constants,
    Measured,
    Workload,
    all_reduce,
    attention_core,
)

ShapeT = TypeVar("ShapeT", MoeModel, Workload, Constants, Gpu)


_DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What reading a damaged document may raise."""
PLAN_SCHEMA = "rollout-plan/1"
"""Of the documents of `planish rollout plan --json`."""


@dataclass(frozen=True)
class PlannedRun:
    """A deployment and how the plan uses it."""

    deployment: Deployment
    """GPUs, ranks and stages."""
    workload: Workload
    """Lengths and spread that were planned for."""
    micro_batches: int
    """Of an iteration."""
    rows: int
    """Requests of a micro-batch on one replica, at most."""
    total: float
    """Planned seconds of an iteration."""
    tokens_per_second: float
    """Planned rate."""
    cache_seconds: float
    """Seconds of attention for one row and cached token of a layer."""
    verdict: str
    """`disaggregate`, `no clear gain` or `do not disaggregate`."""

    @property
    def places(self) -> int:
        """Requests that are decoded together at most."""
        return self.deployment.n_a * self.micro_batches * self.rows


def read_plan(path: Path) -> PlannedRun:
    """Return what a document plans.

    Raises:
        ConfigError: no such file, or not such a document.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
        return planned_run(document)
    except _DAMAGED as error:
        raise ConfigError(
            f"{path} must be a file of `planish rollout plan --json`, got "
            f"{type(error).__name__}: {error}; write it anew"
        ) from None


def planned_run(document: dict[str, Any]) -> PlannedRun:
    """Return what a document plans, from its content."""
    if document["schema"] != PLAN_SCHEMA:
        raise ValueError(f"its schema must be {PLAN_SCHEMA!r}, got {document['schema']!r}")
    plan, constants = document["plan"], typed(Constants, document["constants"])
    model, workload = typed(MoeModel, document["model"]), typed(Workload, document["workload"])
    gpus = {name: typed(Gpu, figures) for name, figures in document["gpus"].items()}
    pair = (gpus[plan["attention_gpu"]], gpus[plan["expert_gpu"]])
    profiles = {
        (one["stage"], one["gpu"], one["tp"]): Measured(
            tuple(one["rows"]), tuple(one["measured"]), one["slope"], one["fixed"]
        )
        for one in document["profiles"]
    }
    names = ("tp_a", "tp_e", "n_a", "n_e", "m", "b_a")
    if not all(isinstance(plan[name], int) and plan[name] >= 1 for name in names):
        raise ValueError("sizes of the plan must be positive whole numbers")
    sizes = {name: plan[name] for name in names[:4]}
    return PlannedRun(
        deployment=deploy(model, workload, pair, constants, profiles, **sizes),
        workload=workload,
        micro_batches=plan["m"],
        rows=plan["b_a"],
        total=document["times_s"]["total"],
        tokens_per_second=document["tokens_per_s"],
        cache_seconds=attention_core(model, pair[0], sizes["tp_a"], 1.0, constants),
        verdict=document["verdict"],
    )


def typed(cls: type[ShapeT], values: dict[str, Any]) -> ShapeT:
    """Return a dataclass of numbers and texts from JSON, each of its type.

    Raises:
        ValueError: a number that is none, not finite or not whole; `TypeError` for other names.
    """
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool}
    for one in dataclasses.fields(cls):
        value = values.get(one.name)
        wanted = kinds.get(str(one.type), str)
        usable = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
        if not usable or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"`{one.name}` can not be {value!r}")
    return cls(**values)


def read_profile(
    path: Path, model: MoeModel, length: float, constants: Constants
) -> tuple[Gpu, Profiles]:
    """Return the measured GPU and its stages.

    What was not measured is added from the data sheet: sums over GPUs, norms and the router, and
    the cache of another length.

    Args:
        path: of the file.
        model: which is planned.
        length: cached tokens of a request that are planned for.
        constants: of what is added.

    Raises:
        ConfigError: no such file, another model, or damaged content.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
        measured_model = typed(MoeModel, document["model"])
        gpu = typed(Gpu, document["gpu"])
        stages = {
            (one["stage"], gpu.name, int(one["tp"])): measured(
                one, gpu, model, length - document["length"], constants
            )
            for one in document["stages"]
        }
    except _DAMAGED as error:
        raise ConfigError(
            f"`--profile` must be a file of `planish rollout profile`, got {path}: "
            f"{type(error).__name__}: {error}; measure anew"
        ) from None
    # A name may differ, as that of a folder; the shapes may not.
    if vars(measured_model) | {"name": ""} != vars(model) | {"name": ""}:
        raise ConfigError(
            f"`--profile` must be of the model that is planned, {model.name}, got one of "
            f"{measured_model.name} in {path}; measure with `planish rollout profile`"
        )
    return gpu, stages


def measured(
    one: dict[str, Any], gpu: Gpu, model: MoeModel, longer: float, constants: Constants
) -> Measured:
    """Return one stage of a profile; noise that makes more rows quicker is levelled out."""
    tp = int(one["tp"])
    rows = tuple(float(x) for x in one["rows"])
    seconds = tuple(itertools.accumulate((float(y) for y in one["seconds"]), max))
    if len(rows) < 2 or len(rows) != len(seconds) or sorted(set(rows)) != list(rows):
        raise ValueError("rows must rise, with one time each")
    if rows[0] <= 0 or seconds[0] <= 0 or not math.isfinite(seconds[-1]):
        raise ValueError("rows and seconds must be positive")
    per_row, latency = all_reduce(model.hidden_size, tp, gpu, constants)
    if one["stage"] not in ("attention", "experts"):
        raise ValueError(f"no such stage: {one['stage']!r}")
    if one["stage"] == "attention":
        sums = 2 if model.shared_size else 1
        per_row, latency = sums * per_row, sums * latency
        per_row += attention_core(model, gpu, tp, longer, constants)
    return Measured(rows, seconds, per_row, latency + constants.layer_seconds)
