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
