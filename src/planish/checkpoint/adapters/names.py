"""Canonical names: what a tensor is called whatever wraps its module.

Wrappers (DDP, FSDP1, torch.compile, activation checkpointing) add components to names; they are
left out. Tied weights have one name, the first in the order of the module tree; the others are
aliases of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
"""Components that only wrappers add, wherever they stand."""
_HOLDERS = ("DistributedDataParallel", "DataParallel", "Float16Module", "FullyShardedDataParallel")
"""Classes whose child `module` is the wrapped module."""

_FSDP2 = "torch.distributed.fsdp._fully_shard."
_QUIET = ("torch.distributed.", "torch.nn.utils.")
"""Hooks of these on `state_dict` add no value."""


@dataclass
class NamedTensors:
    """Parameters and saved buffers of a module.

    Example:
        >>> list(named_tensors(nn.Linear(1, 2)).tensors)
        ['weight', 'bias']
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Canonical name -> tensor; tied ones once."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further name of a tied tensor -> its canonical name."""
    alias_tensors: dict[str, Tensor] = field(default_factory=dict)
    """Further name of a tied tensor -> the tensor under that name."""
    extra: dict[str, nn.Module] = field(default_factory=dict)
    """Name -> module with a `get_extra_state` of its own."""

    @property
    def by_id(self) -> dict[int, str]:
        """Identity of a tensor -> its canonical name, tied ones under every identity."""
        found = {id(tensor): self.aliases[name] for name, tensor in self.alias_tensors.items()}
        return found | {id(tensor): name for name, tensor in self.tensors.items()}


def clean(name: str) -> str:
    """Return a name without the components that wrappers add.

    Example:
        >>> clean("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def clean_mapping(named: Mapping[str, Any], framework: str) -> dict[str, Any]:
    """Return a state dict under canonical names.

    Raises:
        ValueError: two names become one.
    """
    strip = framework == "ddp" and all(name.startswith("module.") for name in named)
    found: dict[str, Any] = {}
    for name, value in named.items():
        canonical = clean(name.removeprefix("module.") if strip else name)
        if canonical in found:
            raise ValueError(
                f"names must differ without the prefixes of wrappers, got two `{canonical}`; "
                "rename one of the modules"
            )
        found[canonical] = value
    return found


def named_tensors(module: nn.Module, prefix: str = "") -> NamedTensors:
    """Return the tensors of a module tree that belong to its saved state."""
    _reshard(module)
    found = NamedTensors()
    seen: dict[Any, str] = {}
    for name, tensor in _walk(module, prefix, found.extra):
        place = _place_of(tensor)
        first = seen.setdefault(place, name)
        if first == name:
            found.tensors[name] = tensor
        else:
            found.aliases[name] = first
            found.alias_tensors[name] = tensor
    return found


def _reshard(module: nn.Module) -> None:
    """Let FSDP2 put its shards back where a forward has left copies that it gathered and rounded.

    It does so before every `state_dict`, sending nothing.
    """
    for inner in module.modules():
        for hook in inner._state_dict_pre_hooks.values():
            if str(getattr(hook, "__module__", "")).startswith(_FSDP2):
                hook(inner, "", True)


def own_savers(module: nn.Module) -> list[str]:
    """Return the names of the modules of a tree that may save more than `named_tensors` has.

    Those with a `_save_to_state_dict` of their own, or with hooks on `state_dict`.
    """
    return [name for name, inner in module.named_modules() if _has_own_way(inner)]


def _has_own_way(module: nn.Module) -> bool:
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    own = type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
    return own or not all(str(getattr(h, "__module__", "")).startswith(_QUIET) for h in hooks)


def added_values(module: nn.Module) -> list[str]:
    """Return the names of what `state_dict` of a module has beyond `named_tensors`."""
    if not own_savers(module):
        return []
    held = list(map(clean, module.state_dict(keep_vars=True)))
    named = named_tensors(module)
    known = {*named.tensors, *named.aliases, *named.extra}
    return [name for name in held if not {name, name.removeprefix("module.")} & known]


def _walk(
    module: nn.Module, prefix: str, extra: dict[str, nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    skip = module._non_persistent_buffers_set
    own: dict[str, Any] = {
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
    """Return what is equal for tensors that are the same values in the same memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    dense = local.layout is torch.strided and not local.is_nested and not local.is_meta
    if not dense or not local.numel():
        return id(tensor)
    return (local.data_ptr(), local.dtype, local.shape, local.stride(), tensor.shape)
