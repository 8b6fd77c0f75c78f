"""Nested states: tensors by name, other values by path, and which values cannot be stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

from planish.checkpoint.adapters.placement import FlatShard, check_dense, name_of

Path = tuple[Any, ...]
"""Keys and indices from the root."""
_ATOMS = {type(None), bool, int, float, complex, str, bytes}
_KEYS = (str, int, float, bool, type(None), tuple)


def name_of_path(path: Path) -> str:
    """Return the name of a tensor at a path: keys joined by dots, numbers in brackets.

    Example:
        >>> name_of_path(("layers.0", "weight")), name_of_path(("0",)), name_of_path((0,))
        ('layers.0.weight', '0', '[0]')
    """
    return ".".join(part if isinstance(part, str) else f"[{part!r}]" for part in path)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Return the leaves of mappings and lists with their paths; empty containers are leaves."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, (list, tuple)) and has_tensor(value):
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))
    else:
        yield path, value


def has_tensor(value: Any) -> bool:
    """Return whether a tensor or flat shard lies anywhere in a nested value."""
    if isinstance(value, Mapping):
        return any(has_tensor(child) for child in value.values())
    if isinstance(value, (list, tuple)):
        return any(has_tensor(child) for child in value)
    return isinstance(value, (Tensor, FlatShard))


def checked(path: Path, value: Any) -> Any:
    """Return a value as it may be stored: JSON-able, bytes, arrays, dense tensors; nested.

    Raises:
        TypeError: something else is in it (a function, an object, a sparse tensor); the message
            names its place.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, _KEYS):
                _refuse((*path, key), key)
        return {key: checked((*path, key), child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        made = [checked((*path, index), child) for index, child in enumerate(value)]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, Tensor):
        check_dense(_named(path), value)
        name_of(value.dtype, _named(path))
        return value.detach()
    if isinstance(value, bytearray):
        return bytes(value)
    plain = type(value) in _ATOMS or isinstance(value, np.generic)
    if not plain and not (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        _refuse(path, value)
    return value


def _refuse(path: Path, value: Any) -> None:
    raise TypeError(
        f"`{_named(path)}` must be plain data (numbers, text, bytes, arrays, tensors, lists, "
        f"dicts), got {type(value).__name__}; store its parameters, or give it `state_dict` and "
        "`load_state_dict`"
    )


def _named(path: Path) -> str:
    return ".".join(map(str, path))


def unpacked(path: Path, value: Any) -> Any:
    """Return a value with every object that has a `state_dict` replaced by it, checked.

    Raises:
        TypeError: as `checked`.
    """
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return {_STATE: checked(path, value.state_dict())}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, _KEYS):
                _refuse((*path, key), key)
        return {key: unpacked((*path, key), child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        made = [unpacked((*path, index), child) for index, child in enumerate(value)]
        return made if isinstance(value, list) else tuple(made)
    return checked(path, value)


_STATE = "\0state_dict"
"""Key that marks the state of an object; no caller's key begins so."""


def restore(target: Any, saved: Any) -> Any:
    """Put a saved value into a target; objects load their state, containers are filled in place.

    Returns:
        What belongs in the target's place.
    """
    if isinstance(saved, Mapping) and set(saved) == {_STATE}:
        if hasattr(target, "load_state_dict"):
            target.load_state_dict(saved[_STATE])
            return target
        return saved[_STATE]
    if isinstance(target, MutableMapping) and isinstance(saved, Mapping):
        for key, value in saved.items():
            target[key] = restore(target.get(key), value)
        return target
    if isinstance(target, list) and isinstance(saved, list) and len(target) == len(saved):
        target[:] = [restore(old, new) for old, new in zip(target, saved, strict=True)]
        return target
    if isinstance(target, tuple) and isinstance(saved, tuple) and len(target) == len(saved):
        return tuple(restore(old, new) for old, new in zip(target, saved, strict=True))
    if isinstance(target, Tensor) and isinstance(saved, Tensor):
        if (target.shape, target.dtype) != (saved.shape, saved.dtype):
            return saved
        target.detach().copy_(saved)
        return target
    return _without_marks(saved)


def _without_marks(saved: Any) -> Any:
    if isinstance(saved, Mapping):
        if set(saved) == {_STATE}:
            return saved[_STATE]
        return {key: _without_marks(value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(_without_marks(value) for value in saved)
    return saved


def put(container: Any, path: Path, value: Any, restored: Callable[[Any, Any], Any]) -> None:
    """Set the value at a path of nested mappings, making what is missing."""
    for part in path[:-1]:
        if isinstance(container, MutableMapping):
            container = container.setdefault(part, {})
        else:
            container = container[part]
    old = container.get(path[-1]) if isinstance(container, Mapping) else container[path[-1]]
    container[path[-1]] = restored(old, value)
