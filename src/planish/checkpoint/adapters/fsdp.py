"""FSDP1 with `use_orig_params=True`: each parameter is a row-major range of its flat parameter.

Padding belongs to no parameter and is never stored.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (irregular tensor decomposition).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planish.checkpoint.adapters import models
from planish.checkpoint.adapters.gathering import Gathering
from planish.checkpoint.adapters.models import (
    clean,
    gather_extra_state,
    gather_ties,
    named_tensors,
    own_savers,
    sites_of,
)
from planish.checkpoint.adapters.optimizer import ParameterSite
from planish.checkpoint.adapters.placement import FlatShard, Placed, place, place_flat


@dataclass(frozen=True)
class FlatSite:
    """A parameter of which this rank holds a range."""

    fqn: str
    parameter: Tensor
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def scalar_shape(self) -> tuple[int, ...]:
        """A single number."""
        return ()

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether it is the same."""
        return shape == self.shape

    def gather(self, gathering: Gathering, key: str, value: Tensor) -> None:
        """Collect the range of a moment, or a number as it is."""
        name = f"{self.fqn}.{key}"
        gathering.add("optim", name, self.place(name, value))

    def place(self, name: str, value: Tensor) -> Placed:
        """Return the range of the parameter or of a moment, or a number as it is."""
        if tuple(value.shape) != tuple(self.parameter.shape) or not value.dim():
            return place(name, value)
        zeros = (0,) * len(self.shape)
        data = value.detach().reshape(-1)
        shard = FlatShard(name, self.shape, zeros, self.shape, self.start, self.stop, data)
        return place_flat(name, shard)

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Return zeros for this rank's range."""
        return torch.zeros_like(self.parameter, dtype=dtype, requires_grad=False)


def gather_tensors(gathering: Gathering, state: Mapping[str, Any]) -> None:
    """Collect the tensors of a model under FSDP1 and of its optimizer."""
    models.gather_tensors(gathering, state, gather_fsdp)


def gather_fsdp(gathering: Gathering, model: Any) -> Callable[[Tensor], ParameterSite | None]:
    """Collect a module wrapped by FSDP1 and return where its parameters' state lies.

    Raises:
        TypeError: no module, wrapped with `use_orig_params=False`, or with own ways of saving.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` must be the wrapped module for framework 'fsdp', got {type(model).__name__}"
        )
    savers = [clean(name) for name in own_savers(model)]
    if savers:
        raise TypeError(
            "modules must save parameters, buffers and extra state only for framework 'fsdp', but "
            f"{savers} have a `_save_to_state_dict` of their own or hooks on `state_dict`; use "
            "`get_extra_state`, or framework 'fsdp2'"
        )
    named = named_tensors(model)
    ranges = _ranges(model)
    sites: dict[int, ParameterSite] = {}
    for name, tensor in named.tensors.items():
        if id(tensor) not in ranges:
            gathering.add("model", name, place(name, tensor))
            continue
        site = FlatSite(name, tensor, *ranges[id(tensor)])
        sites[id(tensor)] = site
        gathering.add("model", name, site.place(name, tensor))
    gather_ties(gathering, named)
    gather_extra_state(gathering, named.extra)
    whole = sites_of(named)
    return lambda parameter: sites.get(id(parameter)) or whole(parameter)


def _ranges(model: nn.Module) -> dict[int, tuple[tuple[int, ...], int, int]]:
    """Return shape, first and one past the last element of each sharded parameter, by identity."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = module._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        flat = handle.flat_param
        if flat._params is None:
            raise TypeError(
                "FSDP must be built with use_orig_params=True to be stored, got a flat parameter "
                f"of {len(flat._fqns)} tensors; wrap the module with use_orig_params=True"
            )
        infos = zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True)
        for parameter, shape, info in infos:
            start = info.intra_param_start_idx if info.in_shard else 0
            stop = info.intra_param_end_idx + 1 if info.in_shard else 0
            found[id(parameter)] = (tuple(shape), start, stop)
    return found
