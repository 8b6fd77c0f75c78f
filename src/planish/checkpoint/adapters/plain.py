"""Models as modules or as state dicts, for every framework whose tensors carry their own layout.

That is one process, DDP (whole tensors), FSDP2 and tensor parallelism (DTensors), flat ZeRO shards
and FSDP1 (whose parameters are looked up in a table of `fsdp`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from planish.base.errors import LayoutMismatch
from planish.checkpoint.adapters.flat import FlatShard
from planish.checkpoint.adapters.gathering import Gathering, place
from planish.checkpoint.adapters.names import (
    NamedTensors,
    added_values,
    clean,
    clean_mapping,
    named_tensors,
)
from planish.checkpoint.adapters.nested import checked, leaves, name_of_path, put, restore
from planish.checkpoint.adapters.optimizer import PART as OPTIMIZER
from planish.checkpoint.adapters.optimizer import (
    PlainSite,
    Site,
    gather_groups,
    gather_optimizers,
    torch_optimizers,
)

Sites = Callable[[Tensor], Site | None]
"""Parameter -> where its optimizer state lies; None for a parameter without a name."""


def gather_model(gathering: Gathering, model: Any) -> Sites:
    """Collect a model and return where its parameters' optimizer state lies."""
    is_module = isinstance(model, nn.Module)
    if is_module and not added_values(model):
        return _gather_module(gathering, named_tensors(model))
    if hasattr(model, "state_dict") and hasattr(model, "load_state_dict"):
        # The parameters themselves, by which an optimizer knows them.
        held = model.state_dict(keep_vars=True) if is_module else model.state_dict()
        sites = gather_mapping(gathering, "model", held)
        gathering.after(lambda shared, own: model.load_state_dict(held))
        return sites
    return gather_mapping(gathering, "model", model)


def _gather_module(gathering: Gathering, named: NamedTensors) -> Sites:
    for name, tensor in named.tensors.items():
        placed = place(name, tensor)
        if _is_elsewhere(gathering, name):
            gathering.add_alias("model", gathering.stored.aliases[name], placed)
        else:
            gathering.add("model", name, placed)
    gather_ties(gathering, named)
    gather_extra_state(gathering, named.extra)
    return sites_of(named)


def _is_elsewhere(gathering: Gathering, name: str) -> bool:
    """Return whether the checkpoint has a tensor under the name it is tied to only."""
    stored = gathering.stored
    return name in stored.aliases and stored.find("model", name) is None


def gather_ties(gathering: Gathering, named: NamedTensors) -> None:
    """Note which names are tied; a load refuses stored values that differ where weights are tied.

    Raises:
        LayoutMismatch: on load, two stored tensors differ that share memory here.
    """
    if named.aliases and not gathering.for_load:
        gathering.result.facts["aliases"] = dict(named.aliases)
    for alias, name in named.aliases.items():
        if gathering.stored.find("model", alias) is None:
            continue
        tensor = named.alias_tensors[alias]
        second = torch.empty_like(tensor, requires_grad=False)
        gathering.add("model", alias, place(alias, second))
        gathering.after(_comparison(alias, name, second, named.tensors[name]))


def _comparison(alias: str, name: str, second: Tensor, first: Tensor) -> Any:
    def finish(shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        # Shards, not wholes: nothing is sent, and every element is some rank's.
        ours, theirs = place(name, first).data, place(alias, second).data
        if not torch.equal(_bits(ours), _bits(theirs)):
            raise LayoutMismatch(
                f"`{alias}` and `{name}` must be stored with equal values as they are tied here, "
                "got different ones; load into a model whose weights are not tied"
            )

    return finish


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1)


def gather_extra_state(gathering: Gathering, modules: Mapping[str, nn.Module]) -> None:
    """Collect what modules return from `get_extra_state`."""
    if not modules:
        return
    told = {name: checked((name,), module.get_extra_state()) for name, module in modules.items()}
    gathering.share("model", extra_state=told)

    def finish(shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        saved = shared.get("model", {}).get("extra_state", {})
        for name, module in modules.items():
            if name in saved:
                module.set_extra_state(saved[name])

    gathering.after(finish)


def sites_of(named: NamedTensors) -> Sites:
    """Return the sites of named parameters."""
    names = named.by_id

    def site_of(parameter: Tensor) -> Site | None:
        name = names.get(id(parameter))
        return None if name is None else PlainSite(name, parameter)

    return site_of


def gather_mapping(gathering: Gathering, kind: str, value: Any) -> Sites:
    """Collect a state dict, nested or flat, or a list of flat shards."""
    part = OPTIMIZER if kind == "optim" else kind
    if isinstance(value, (list, tuple)) and all(isinstance(v, FlatShard) for v in value):
        for shard in value:
            gathering.add(kind, shard.fqn, place(shard.fqn, shard))
        return lambda parameter: None
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`{part}` must be a module, an optimizer, a state dict or flat shards, got "
            f"{type(value).__name__}"
        )
    found: dict[str, Any] = {}
    rest: list[tuple[tuple[Any, ...], Any]] = []
    for path, leaf in leaves(
        dict(clean_mapping(_text(value), gathering.framework) | _other(value))
    ):
        if isinstance(leaf, nn.Module):
            _refuse_added(name_of_path(path), leaf)
            inner = named_tensors(leaf, prefix=name_of_path(path) + ".")
            _gather_module(gathering, inner)
            found |= inner.tensors
        elif isinstance(leaf, (Tensor, FlatShard)):
            name = leaf.fqn if isinstance(leaf, FlatShard) else name_of_path(path)
            gathering.add(kind, name, place(name, leaf))
            found[name] = leaf
        elif path:
            rest.append((path, checked(path, leaf)))
    gather_rest(gathering, part, value, rest)
    return sites_of(NamedTensors({n: t for n, t in found.items() if isinstance(t, Tensor)}))


def _refuse_added(prefix: str, module: nn.Module) -> None:
    added = [f"`{prefix}.{name}`" for name in added_values(module)]
    if added:
        raise TypeError(
            "a module inside of a mapping must save parameters, buffers and extra state only, got "
            f"{', '.join(added)}; return them from `get_extra_state`, or pass the module as `model`"
        )


def _text(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {key: child for key, child in value.items() if isinstance(key, str)}


def _other(value: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: child for key, child in value.items() if not isinstance(key, str)}


def gather_rest(
    gathering: Gathering, part: str, value: Any, rest: list[tuple[tuple[Any, ...], Any]]
) -> None:
    """Collect the values of a state dict that are no tensors."""
    gathering.share(part, values=[(list(path), leaf) for path, leaf in rest])

    def finish(shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        for path, leaf in shared.get(part, {}).get("values", []):
            if isinstance(value, MutableMapping):
                put(value, (_raw_key(value, path[0]), *path[1:]), leaf, restore)

    gathering.after(finish)


def _raw_key(value: Mapping[Any, Any], key: Any) -> Any:
    """Return under which key a state dict holds a canonical name."""
    if key in value or not isinstance(key, str):
        return key
    matches = [k for k in value if isinstance(k, str) and clean(k).removeprefix("module.") == key]
    return matches[0] if matches else key


def gather_optimizer(gathering: Gathering, optimizer: Any, sites: Sites) -> None:
    """Collect one optimizer, several (list or dict), or an optimizer's state dict."""
    torch_ones = torch_optimizers(optimizer)
    if torch_ones:
        gather_optimizers(gathering, torch_ones, _with_own_names(torch_ones, sites))
        return
    if hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict"):
        held = optimizer.state_dict()
        gather_mapping(gathering, "optim", held)
        gathering.after(lambda shared, own: optimizer.load_state_dict(held))
        return
    if isinstance(optimizer, Mapping):
        optimizer = _without_groups(gathering, optimizer)
    gather_mapping(gathering, "optim", optimizer)


def _without_groups(gathering: Gathering, held: Mapping[str, Any]) -> Mapping[str, Any]:
    """Collect the parameter groups of a state dict by names; returns the rest of it."""
    groups = held.get("param_groups")
    if not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        return held
    gather_groups(gathering, groups, [list(group["params"]) for group in groups])
    if set(held) == {"state", "param_groups"}:
        inner: Mapping[str, Any] = held["state"]
        return inner
    return {key: value for key, value in held.items() if key != "param_groups"}


def _is_group(group: Any) -> bool:
    members = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(members, (list, tuple)) and all(isinstance(name, str) for name in members)


def _with_own_names(optimizers: list[Any], sites: Sites) -> Sites:
    """Return sites that also know the names an optimizer was built with."""
    names = {
        id(parameter): clean(name)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }

    def site_of(parameter: Tensor) -> Site | None:
        site = sites(parameter)
        if site is None and id(parameter) in names:
            return PlainSite(names[id(parameter)], parameter)
        return site

    return site_of
