"""Parameters of a run: parsing, checks before any request, default names."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planish.base.config import SECTIONS, parse_override, parse_settings, read_toml
from planish.base.errors import ConfigError, PlanishError
from planish.base.telemetry import redact
from planish.models.shapes import known_shape
from planish.run.chain import parse_chain, with_settings
from planish.run.kubeflow import title
from planish.stages.prepare.cluster import PodRequests
from planish.stages.prepare.devices import (
    SMALLEST,
    device_faults,
    device_warnings,
    find_shape,
    judge,
)
from planish.stages.prepare.settings import build_config
from planish.store.sources import parse_source
from planish.submit.local.pipeline import settings
from planish.submit.pipeline import CompiledPipeline


def parse_parameters(
    pairs: Sequence[str], inputs: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Parse `key=value` pairs with the types of a pipeline's public parameters.

    `chain.key=value` sets one key in the JSON of `chain`.
    """
    faults: list[str] = []
    parsed: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if equals and key.startswith("chain."):
            try:
                _, name, setting = parse_override(pair)
                parsed["chain"] = with_settings(parsed.get("chain", ""), **{name: setting})
            except ConfigError as error:
                faults.append(str(error))
        elif not equals or key not in inputs:
            is_setting = key.partition(".")[0] in SECTIONS
            faults.append(
                f"a parameter must read key=value with one of {sorted(inputs)}, got {pair!r}"
                + (f"; a setting is given by {f'-p overrides={pair}'!r}" if is_setting else "")
            )
        elif inputs[key]["parameterType"] == "STRING":
            parsed[key] = value
        elif value.removeprefix("-").isdecimal():
            parsed[key] = int(value)
        else:
            faults.append(f"`{key}` must be an integer, got {value!r}")
    if faults:
        raise ConfigError("; ".join(faults))
    return parsed


def check_root(root: str) -> str:
    """Return the root without a slash at its end; refuse a path of this machine."""
    if "://" not in root:
        raise ConfigError(
            f"the root must be a URI like s3://bucket/prefix, got {root!r}; pods see no folder of "
            "this machine"
        )
    return root.rstrip("/")


def with_data(parameters: Mapping[str, Any], dataset_map: str = "") -> dict[str, Any]:
    """Return run parameters whose overrides contain the column map of the data set."""
    parameters = dict(parameters)
    for name, value in parameters.items():
        if isinstance(value, str) and redact(value) != value:
            raise ConfigError(
                f"`{name}` must hold no token, user or signature, got {redact(value)!r:.300}; give "
                "it to pods by the secret of the store or of the hub"
            )
    for name in ("model", "dataset"):
        if parameters.get(name):
            parse_source(parameters[name], key=name)
    if dataset_map:
        setting = shlex.quote(f"curate.dataset_map={dataset_map}")
        parameters["overrides"] = f"{parameters.get('overrides', '')} {setting}".strip()
    return parameters


def with_local_file(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return run parameters whose overrides contain the settings of a local TOML file.

    Pods cannot read the file. If the path does not exist here, it may be a path in the pods and
    stays.
    """
    path = Path(parameters.get("config", ""))
    if not path.is_file():
        return dict(parameters)
    laid = shlex.join(settings(read_toml(path)))
    return {**parameters, "config": "", "overrides": f"{laid} {parameters.get('overrides', '')}"}


def check_settings(
    parameters: Mapping[str, Any], pipeline: CompiledPipeline, *, asks: bool = True
) -> list[str]:
    """Refuse settings that the pods of a pipeline cannot run; return warnings.

    With `asks` the check reads missing facts from the hub or a store, without downloading a model
    or data set.
    """
    keys = ("preset", "config", "overrides", "model", "dataset", "seed")
    given = {key: parameters.get(key, pipeline.inputs[key]["defaultValue"]) for key in keys}
    requests = PodRequests.parse(pipeline.constants("prepare")["requests"]["constant"])
    if requests.have_gpus and "preset" not in parameters:
        raise ConfigError(
            f"`preset` must be named for pods with GPUs, got none; the default {given['preset']!r} "
            f"is made for a machine without: `-p preset={SMALLEST}` is the smallest for GPUs, and "
            "`-p preset=` takes none below a `config` of yours"
        )
    if not asks and "://" in given["config"] and not given["config"].startswith("file://"):
        return [f"only `prepare` will check the settings: {given['config']!r} was not read"]
    try:
        config = parse_settings(build_config(**{**given, "seed": int(given["seed"])}))
    except (PlanishError, OSError) as error:
        if "://" not in given["config"]:
            raise
        return [f"only `prepare` will check the settings: {error}"]
    if faults := device_faults(config, requests):
        raise ConfigError("; ".join(faults))
    warnings = device_warnings(config, requests)
    path = config.model.path
    if path and not known_shape(path):
        kind = parse_source(path, key="model.path").kind
        if kind == "https" or (kind != "path" and not asks):
            why = "nobody was asked" if not asks else "its archive would have to be fetched whole"
            return [
                *warnings,
                f"only `prepare` will count the memory of the model: {path!r} was not looked at, "
                f"since {why}",
            ]
    try:
        shape = find_shape(config)
    except (PlanishError, OSError) as error:
        # The model may be in a place that only pods can read.
        return [*warnings, f"only `prepare` will count the memory of the model: {error}"]
    _, faults, tight = judge(config, shape, requests)
    if faults:
        raise ConfigError("; ".join(faults))
    return [*warnings, *tight]


def pipeline_root(root: str) -> str:
    """Return the URI for Kubeflow's artifacts of a run, in the bucket of the root."""
    scheme, _, path = root.partition("://")
    return f"s3://{path.partition('/')[0]}/kfp" if scheme == "s3" else ""


def default_experiment(root: str) -> str:
    """Return the default experiment of a run: the first folder of its root, else the bucket."""
    bucket, *folders = root.partition("://")[2].strip("/").split("/")
    return folders[0] if len(folders) > 1 else bucket


def default_name(parameters: Mapping[str, Any], *, recurs: bool = False) -> str:
    """Return the default name of a run; runs of a schedule have no fixed number in the chain."""
    index = parse_chain(parameters.get("chain", "")).index
    place = f"#{index}" if not recurs and index >= 0 else ""
    return title(parameters["root"], parameters["preset"], place)
