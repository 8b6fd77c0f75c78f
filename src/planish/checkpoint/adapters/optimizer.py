"""Optimizers by parameter name: moments, step counters and the options of parameter groups.

A fresh optimizer has no state. Before a load plans its reads, it creates tensors for the states in
the checkpoint. It puts these tensors into the optimizer after all of them are filled, so a failed
load does not change the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from planish.base.errors import LayoutMismatch
from planish.checkpoint.adapters.gathering import OPTIMIZER, Gathering
from planish.checkpoint.adapters.placement import TYPES, place, restore
from planish.checkpoint.format.geometry import Sides
from planish.checkpoint.format.strict_json import Fields, Values

GROUP = "param_group"
"""State key for the number of a parameter's group, used if no rank knows all parameters."""
KERNELS = {"foreach", "fused", "capturable", "differentiable"}
"""Options that choose a kernel, not a result; a load keeps those of the loading optimizer."""


class ParameterSite(Protocol):
    """Place of one parameter's optimizer state in the tensors of a checkpoint."""

    @property
    def fqn(self) -> str:
        """Name of the parameter."""

    @property
    def shape(self) -> Sides:
        """Shape of the whole parameter in a checkpoint."""

    @property
    def scalar_shape(self) -> Sides:
        """Shape in a checkpoint of one number per parameter (`step`); () unless layers are
        stacked.
        """

    def fits(self, shape: Sides) -> bool:
        """Return whether the shape in the checkpoint is that of the whole parameter, up to
        padding.
        """

    def gather(self, gathering: Gathering, key: str, value: Tensor) -> None:
        """Collect a moment or a single number."""

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Return zeros of the parameter's shape and layout."""


Sites = Mapping[int, ParameterSite]
"""`id` of a parameter -> its site; a parameter without a name is absent."""


@dataclass(frozen=True)
class PlainSite:
    """A parameter that is a tensor or a DTensor under its own name."""

    fqn: str
    parameter: Tensor

    @property
    def shape(self) -> Sides:
        """Shape of the whole parameter."""
        return tuple(self.parameter.shape)

    @property
    def scalar_shape(self) -> Sides:
        """(), the shape of a single number."""
        return ()

    def fits(self, shape: Sides) -> bool:
        """Return whether the two shapes are equal."""
        return shape == self.shape

    def gather(self, gathering: Gathering, key: str, value: Tensor) -> None:
        """Collect a moment or a single number."""
        name = f"{self.fqn}.{key}"
        sharded = isinstance(self.parameter, DTensor) and not isinstance(value, DTensor)
        if sharded and value.dim():
            raise TypeError(
                f"`{name}` must be a DTensor as its parameter is one, got a plain tensor of "
                f"{tuple(value.shape)}; nothing says which part of the whole it is"
            )
        gathering.add("optim", name, place(name, value))

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Return zeros like the parameter."""
        return torch.zeros_like(self.parameter, dtype=dtype, requires_grad=False)


def gather_optimizers(gathering: Gathering, optimizers: Sequence[Any], sites: Sites) -> None:
    """Collect the states of torch optimizers; a load creates states that are missing."""
    names, numbers = _gather_states(gathering, optimizers, sites)
    counts = Counter(name for members in names for name in members)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(
            f"a parameter must be in one group of one optimizer, got {twice[:8]} in several; "
            "save such optimizers as roles of their own"
        )
    gathering.share(OPTIMIZER, numbers=numbers)
    gather_groups(gathering, _groups(optimizers), names)

    def finish(values: Values) -> None:
        saved = values.get(OPTIMIZER, {}).get("numbers", {})
        for optimizer in optimizers if saved else ():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                name = gathering.stored.name_of(_site(sites, parameter).fqn)
                if name in saved:
                    optimizer.state[parameter].update(saved[name])

    gathering.after(finish)


def gather_stacked(gathering: Gathering, optimizers: Sequence[Any], sites: Sites) -> None:
    """Collect the state of torch optimizers whose parameters may be layers stacked in one tensor.

    No rank of a pipeline knows all members of a group. Therefore the number of a parameter's group
    is stored beside its state.
    """
    _, numbers = _gather_states(gathering, optimizers, sites)
    for name, values in numbers.items():
        key, value = next(iter(values.items()))
        raise TypeError(
            f"`{name}.{key}` must be a tensor in an optimizer of stacked layers, got "
            f"{type(value).__name__}; use an optimizer whose state is tensors"
        )
    groups = _groups(optimizers)
    gathering.share(OPTIMIZER, options=_all_options(groups))
    kept: list[tuple[Fields, list[tuple[Tensor, str]]]] = []
    for number, group in enumerate(groups):
        kept.append((group, []))
        for parameter in group["params"]:
            site = _site(sites, parameter)
            stored = gathering.stored.find("optim", f"{site.fqn}.{GROUP}")
            if gathering.for_load and stored is None:
                continue
            numbered = torch.tensor(number)
            site.gather(gathering, GROUP, numbered)
            kept[-1][1].append((numbered, site.fqn))

    def finish(values: Values) -> None:
        options = values.get(OPTIMIZER, {}).get("options", [])
        for group, members in kept:
            saved = [options[int(value)] for value, _ in members if int(value) < len(options)]
            _set_options(group, saved, [name for _, name in members])

    gathering.after(finish)


def _groups(optimizers: Sequence[Any]) -> list[Fields]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _gather_states(
    gathering: Gathering, optimizers: Sequence[Any], sites: Sites
) -> tuple[list[list[str]], dict[str, Fields]]:
    """Collect all tensors; return each group's names, and parameter -> its other values."""
    names: list[list[str]] = []
    numbers: dict[str, Fields] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            members = [_site(sites, parameter) for parameter in group["params"]]
            names.append([site.fqn for site in members])
            for parameter, site in zip(group["params"], members, strict=True):
                _gather_state(gathering, optimizer, group, parameter, site, numbers)
    return names, numbers


def gather_groups(
    gathering: Gathering, groups: Sequence[Fields], names: Sequence[Sequence[str]]
) -> None:
    """Collect the options of parameter groups with the names of their members.

    On load a group gets the saved options of its members, also if it has other members than before.
    """
    members = zip(names, _all_options(groups), strict=True)
    gathering.share(OPTIMIZER, groups=[{"params": list(p), "options": o} for p, o in members])

    def finish(values: Values) -> None:
        saved = values.get(OPTIMIZER, {}).get("groups", [])
        found = {name: record["options"] for record in saved for name in record["params"]}
        for group, members in zip(groups, names, strict=True):
            stored = [gathering.stored.name_of(name) for name in members]
            _set_options(group, [found[name] for name in stored if name in found], members)

    gathering.after(finish)


def _all_options(groups: Sequence[Values]) -> list[Fields]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in groups
    ]


def _site(sites: Sites, parameter: Tensor) -> ParameterSite:
    site = sites.get(id(parameter))
    if site is None:
        raise ValueError(
            "every parameter of an optimizer must have a name, got one of shape "
            f"{tuple(parameter.shape)} that the model of the state lacks; give the state the "
            "model, or build the optimizer from `named_parameters()`"
        )
    return site


def _gather_state(
    gathering: Gathering,
    optimizer: Any,
    group: Values,
    parameter: Tensor,
    site: ParameterSite,
    numbers: dict[str, Fields],
) -> None:
    """Collect one parameter's state; a load also collects stored states that it lacks."""
    state = optimizer.state.get(parameter, {})
    is_replaced = gathering.for_load and gathering.stored.is_known
    if is_replaced:
        state = _wanted(gathering, group, parameter, site, state)
    for key, value in state.items():
        if isinstance(value, Tensor):
            site.gather(gathering, key, value)
        else:
            numbers.setdefault(site.fqn, {})[key] = value
    if is_replaced:

        def finish(values: Values) -> None:
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = dict(state)

        gathering.after(finish)


def _wanted(
    gathering: Gathering,
    group: Values,
    parameter: Tensor,
    site: ParameterSite,
    state: Any,
) -> dict[str, Tensor]:
    """Return a tensor for every stored state of a parameter: the present one, or zeros."""
    wanted: dict[str, Tensor] = {}
    # Use torch's order of creation, so that a save after a resume has the plan of the one before.
    for key in sorted(gathering.stored.states_of(site.fqn), key=lambda k: (k != "step", k)):
        spec = gathering.stored.find("optim", f"{site.fqn}.{key}")
        if spec is None or key == GROUP:
            continue
        present = state.get(key)
        if isinstance(present, Tensor):
            wanted[key] = present
            continue
        dtype = TYPES[spec.dtype]
        # A scalar parameter has moments of the same shape as its step counter.
        scalar = spec.shape == site.scalar_shape and (spec.shape != site.shape or key == "step")
        if scalar:
            on_device = group.get("capturable") or group.get("fused")
            device = parameter.device if on_device else torch.device("cpu")
            wanted[key] = torch.zeros((), dtype=dtype, device=device)
        elif site.fits(spec.shape):
            wanted[key] = site.empty(dtype)
        else:
            wanted[key] = torch.zeros(spec.shape, dtype=dtype, device=parameter.device)
    return wanted


def _set_options(group: Fields, found: Sequence[Values], members: Sequence[str]) -> None:
    """Set the options of a group to its members' saved ones; refuse members that differ."""
    if not found:
        return
    first = found[0]
    for other in found[1:]:
        if other is not first and not _equal(other, first):
            raise LayoutMismatch(
                "parameters of one group must have been saved with equal options, got "
                f"different ones among {list(members)[:8]}; divide the group as it was saved"
            )
    for key, value in first.items():
        if key not in KERNELS or key not in group:
            group[key] = restore(group.get(key), value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return set(a) == set(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return bool(a == b)
