"""Transfer of weights from the ranks that train to those that sample, by broadcasts of one group.

All ranks of the trainer gather each tensor, and the first rank sends it, in messages of many
tensors; the other ranks of the group read these in place of files. Both sides derive the same
messages from the names, each of one dtype.

Source: vLLM 0.32, `distributed/weight_transfer/nccl_engine.py`, has the same sender, for
accelerators only; `engines/vllm/weights.py` loads the received tensors layer by layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from planish.engines.weights import Index, Names, WeightSource
from planish.stages.iterate.residents import SummedWeights
from planish.stages.iterate.roles import Roles

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MESSAGE_BYTES = 64 << 20
"""Bytes of tensors after which a message is full."""


def names_to_json(names: Names) -> str:
    """Return names, shapes and types, in their order."""
    return json.dumps([[name, shape, str(dtype)] for name, (shape, dtype) in names.items()])


def names_from_json(text: str) -> Names:
    """Read what `names_to_json` has written."""
    return {
        name: (tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
        for name, shape, dtype in json.loads(text)
    }


def messages(names: Names) -> Iterator[list[str]]:
    """Yield the names of each message: one tensor or more, of one type.

    Example:
        >>> names = {"a": ((2,), torch.float32), "b": ((3,), torch.float32)}
        >>> list(messages({**names, "c": ((2,), torch.bfloat16)}))
        [['a', 'b'], ['c']]
    """
    part: list[str] = []
    size, kind = 0, torch.float32
    for name, (shape, dtype) in names.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if part and (dtype != kind or size + num_bytes > MESSAGE_BYTES):
            yield part
            part, size = [], 0
        part.append(name)
        size, kind = size + num_bytes, dtype
    if part:
        yield part


def send(source: WeightSource, group: ProcessGroup | None, device: torch.device) -> None:
    """Gather all weights and broadcast them; every rank of the trainer calls it.

    The rank that sends passes its `group`, whose tensors lie on `device`. The other ranks of the
    trainer pass None: they take part in the gathering only.
    """
    for part in messages(source.names()):
        tensors = [source.read(name).reshape(-1).to(device) for name in part]
        if group is not None:
            group.broadcast([torch.cat(tensors).view(torch.uint8)]).wait()


class SentWeights(SummedWeights):
    """Weights that `send` broadcasts; each tensor is read once, best in the order of the names."""

    def __init__(self, names: Names, files: WeightSource, roles: Roles) -> None:
        """Receive nothing yet; every rank of this side reads the same tensors in the same order."""
        mine = set(list(names)[roles.mine.rank :: roles.mine.size])
        super().__init__(names, files, roles.mine, mine)
        self._group, self._device = roles.group, roles.device
        self._left = messages(names)
        self._came: dict[str, Tensor] = {}

    def read(self, name: str, index: Index = ()) -> Tensor:
        """Return a box of one tensor; those received before it stay in memory until their read."""
        while name not in self._came:
            self._receive(next(self._left))
        return self._came.pop(name)[index]

    def checksum(self) -> str:
        """Return the checksum of all weights, also of those that nobody has read."""
        for part in self._left:
            self._receive(part)
        return super().checksum()

    def _receive(self, part: Sequence[str]) -> None:
        sizes, kind = [math.prod(self._names[name][0]) for name in part], self._names[part[0]][1]
        message = torch.empty(sum(sizes), dtype=kind, device=self._device)
        self._group.broadcast([message.view(torch.uint8)]).wait()
        pieces = zip(part, torch.split_with_sizes(message, sizes), strict=True)
        came = {name: piece.reshape(self._names[name][0]) for name, piece in pieces}
        self._sum(came)
        self._came |= came
