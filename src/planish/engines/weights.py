"""Sources of weights: tensors by their canonical Hugging Face names, read box by box.

They do not know engines, and they never hold pickled data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from planish.base.errors import EngineError
from planish.records.io import fetch_files
from planish.records.refs import parse_pin

Index = tuple[slice, ...]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Types of weights in safetensors headers."""


class WeightSource(Protocol):
    """Gives parts of tensors by name."""

    def names(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype by canonical name."""

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        """Return the box `index` of tensor `name`; the whole tensor when it is empty."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of names, shapes and dtypes."""


def _fingerprint(names: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    plain = {name: [list(shape), str(dtype)] for name, (shape, dtype) in names.items()}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class DictWeights:
    """Weights in memory.

    Example:
        >>> DictWeights({"w": torch.ones(2)}).read("w").tolist()
        [1.0, 1.0]
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype by name."""
        return {name: (tuple(t.shape), t.dtype) for name, t in self._tensors.items()}

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        """Return a box of one tensor."""
        return self._tensors[name][index]

    @property
    def fingerprint(self) -> str:
        """Hex digest of names, shapes and dtypes."""
        return _fingerprint(self.names())


class FolderWeights:
    """Weights in the `*.safetensors` files of one local folder; files stay mapped, not loaded."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise EngineError(
                f"a folder of weights must hold *.safetensors files, got none in {str(folder)!r}; "
                "the export of this policy is incomplete"
            )
        self.folder = folder
        """Where the files are."""
        self._handles: dict[str, Any] = {}
        self._names: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for path in files:
            handle: Any = safe_open(str(path), framework="pt")
            for name in handle.keys():  # noqa: SIM118 - a handle, not a dictionary
                part = handle.get_slice(name)
                self._names[name] = (tuple(part.get_shape()), _DTYPES[part.get_dtype()])
                self._handles[name] = handle

    def names(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype by name."""
        return dict(self._names)

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        """Return a box of one tensor."""
        handle = self._handles[name]
        tensor: torch.Tensor
        tensor = handle.get_slice(name)[index] if index else handle.get_tensor(name)
        return tensor

    @property
    def fingerprint(self) -> str:
        """Hex digest of names, shapes and dtypes."""
        return _fingerprint(self.names())


def save_weights(source: WeightSource, folder: Path) -> None:
    """Write all tensors of a source into one file of a folder, for processes that read files."""
    from safetensors.torch import save_file

    tensors = {name: source.read(name).contiguous() for name in source.names()}
    save_file(tensors, folder / "model.safetensors")


def open_weights(pin: str) -> FolderWeights:
    """Return the weights of the policy export at the pinned URI `pin`, digests verified."""
    uri, digest = parse_pin(pin)
    return FolderWeights(fetch_files(uri, sha256=digest, schema="policy/1"))
