"""One role's state as an adapter gathers it, anew or by the description of an earlier save.

`Gathering` builds items, small values, and what is to be done after a load. It knows no framework:
those are `models` and `megatron`.

A state that has changed in values alone since an earlier save is described by that save. To
describe a tensor costs ten microseconds, to see that its description holds less than one. What
a description depends on is compared at every save: names, identities, types, placements, and where
and how each tensor lies in memory. Values other than tensors are never taken from an earlier save,
and a description refers to no tensor, so that memory that training gives up does not live on here.
A state with anything else in it (hooks of its own on `state_dict`, optimizer state that is neither
a tensor nor constant, Megatron) is described anew each time.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter, eq, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planish.checkpoint.adapters.placement import (
    FlatShard,
    Placed,
    copy_expanded,
    is_expanded,
    name_of,
)
from planish.checkpoint.format.geometry import Box
from planish.checkpoint.format.items import (
    PARTS,
    Collected,
    DescribedItems,
    Finish,
    LocalItem,
    TensorSpec,
)
from planish.checkpoint.format.metafile import Metadata

if TYPE_CHECKING:
    from planish.checkpoint.format.geometry import Box
    from planish.checkpoint.format.items import TensorSpec

OPTIMIZER = "optimizer"
"""Part of a state, and key of its small values."""


class Stored:
    """The tensors of one role in a checkpoint that is about to be loaded.

    Example:
        >>> Stored(None, "main").find("model", "w") is None
        True
    """

    def __init__(
        self, metadata: Metadata | None, role: str, rename: Callable[[str], str] | None = None
    ) -> None:
        """Index one role; None: nothing is known of the checkpoint.

        `rename` turns the name of a parameter or buffer here into the stored one.
        """
        self.is_known = metadata is not None
        self._metadata, self._role, self._rename = metadata, role, rename
        facts = metadata.header.get("facts", {}) if metadata is not None else {}
        mine = facts.get(role, {}) if isinstance(facts, Mapping) else {}
        aliases = mine.get("aliases", {}) if isinstance(mine, Mapping) else {}
        known = isinstance(aliases, Mapping) and rename is None
        self.aliases: dict[str, str] = dict(aliases) if known else {}
        """Further name of a tied tensor -> the name it is stored under."""
        self._states: dict[str, list[str]] | None = None
        """Stored name of a parameter -> keys of its optimizer state; None: not looked up yet."""

    def find(self, kind: str, fqn: str) -> TensorSpec | None:
        """Return a stored tensor, None without it."""
        if self._metadata is None:
            return None
        if kind == "optim":
            parameter, dot, state = fqn.rpartition(".")
            fqn = f"{self.name_of(parameter)}{dot}{state}"
        elif kind == "model":
            fqn = self.name_of(fqn)
        row = self._metadata.tensor_ids.get((self._role, kind, fqn))
        return None if row is None else self._metadata.tensors.spec(row)

    def name_of(self, fqn: str) -> str:
        """Return the stored name of a parameter or buffer."""
        return fqn if self._rename is None else self._rename(fqn)

    def states_of(self, fqn: str) -> list[str]:
        """Return the keys of a parameter's stored optimizer state."""
        if self._states is None:
            self._states = {}
            for name in self.names.get("optim", []):
                parameter, _, key = name.rpartition(".")
                self._states.setdefault(parameter, []).append(key)
        return self._states.get(self.name_of(fqn), [])

    @functools.cached_property
    def names(self) -> dict[str, list[str]]:
        """Kind -> names."""
        found: dict[str, list[str]] = {}
        if self._metadata is not None:
            for role, kind, fqn in self._metadata.tensor_ids:
                if role == self._role:
                    found.setdefault(kind, []).append(fqn)
        return found


_spec = functools.lru_cache(maxsize=1 << 18)(TensorSpec)
# Saves of one state describe the same tensors again and again; equal by identity, too.


class Gathering:
    """Collects one role's state; `result` is what the adapter returns.

    `part` is the one under way: what is to be done after a load belongs to it.
    """

    def __init__(
        self,
        role: str,
        framework: str,
        *,
        for_load: bool,
        metadata: Metadata | None,
        rename: Callable[[str], str] | None = None,
        parts: Collection[str] = PARTS,
    ) -> None:
        """Begin with nothing."""
        self.parts, self.part = parts, "model"
        self.role, self.framework, self.for_load = role, framework, for_load
        self.stored = Stored(metadata if for_load else None, role, rename)
        self._items: list[LocalItem] = []
        self.result = Collected(self._items)
        self._seen: dict[tuple[str, str], list[tuple[Box, ...]]] = {}

    def add(self, kind: str, fqn: str, placed: Placed) -> None:
        """Add a local value.

        Args:
            kind: model, optim or extra.
            fqn: name.
            placed: the value.

        Raises:
            TypeError: its type has no name.
            ValueError: two values of this rank have the same name and place.
        """
        if kind not in self.parts:
            return
        before = self._seen.setdefault((kind, fqn), [])
        if placed.boxes in before:
            raise ValueError(
                f"names of one state must differ, got `{fqn}` twice in its {kind} part; rename "
                "one (nested keys are joined by dots)"
            )
        before.append(placed.boxes)
        data = target = placed.data
        if data.is_conj() or data.is_neg():
            # Its conjugation or sign is still to be taken.
            data = target.resolve_conj().resolve_neg()

            def put(shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
                target.copy_(data)

            self.after(put)
        elif self.for_load and is_expanded(data):
            data = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            self.after(lambda shared, own: copy_expanded(fqn, data, target))
        spec = _spec(self.role, kind, fqn, name_of(data.dtype, fqn), placed.shape)
        self._items.append(LocalItem(spec, placed.boxes, data if placed.boxes else None))

    def add_alias(self, kind: str, fqn: str, placed: Placed) -> None:
        """Add a further place for a stored tensor that is also loaded elsewhere."""
        if kind not in self.parts:
            return
        spec = _spec(self.role, kind, fqn, name_of(placed.data.dtype, fqn), placed.shape)
        self._items.append(LocalItem(spec, placed.boxes, placed.data))

    def after(self, finish: Finish, part: str = "") -> None:
        """Remember what is to be done once items of the part are filled; nothing for a save."""
        if self.for_load and (part or self.part) in self.parts:
            self.result.finish.append(finish)

    def share(self, part: str, **values: Any) -> None:
        """Add small values that all ranks agree on, unless they say nothing; lists go on."""
        said = {name: value for name, value in values.items() if value}
        if not said or self.for_load:
            return
        held = self.result.shared.setdefault(part, {})
        for name, value in said.items():
            held[name] = [*held.get(name, []), *value] if isinstance(value, list) else value


def unite(values: Iterable[Any]) -> list[Any]:
    """Return modules or optimizers as a list, whether given as one, a list or a dict."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Mapping):
            found += list(value.values())
        elif isinstance(value, (list, tuple)):
            found += value
        else:
            found.append(value)
    return found


def torch_optimizers(value: Any) -> list[torch.optim.Optimizer]:
    """Return torch optimizers given as one, a list or a dict, unwrapped; [] for anything else."""
    found = [getattr(one, "optimizer", one) for one in unite([value])]
    return found if all(isinstance(one, torch.optim.Optimizer) for one in found) else []


_OUTLINED = ("plain", "ddp", "fsdp2", "flat")
"""Those whose tensors carry their own layout."""
_DENSE = {Tensor, nn.Parameter}
_TENSORS = {*_DENSE, DTensor}
_CONSTANTS = {type(None), bool, int, str}
_MOST_KNOWN = 16
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


class _Unknown(Exception):
    """Something of which nobody can tell whether it has changed."""


class Outline:
    """What the description of a state depends on; made at each save.

    Example:
        >>> outline({"model": nn.Linear(2, 1)}, "plain").tensors[1].shape
        torch.Size([1])
    """

    def __init__(self, facts: list[object], tensors: list[Tensor]) -> None:
        """Take the names, types and identities, and the tensors in memory in their order."""
        self.facts, self.tensors = facts, tensors
        self.pointers = list(map(Tensor.data_ptr, tensors))


def outline(state: Mapping[str, Any], framework: str) -> Outline | None:
    """Return the outline of one role's tensors; None where it cannot tell all that matters."""
    if framework not in _OUTLINED or isinstance(state.get("random"), Mapping):
        return None
    walk = _Walk()
    try:
        walk.add_model(state.get("model"))
        walk.add_optimizer(state.get("optimizer"))
        return Outline(walk.facts, walk.local())
    except (_Unknown, RuntimeError, NotImplementedError):
        # Also tensors without one place in memory.
        return None


class _Walk:
    """Facts and tensors of what has been walked through so far, in its order."""

    def __init__(self) -> None:
        self.facts: list[object] = []
        self.tensors: list[Tensor | None] = []

    def add_model(self, model: Any) -> None:
        if isinstance(model, nn.Module):
            self._add_module(model)
        else:
            self._add_nested(model)

    def add_optimizer(self, optimizer: Any) -> None:
        found = torch_optimizers(optimizer)
        if not found:
            self._add_nested(optimizer)
            return
        # Its state is named by its parameters.
        facts = self.facts
        facts.extend(map(id, self.tensors))
        for each in found:
            for group in each.param_groups:
                names = group.get("param_names", ())
                facts += (len(group["params"]), len(names), *names)
                facts.extend(map(id, group["params"]))
            for parameter, held in each.state.items():
                if not isinstance(held, dict):
                    raise _Unknown
                facts += (id(parameter), len(held), *held)
                if _TENSORS.issuperset(map(type, held.values())):
                    self.tensors.extend(held.values())
                    continue
                for value in held.values():
                    if isinstance(value, Tensor):
                        facts.append(Tensor)
                        self.tensors.append(value)
                    elif type(value) in _CONSTANTS:
                        facts += (type(value), value)
                    else:
                        raise _Unknown

    def local(self) -> list[Tensor]:
        """Return every tensor as it lies in the memory of this rank."""
        tensors = [tensor for tensor in self.tensors if tensor is not None]
        kinds = list(map(type, tensors))
        self.facts.extend(kinds)
        if _DENSE.issuperset(kinds):
            return tensors
        for number, tensor in enumerate(tensors):
            if type(tensor) not in _DENSE:
                if type(tensor) is not DTensor or type(tensor._local_tensor) not in _DENSE:
                    raise _Unknown
                spec = tensor._spec
                self.facts += (spec, spec.placements, spec.mesh, spec.tensor_meta)
                tensors[number] = tensor._local_tensor
        return tensors

    def _add_module(self, root: nn.Module) -> None:
        facts = self.facts
        found: list[nn.Module | None] = [root]
        for module in found:
            if module is None:
                continue
            kind, skipped = type(module), module._non_persistent_buffers_set
            own, held, inner = module._parameters, module._buffers, module._modules
            if kind._save_to_state_dict is not nn.Module._save_to_state_dict:
                raise _Unknown
            if module._state_dict_hooks or module._state_dict_pre_hooks:
                hooks = *module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()
                # Torch's own hooks on `state_dict` change no value.
                if not all(str(getattr(h, "__module__", "")).startswith("torch.") for h in hooks):
                    raise _Unknown
            if skipped:
                held = {name: value for name, value in held.items() if name not in skipped}
            facts += (kind, len(own), len(held), len(inner), *own, *held, *inner)
            facts.extend(map(id, own.values()))
            facts.extend(map(id, held.values()))
            facts.extend(map(id, inner.values()))
            self.tensors.extend(own.values())
            self.tensors.extend(held.values())
            found.extend(inner.values())

    def _add_nested(self, value: Any) -> None:
        """Add tensors and flat shards in dicts and lists."""
        self.facts.append(type(value))
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif isinstance(value, FlatShard):
            self.facts += (value.fqn, value.global_shape, value.tp_offset, value.tp_shape)
            self.facts += (value.flat_start, value.flat_stop)
            self.tensors.append(value.tensor1d)
        elif isinstance(value, nn.Module):
            self._add_module(value)
        elif type(value) in (dict, OrderedDict):
            self.facts += (len(value), *value, *map(type, value))
            for child in value.values():
                self._add_nested(child)
        elif type(value) in (list, tuple):
            self.facts.append(len(value))
            for child in value:
                self._add_nested(child)
        elif value is not None:
            raise _Unknown


class Description:
    """What a save has said of a state, and the outline for which that is true."""

    def __init__(self, found: Outline, gathered: Collected, sources: list[int]) -> None:
        """Keep what was gathered, but no tensor; see `described`."""
        self.facts, self.pointers = found.facts, found.pointers
        self.shapes = list(map(_shape, found.tensors))
        self.dtypes = list(map(_dtype, found.tensors))
        several = Counter(found.pointers)
        self.strides = {
            number: tensor.stride()
            for number, tensor in enumerate(found.tensors)
            if several[found.pointers[number]] > 1
        }
        """Of tensors that begin at one place: they are tied only as long as these agree."""
        self.specs: list[TensorSpec] = [item.tensor for item in gathered.items]
        self.boxes: list[tuple[Box, ...]] = [item.boxes for item in gathered.items]
        self.sources = sources
        """Of each item: its place among the tensors, -1 where the rank holds nothing."""
        self.views = {
            number: item.data.shape
            for number, (item, source) in enumerate(zip(gathered.items, sources, strict=True))
            if item.data is not None and item.data.shape != self.shapes[source]
        }
        """Item to its shape, where that is not the tensor's."""
        held = gathered.shared.get(OPTIMIZER, {})
        self.names: list[list[str]] = [group["params"] for group in held.get("groups", [])]
        """Of each group of the optimizer: its parameters."""
        self.numbers: dict[str, Any] = held.get("numbers", {})
        """Of the optimizer's state: what is constant."""
        self.noted = gathered.facts

    def fits(self, found: Outline) -> bool:
        """Return whether nothing but values differs."""
        tensors = found.tensors
        return (
            found.pointers == self.pointers
            and found.facts == self.facts
            and all(map(eq, map(_shape, tensors), self.shapes))
            and all(map(is_, map(_dtype, tensors), self.dtypes))
            and all(tensors[number].stride() == one for number, one in self.strides.items())
        )

    def items(self, found: Outline) -> DescribedItems:
        """Return the items of a state that this fits, over its present memory."""
        tensors = found.tensors
        data = [tensors[source] if source >= 0 else None for source in self.sources]
        for number, shape in self.views.items():
            data[number] = tensors[self.sources[number]].detach().view(shape)
        return DescribedItems(self.specs, self.boxes, data)


def described(found: Outline, gathered: Collected) -> Description | None:
    """Return a description for later saves; None if something gathered is not of the outline.

    Args:
        found: of the state.
        gathered: its model and optimizer, and nothing else yet.
    """
    shared = gathered.shared
    if set(shared) - {OPTIMIZER} or set(shared.get(OPTIMIZER, ())) - {"groups", "numbers"}:
        return None
    known = {
        (pointer, tensor.dtype, tensor.numel()): number
        for number, (pointer, tensor) in enumerate(zip(found.pointers, found.tensors, strict=True))
    }
    sources = []
    for item in gathered.items:
        data = item.data
        if data is None:
            sources.append(-1)
            continue
        source = known.get((data.data_ptr(), data.dtype, data.numel()))
        if source is None:
            return None
        whole = found.tensors[source]
        # Two tensors that begin at one place must hold the same elements in one order.
        if data.shape == whole.shape:
            is_same = data.stride() == whole.stride()
        else:
            is_same = data.is_contiguous() and whole.is_contiguous()
        if not is_same:
            return None
        sources.append(source)
    return Description(found, gathered, sources)


class Descriptions:
    """The last descriptions of this process, by what they describe."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[object, ...], Description] = OrderedDict()

    def find(self, key: tuple[object, ...], found: Outline | None) -> Description | None:
        """Return the description that fits a state."""
        known = self._known.get(key)
        if known is None or found is None or not known.fits(found):
            return None
        return known

    def keep(self, key: tuple[object, ...], description: Description | None) -> None:
        """Keep a description in place of the one before."""
        self._known.pop(key, None)
        if description is not None:
            self._known[key] = description
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
