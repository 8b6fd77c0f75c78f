"""Ways to damage a committed checkpoint in memory storage, and targets to load it into."""

import itertools

import numpy as np
import torch

from planish.checkpoint.adapters.placement import TYPES
from planish.checkpoint.format.geometry import whole
from planish.checkpoint.format.items import Collected, LocalItem
from planish.checkpoint.loading.fill import RAW
from planish.checkpoint.loading.reader import Opened
from planish.store import open_store

_numbers = itertools.count()


def fresh():
    """Return the URI of a place in a memory that nobody else uses."""
    return f"mem://damage-{next(_numbers)}/run/step-1"


def keys_of(place, ending=""):
    """Return the keys of a checkpoint's objects, COMMIT included."""
    storage, path = open_store(place.partition("#")[0])
    return [stat.key for stat in storage.list(path) if stat.key.endswith(ending)]


def flip(place, ending, position=-1):
    """Flip one bit of the only object whose key ends so."""
    storage, _ = open_store(place.partition("#")[0])
    (key,) = keys_of(place, ending)
    data = bytearray(storage.get(key, 1 << 30)[0])
    data[position] ^= 4
    storage.put(key, bytes(data))


def truncate(place, ending, size):
    """Cut the only object whose key ends so."""
    storage, _ = open_store(place.partition("#")[0])
    (key,) = keys_of(place, ending)
    storage.put(key, storage.get(key, 1 << 30)[0][:size])


def remove(place, ending):
    """Delete the only object whose key ends so."""
    storage, _ = open_store(place.partition("#")[0])
    storage.delete(keys_of(place, ending))


def zeros_for(opened: Opened, *, parts=("model", "optim")):
    """Return items of ones for every whole tensor of a checkpoint."""
    table = opened.metadata.tensors
    specs = [table.spec(row) for row in range(len(table))]
    return [
        LocalItem(s, (whole(s.shape),), torch.ones(s.shape).to(TYPES[s.dtype]))
        for s in specs
        if s.kind in parts
    ]


def raw_of(item):
    """Return the elements of an item's data as unsigned integers."""
    size = item.data.element_size()
    flat = item.data.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(RAW[size]).reshape(tuple(item.data.shape))


def assert_holds(items, tensors):
    """Check that every item holds the raw elements of its tensor."""
    for item in items:
        assert np.array_equal(raw_of(item), tensors[item.tensor]), item.tensor.fqn


def untouched(items):
    """Return whether every item still holds the ones of `zeros_for`."""
    return all(bool((item.data == 1).all()) for item in items)


def collected(items):
    """Return items as one role's findings."""
    return {"main": Collected(list(items))}
