"""Sources of weights: tensors by their canonical Hugging Face names, read box by box.

A source may have an address, by which another process reads the same weights itself. Sources do not
know engines, and never contain pickled data.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from planish.base.errors import EngineError
from planish.engines.requests import ModelRef
from planish.records.files import POLICY_SCHEMA
from planish.records.io import fetch_files, read_manifest
from planish.records.refs import is_pin, parse_pin

Index = tuple[slice, ...]
Names = dict[str, tuple[tuple[int, ...], torch.dtype]]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Map from type in a safetensors header to the torch type."""


class WeightSource(Protocol):
    """A source that returns parts of tensors by name."""

    address: str = ""
    """Address for `fetch_weights` in another process; "" for weights in memory."""

    def names(self) -> Names:
        """Return name to (shape, dtype), with canonical names."""

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        """Return the box `index` of tensor `name`; the whole tensor if `index` is empty."""


class DictWeights(WeightSource):
    """Weights in memory, which no other process can read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> Names:
        """Return shape and dtype by name."""
        return {name: (tuple(t.shape), t.dtype) for name, t in self._tensors.items()}

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        """Return a box of one tensor."""
        return self._tensors[name][index]


class FolderWeights(WeightSource):
    """Weights in the `*.safetensors` files of one local folder; files stay mapped, not loaded."""

    def __init__(self, folder: Path) -> None:
        """Map the files and read their headers.

        Raises:
            EngineError: there are no files, one is damaged, or a tensor has an unsupported type.
        """
        from safetensors import SafetensorError, safe_open

        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise EngineError(
                f"a folder of weights must hold *.safetensors files, got none in {str(folder)!r}; "
                "the export of this policy is incomplete"
            )
        self.address = str(folder)
        self._handles: dict[str, Any] = {}
        self._names: Names = {}
        for path in files:
            try:
                handle: Any = safe_open(str(path), framework="pt")
            except SafetensorError as error:
                raise EngineError(
                    f"`{path.name}` must be a safetensors file, got {error}; export the policy "
                    "again"
                ) from None
            for name in handle.keys():  # noqa: SIM118 - a handle, not a dictionary
                part = handle.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise EngineError(
                        f"weights must have one of the types {sorted(_DTYPES)}, got "
                        f"{part.get_dtype()} in {name}; export the policy in float32 or bfloat16"
                    )
                self._names[name] = (tuple(part.get_shape()), _DTYPES[part.get_dtype()])
                self._handles[name] = handle

    def names(self) -> Names:
        """Return shape and dtype by name."""
        return dict(self._names)

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        """Return a box of one tensor."""
        handle = self._handles[name]
        tensor: torch.Tensor
        tensor = handle.get_slice(name)[index] if index else handle.get_tensor(name)
        return tensor


HEAD = "lm_head.weight"
"""Name of the LM head in a policy folder."""

_fetched: WeakValueDictionary[str, WeightSource] = WeakValueDictionary()
"""Sources by address, so that this process reads and verifies the same weights only once."""


def offer(source: WeightSource) -> str:
    """Return an address at which `fetch_weights` finds the source, as long as it lives in this
    process.
    """
    address = source.address or f"memory:{id(source)}"
    _fetched[address] = source
    return address


def fetch_weights(address: str) -> WeightSource:
    """Return the weights at an address; all files of a pinned URI are verified on this machine.

    Args:
        address: a pinned URI (all processes of this machine read the store once), a local folder
            (not verified), or an address that `offer` has returned in this process.

    Raises:
        ObjectMissing: there is no finished export.
        RecordError: a file is missing or damaged.
    """
    held = _fetched.get(address)
    if held is not None:
        return held
    if not is_pin(address):
        return FolderWeights(Path(address))
    uri, digest = parse_pin(address)
    weights = FolderWeights(fetch_files(uri, sha256=digest, schema=POLICY_SCHEMA))
    _fetched[address] = weights
    return weights


def without_tied(names: Names, config: Mapping[str, Any]) -> Names:
    """Return the tensors of a policy folder without an LM head that is tied to the embedding."""
    tied = bool(config.get("tie_word_embeddings"))
    return {name: fact for name, fact in names.items() if not (tied and name == HEAD)}


def check_weights(given: Names, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check that names and shapes of weights are those of the served model.

    An LM head that is tied to the embedding is optional.

    Raises:
        EngineError: names or shapes do not fit; the message has the first five.
    """
    faults = [f"{name} is missing" for name in wanted if name not in given]
    others = given.keys() - wanted.keys() - {HEAD}
    faults += [f"{name} is not of this model" for name in others]
    faults += [
        f"{name} has shape {tuple(given[name][0])} in place of {tuple(shape)}"
        for name, shape in wanted.items()
        if name in given and tuple(given[name][0]) != tuple(shape)
    ]
    if faults:
        raise EngineError(
            f"weights must fit the model that was started, got {'; '.join(sorted(faults)[:5])}"
            f" ({len(faults)} in all); export the policy of this run"
        )


def local_policy(model: ModelRef, scratch: ExitStack) -> tuple[Path, int]:
    """Return a policy's local folder, for processes that read files, and its version.

    A policy in memory is saved into a temporary folder of `scratch`.
    """
    if model.folder:
        return Path(model.folder), model.version
    if model.policy is None:
        uri, digest = parse_pin(model.pin)
        manifest = read_manifest(uri, sha256=digest)
        folder = fetch_files(uri, sha256=digest, schema=POLICY_SCHEMA)
        return folder, int(manifest.attributes["policy_version"])
    from planish.models.policy import save_policy

    place = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="planish-")))
    version = int(model.policy.version)
    save_policy(place.as_uri(), model.policy, version=version, parents={}, attributes={})
    return place, version


def address_of(source: WeightSource, scratch: ExitStack) -> str:
    """Return the address of a source; weights in memory are saved into a temporary folder of
    `scratch`.
    """
    if source.address:
        return source.address
    from safetensors.torch import save_file

    folder = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="planish-")))
    tensors = {name: source.read(name).contiguous() for name in source.names()}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)
