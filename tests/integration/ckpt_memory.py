"""States of one process, saved by the engine into memory and loaded from there."""

import dataclasses
import itertools

import torch

from planish.checkpoint.loading.reader import open_state
from tests.integration import ckpt_engine as engine

_numbers = itertools.count()


@dataclasses.dataclass
class Saved:
    place: str

    @property
    def metadata(self):
        return open_state(self.place).metadata

    @property
    def tensors(self):
        """(role, kind, fqn) of all that is stored."""
        return self.metadata.tensor_ids.keys()


def raw(tensor):
    """Return the elements of a tensor in row-major order as bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def save(state, framework):
    place = f"mem://states-{next(_numbers)}/x"
    engine.save(place, state, framework)
    return Saved(place)


def load(saved, state, framework):
    """Fill a state; returns the adapter's report."""
    return engine.load(saved.place, state, framework)[0]
