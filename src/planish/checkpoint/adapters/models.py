"""Models as modules or state dicts: in one process, DDP, FSDP2, tensor parallel, flat ZeRO shards.

Names are canonical: they lack the components that wrappers (DDP, FSDP1, torch.compile, activation
checkpointing) add. Tied weights have one name, the first in the module tree; others are aliases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planish.base.errors import LayoutMismatch
from planish.checkpoint.adapters.gathering import OPTIMIZER, Gathering, torch_optimizers
from planish.checkpoint.adapters.optimizer import (
    PlainSite,
    Sites,
    gather_groups,
    gather_optimizers,
)
from planish.checkpoint.adapters.placement import (
    FlatShard,
    Leaf,
    leaves,
    name_of_path,
    place,
    put,
    restore,
)
from planish.checkpoint.format.small_objects import encode_extra
from planish.checkpoint.format.strict_json import Fields, Values


def gather_tensors(gathering: Gathering, state: Values) -> None:
    """Collect the tensors of a model and its optimizer."""
    sites: Sites = {}
    if state.get("model") is not None:
        sites = gather_model(gathering, state["model"])
    if state.get("optimizer") is not None:
        gathering.part = "optim"
        gather_optimizer(gathering, state["optimizer"], sites)


def gather_model(gathering: Gathering, model: Any) -> Sites:
    """Collect a model and return the sites of its parameters."""
    is_module = isinstance(model, nn.Module)
    if is_module and not saves_more(model):
        return _gather_module(gathering, named_tensors(model))
    if hasattr(model, "state_dict") and hasattr(model, "load_state_dict"):
        # `keep_vars` returns the parameters themselves, which are the keys of optimizer states.
        held = model.state_dict(keep_vars=True) if is_module else model.state_dict()
        sites = gather_mapping(gathering, "model", held)
        gathering.after(lambda values: model.load_state_dict(held))
        return sites
    return gather_mapping(gathering, "model", model)


def _gather_module(gathering: Gathering, named: NamedTensors) -> Sites:
    for name, tensor in named.tensors.items():
        placed, stored = place(name, tensor), gathering.stored
        if name in stored.aliases and stored.find("model", name) is None:
            # The checkpoint stores this tied tensor under its other name only.
            gathering.add_alias("model", stored.aliases[name], placed)
        else:
            gathering.add("model", name, placed)
    gather_ties(gathering, named)
    gather_extra_state(gathering, named.extra)
    return named.sites


def gather_ties(gathering: Gathering, named: NamedTensors) -> None:
    """Store which names are tied; a load refuses stored values that differ between tied names."""
    if named.aliases and not gathering.for_load:
        gathering.result.facts["aliases"] = dict(named.aliases)
    for alias, name in named.aliases.items():
        if gathering.stored.find("model", alias) is None:
            continue
        tensor = named.alias_tensors[alias]
        second = torch.empty_like(tensor, requires_grad=False)
        gathering.add("model", alias, place(alias, second))
        gathering.after(partial(_refuse_unequal, alias, name, second, named.tensors[name]))


def _refuse_unequal(alias: str, name: str, second: Tensor, first: Tensor, _: Values) -> None:
    # Each rank compares its own shards: together they cover all elements, without messages.
    ours, theirs = (
        tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1)
        for tensor in (place(name, first).data, place(alias, second).data)
    )
    if not torch.equal(ours, theirs):
        raise LayoutMismatch(
            f"`{alias}` and `{name}` must be stored with equal values as they are tied here, "
            "got different ones; load into a model whose weights are not tied"
        )


def gather_extra_state(gathering: Gathering, modules: Mapping[str, nn.Module]) -> None:
    """Collect the results of modules' `get_extra_state`."""
    if not modules:
        return
    if not gathering.for_load:
        values = {name: module.get_extra_state() for name, module in modules.items()}
        gathering.share("model", extra_state=values)

    def finish(values: Values) -> None:
        saved = values.get("model", {}).get("extra_state", {})
        for name, module in modules.items():
            if name in saved:
                module.set_extra_state(saved[name])

    gathering.after(finish)


def gather_mapping(gathering: Gathering, kind: str, value: Any) -> Sites:
    """Collect a state dict, nested or flat, or a list of flat shards."""
    part = OPTIMIZER if kind == "optim" else kind
    if isinstance(value, (list, tuple)) and all(isinstance(v, FlatShard) for v in value):
        for shard in value:
            gathering.add(kind, shard.fqn, place(shard.fqn, shard))
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`{part}` must be a module, an optimizer, a state dict or flat shards, got "
            f"{type(value).__name__}"
        )
    found: Fields = {}
    rest: list[Leaf] = []
    named = {key: child for key, child in value.items() if isinstance(key, str)}
    other = {key: child for key, child in value.items() if not isinstance(key, str)}
    for path, leaf in leaves(clean_mapping(named, gathering.framework) | other):
        if isinstance(leaf, (Tensor, FlatShard)):
            name = leaf.fqn if isinstance(leaf, FlatShard) else name_of_path(path)
            gathering.add(kind, name, place(name, leaf))
            found[name] = leaf
        elif path:
            rest.append((path, leaf))
    gather_rest(gathering, part, value, rest)
    return NamedTensors({n: t for n, t in found.items() if isinstance(t, Tensor)}).sites


def gather_rest(gathering: Gathering, part: str, value: Any, rest: list[Leaf]) -> None:
    """Collect the values of a state dict that are not tensors; an error names the value's path."""
    if not gathering.for_load:
        for path, leaf in rest:
            encode_extra(leaf, place=name_of_path((part, *path)))
    gathering.share(part, values=[(list(path), leaf) for path, leaf in rest])

    def finish(values: Values) -> None:
        for path, leaf in values.get(part, {}).get("values", []):
            if not isinstance(value, MutableMapping):
                return
            key = path[0]
            if key not in value and isinstance(key, str):
                # The state dict may have this canonical name with the components of wrappers.
                held = (k for k in value if isinstance(k, str))
                key = next((k for k in held if clean(k).removeprefix("module.") == key), key)
            put(value, (key, *path[1:]), leaf, restore)

    gathering.after(finish)


def gather_optimizer(gathering: Gathering, optimizer: Any, sites: Sites) -> None:
    """Collect one optimizer, several (list or dict), or an optimizer's state dict."""
    optimizers = torch_optimizers(optimizer)
    if optimizers:
        gather_optimizers(gathering, optimizers, _with_own_names(optimizers, sites))
        return
    if hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict"):
        held = optimizer.state_dict()
        gather_mapping(gathering, "optim", held)
        gathering.after(lambda values: optimizer.load_state_dict(held))
        return
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    if isinstance(groups, list) and all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), (list, tuple))
        and all(isinstance(name, str) for name in group["params"])
        for group in groups
    ):
        gather_groups(gathering, groups, [list(group["params"]) for group in groups])
        if set(optimizer) == {"state", "param_groups"}:
            optimizer = optimizer["state"]
        else:
            optimizer = {k: value for k, value in optimizer.items() if k != "param_groups"}
    gather_mapping(gathering, "optim", optimizer)


def _with_own_names(optimizers: list[Any], sites: Sites) -> Sites:
    """Return sites that also use the names from an optimizer's `named_parameters()`."""
    own = {
        id(parameter): PlainSite(clean(name), parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    return {**own, **sites}


WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
"""Components of names that only wrappers add, at any position."""
_HOLDERS = ("DistributedDataParallel", "DataParallel", "Float16Module", "FullyShardedDataParallel")
"""Classes whose child `module` is the wrapped module."""

_FSDP2 = "torch.distributed.fsdp._fully_shard."
_QUIET = ("torch.distributed.", "torch.nn.utils.")
"""Prefixes of modules whose hooks on `state_dict` add no value."""


@dataclass
class NamedTensors:
    """Parameters and saved buffers of a module."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Canonical name -> tensor; a tied tensor has one entry."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further name of a tied tensor -> its canonical name."""
    alias_tensors: dict[str, Tensor] = field(default_factory=dict)
    """Further name of a tied tensor -> the tensor under that name."""
    extra: dict[str, nn.Module] = field(default_factory=dict)
    """Name -> module with a `get_extra_state` of its own."""

    @property
    def sites(self) -> Sites:
        """Sites of all parameters, for every tensor object of a tied tensor."""
        tied = [(self.aliases[name], tensor) for name, tensor in self.alias_tensors.items()]
        named = [*tied, *self.tensors.items()]
        return {id(tensor): PlainSite(name, tensor) for name, tensor in named}


def clean(name: str) -> str:
    """Return a name without the components that wrappers add."""
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def clean_mapping(named: Values, framework: str) -> Fields:
    """Return a state dict under canonical names."""
    strip = framework == "ddp" and all(name.startswith("module.") for name in named)
    found: Fields = {}
    for name, value in named.items():
        canonical = clean(name.removeprefix("module.") if strip else name)
        if canonical in found:
            raise ValueError(
                f"names must differ without the prefixes of wrappers, got two `{canonical}`; "
                "rename one of the modules"
            )
        found[canonical] = value
    return found


def named_tensors(module: nn.Module) -> NamedTensors:
    """Return the tensors of a module tree that belong to its saved state."""
    # A forward of FSDP2 may leave gathered and rounded copies. Its hooks, which also run before
    # every `state_dict`, put the shards back without messages.
    for inner in module.modules():
        for hook in inner._state_dict_pre_hooks.values():
            if str(getattr(hook, "__module__", "")).startswith(_FSDP2):
                hook(inner, "", True)
    found = NamedTensors()
    seen: dict[Any, str] = {}
    for name, tensor in _walk(module, "", found.extra):
        place = _place_of(tensor)
        first = seen.setdefault(place, name)
        if first == name:
            found.tensors[name] = tensor
        else:
            found.aliases[name] = first
            found.alias_tensors[name] = tensor
    return found


def saves_more(module: nn.Module) -> bool:
    """Return whether `state_dict` of a module has names that `named_tensors` lacks."""
    inner = list(module.modules())
    hooks = chain.from_iterable(
        (*m._state_dict_hooks.values(), *m._state_dict_pre_hooks.values()) for m in inner
    )
    if all(type(m)._save_to_state_dict is nn.Module._save_to_state_dict for m in inner) and all(
        str(getattr(hook, "__module__", "")).startswith(_QUIET) for hook in hooks
    ):
        return False
    named = named_tensors(module)
    known = {*named.tensors, *named.aliases, *named.extra}
    held = map(clean, module.state_dict(keep_vars=True))
    return any(not {name, name.removeprefix("module.")} & known for name in held)


def _walk(
    module: nn.Module, prefix: str, extra: dict[str, nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    skip = module._non_persistent_buffers_set
    own: Fields = {
        **module._parameters,
        **{name: value for name, value in module._buffers.items() if name not in skip},
    }
    for name, value in own.items():
        if value is not None and name != "_flat_param":
            yield f"{prefix}{name}", value
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        extra[f"{prefix}_extra_state"] = module
    for name, child in module._modules.items():
        if child is None:
            continue
        inside = name in WRAPPERS or (name == "module" and type(module).__name__ in _HOLDERS)
        yield from _walk(child, prefix if inside else f"{prefix}{name}.", extra)


def _place_of(tensor: Tensor) -> Any:
    """Return a key that is equal for tied tensors: same memory, type, shape and strides."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    dense = local.layout is torch.strided and not local.is_nested and not local.is_meta
    if not dense or not local.numel():
        return id(tensor)
    return (local.data_ptr(), local.dtype, local.shape, local.stride(), tensor.shape)
