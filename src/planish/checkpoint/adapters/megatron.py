"""Adapter of Megatron-core: boxes from a module's `sharded_state_dict()`.

Layers stacked in one tensor (a prepended axis) are boxes like any other. Fused tensors (gate and up
of SwiGLU) are factories: the adapter builds their parts before a save or load, and merges them
after a load if they are copies. Megatron's own checkpointing needs an accelerator and gathers.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.base.errors import LayoutMismatch
from planish.checkpoint.adapters.gathering import Gathering, unite
from planish.checkpoint.adapters.models import gather_rest
from planish.checkpoint.adapters.optimizer import ParameterSite, gather_stacked
from planish.checkpoint.adapters.placement import (
    Leaf,
    Path,
    Placed,
    check_dense,
    name_of_path,
    place,
)
from planish.checkpoint.format.geometry import Box, Sides, intersect, shift, whole
from planish.checkpoint.format.small_objects import decode_extra, encode_extra
from planish.checkpoint.format.strict_json import Values

MAX_OBJECT_BYTES = 64 << 20
"""Largest sharded object that a load reads."""


def gather_tensors(gathering: Gathering, state: Values) -> None:
    """Collect a role whose model is Megatron's."""
    sites: dict[int, ParameterSite] = {}
    model = state.get("model")
    is_module = hasattr(model, "sharded_state_dict") or isinstance(model, (list, tuple))
    for chunk in unite([model]) if is_module else [model]:
        module, entries = _entries_of(chunk)
        rest = []
        for path, entry in entries:
            kind = _kind(entry)
            if kind in ("ShardedTensor", "ShardedTensorFactory"):
                site = sites[id(entry.data)] = MegatronSite(entry, gathering)
                for name, placed in site.parts("model", "", entry.data):
                    gathering.add("model", name, placed)
            elif kind == "ShardedObject":
                _gather_object(gathering, module, path, entry)
            elif isinstance(entry, Tensor):
                gathering.add("model", name_of_path(path), place(name_of_path(path), entry))
            elif not kind:
                rest.append((path, entry))
        gather_rest(gathering, "model", chunk, rest)
    optimizer = state.get("optimizer")
    if optimizer is not None:
        gathering.part = "optim"
        chained = unite(getattr(each, "chained_optimizers", [each]) for each in unite([optimizer]))
        gather_stacked(
            gathering,
            [_torch_optimizer(inner) for inner in chained],
            sites,
        )


def _entries_of(chunk: Any) -> tuple[Any, Iterator[Leaf]]:
    """Return the module (None for a state dict) and the leaves of its sharded state dict."""
    if chunk is None:
        return None, iter(())
    if isinstance(chunk, Mapping):
        return None, _flat(chunk)
    holders = ("DistributedDataParallel", "Float16Module")
    while not hasattr(chunk, "sharded_state_dict") or type(chunk).__name__ in holders:
        if not hasattr(chunk, "module"):
            raise TypeError(
                "`model` must have `sharded_state_dict` for framework 'megatron', got "
                f"{type(chunk).__name__}; pass a Megatron module, or its sharded state dict"
            )
        chunk = chunk.module
    return chunk, _flat(chunk.sharded_state_dict())


def _flat(value: Any, path: Path = ()) -> Iterator[Leaf]:
    """Yield paths and leaves of a sharded state dict; lists may contain entries, like dicts."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flat(child, (*path, key))
    elif isinstance(value, (list, tuple)) and any(_kind(child) for child in value):
        for index, child in enumerate(value):
            yield from _flat(child, (*path, index))
    else:
        yield path, value


def _kind(entry: Any) -> str:
    """Return the class name of a sharded entry, `local` for a local object, "" for other values."""
    from megatron.core.dist_checkpointing import mapping

    for name in ("ShardedTensor", "ShardedTensorFactory", "ShardedObject"):
        if isinstance(entry, getattr(mapping, name)):
            return name
    return "local" if isinstance(entry, mapping.LocalNonpersistentObject) else ""


@dataclass(frozen=True)
class MegatronSite:
    """Site of a Megatron parameter: one sharded tensor, or a factory that builds several."""

    entry: Any
    gathering: Gathering

    @property
    def fqn(self) -> str:
        """Name of the parameter's first sharded tensor."""
        return str(self._first.key)

    @property
    def shape(self) -> Sides:
        """Global shape of that tensor."""
        return tuple(self._first.global_shape)

    @property
    def scalar_shape(self) -> Sides:
        """Shape of one number for each stacked layer."""
        return tuple(self._first.global_shape[: self._first.prepend_axis_num])

    @property
    def _first(self) -> Any:
        return self._built(self.entry.data)[0]

    def fits(self, shape: Sides) -> bool:
        """Return whether the shape in the checkpoint is that of the tensor, or may differ by
        padding.
        """
        may_differ = bool(getattr(self.entry, "allow_shape_mismatch", False))
        return shape == self.shape or (may_differ and len(shape) == len(self.shape))

    def gather(self, gathering: Gathering, key: str, value: Tensor) -> None:
        """Collect the parts of a moment, or a number at the place of this parameter's layer."""
        if value.dim() or not self.entry.data.dim():
            for name, placed in self.parts("optim", f".{key}", value):
                gathering.add("optim", f"{name}.{key}", placed)
            return
        check_dense(f"{self.fqn}.{key}", value)
        for name, part in {part.key: part for part in self._built(self.entry.data)}.items():
            axes = part.prepend_axis_num
            box = Box(tuple(part.global_offset[:axes]), (1,) * axes)
            data = value.detach().reshape((1,) * axes)
            placed = Placed(tuple(part.global_shape[:axes]), (box,), data)
            gathering.add("optim", f"{name}.{key}", placed)

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Return zeros like this rank's part of the parameter."""
        return torch.zeros_like(self.entry.data, dtype=dtype, requires_grad=False)

    def parts(self, kind: str, suffix: str, value: Tensor) -> list[tuple[str, Placed]]:
        """Return (key, placed part) of a value of the parameter's local shape."""
        check_dense(f"{self.entry.key}{suffix}", value)
        built = self._built(value.detach())
        found = []
        for part in built:
            found.append((str(part.key), self._fitted(kind, f"{part.key}{suffix}", part)))
        self._merge_after(value, built)
        return found

    def _fitted(self, kind: str, name: str, part: Any) -> Placed:
        """Place a part. If padding may differ, clip the part to the shape in the checkpoint;
        outside of it, a load fills in zeros.
        """
        axes = part.prepend_axis_num
        data = part.data.detach().reshape((1,) * axes + tuple(part.local_shape))
        box = Box(tuple(map(int, part.global_offset)), tuple(data.shape))
        shape = tuple(map(int, part.global_shape))
        placed = Placed(shape, (box,) if data.numel() else (), data)
        stored = self.gathering.stored.find(kind, name)
        if stored is None or not part.allow_shape_mismatch or stored.shape == placed.shape:
            return placed
        if len(stored.shape) != len(placed.shape):
            return placed
        placed, outside = _clipped(placed, stored.shape)

        def finish(values: Values) -> None:
            for rest in outside:
                rest.zero_()

        self.gathering.after(finish)
        return placed

    def _built(self, value: Tensor) -> list[Any]:
        """Return the sharded tensors of a value of the parameter's local shape."""
        if _kind(self.entry) == "ShardedTensor":
            return [replace(self.entry, data=value, dtype=value.dtype)]
        built = replace(self.entry, data=value).build()
        return [part for _, part in _flat(built)]

    def _merge_after(self, value: Tensor, built: Sequence[Any]) -> None:
        """After a load, merge the parts of a factory into `value` if they are copies, not views."""
        if _kind(self.entry) == "ShardedTensor":
            return
        home = value.untyped_storage().data_ptr()
        if all(part.data.untyped_storage().data_ptr() == home for part in built):
            return
        structure = replace(self.entry, data=value).build()

        def finish(values: Values) -> None:
            data = iter([part.data for part in built])
            merged = self.entry.merge_fn(_mapped(structure, lambda _: next(data)))
            value.detach().copy_(merged)

        self.gathering.after(finish)


def _mapped(structure: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(structure, Mapping):
        return {key: _mapped(child, change) for key, child in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [_mapped(child, change) for child in structure]
    return change(structure)


def _clipped(placed: Placed, stored: Sides) -> tuple[Placed, list[Tensor]]:
    """Return the part of a value inside the checkpoint's shape, and the tensors for what lies
    outside.
    """
    kept, outside = placed.data, []
    if not placed.boxes:
        return placed._replace(shape=stored), []
    box = placed.boxes[0]
    inside = intersect(box, whole(stored))
    if inside is None:
        return Placed(stored, (), kept), [kept]
    local = shift(inside, [-offset for offset in box.offsets])
    for dim, (begin, length) in enumerate(zip(local.offsets, local.lengths, strict=True)):
        size = kept.shape[dim]
        outside.append(kept.narrow(dim, begin + length, size - begin - length))
        kept = kept.narrow(dim, begin, length)
    return Placed(stored, (inside,), kept), outside


def _gather_object(gathering: Gathering, module: Any, path: Path, entry: Any) -> None:
    """Collect a sharded object as bytes; an object without data is not saved."""
    place_of = ".".join(map(str, entry.global_offset))
    form = ".".join(map(str, entry.global_shape))
    name = f"{entry.key}/shard_{place_of}_{form}"
    if not gathering.for_load:
        if entry.data is not None:
            held = entry.data.getvalue() if isinstance(entry.data, io.BytesIO) else entry.data
            mark = "bytesio" if isinstance(entry.data, io.BytesIO) else "value"
            raw = encode_extra({mark: held}, place=name)
            data = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
            gathering.add("extra", name, place(name, data))
        return
    spec = gathering.stored.find("extra", name)
    if spec is None or "extra" not in gathering.parts:
        others = [
            n
            for n in gathering.stored.names.get("extra", [])
            if n.startswith(f"{entry.key}/shard_")
        ]
        if others and not any(n.endswith(f"_{form}") for n in others):
            raise LayoutMismatch(
                f"the object `{entry.key}` must be loaded in the shards it was saved in, wanted "
                f"`{name}`, got {others[:4]}; objects cannot be resharded: load with the layout "
                "that saved them"
            )
        return
    if len(spec.shape) != 1 or spec.shape[0] > MAX_OBJECT_BYTES:
        raise LayoutMismatch(
            f"the object `{name}` must have at most {MAX_OBJECT_BYTES} bytes, got {spec.shape}"
        )
    target = torch.empty(spec.shape, dtype=torch.uint8)
    gathering.add("extra", name, place(name, target))

    def finish(values: Values) -> None:
        record = decode_extra(target.numpy().tobytes())
        value = io.BytesIO(record["bytesio"]) if "bytesio" in record else record["value"]
        entry.data = value
        if module is not None and str(path[-1]).endswith("_extra_state"):
            owner = str(path[-1]).removesuffix("_extra_state").rstrip(".")
            module.get_submodule(owner).set_extra_state(value)

    gathering.after(finish, "extra")


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer over the model's own parameters."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer) or hasattr(optimizer, "float16_groups"):
        raise TypeError(
            "an optimizer of framework 'megatron' must be a torch optimizer over the model's "
            f"parameters, or wrap one, got {type(optimizer).__name__}; pass an optimizer that "
            "shards itself as flat shards of a role of its own (framework 'flat')"
        )
    return inner
