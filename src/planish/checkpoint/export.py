"""From a train state to a Hugging Face folder: regions merged, tensor by tensor, by plain bytes.

Imports neither torch nor transformers, so that the stage that calls it starts at once, and holds
one tensor in memory at a time.
"""

from __future__ import annotations

import json
import math
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planish.checkpoint.folder import StateFolder
from planish.checkpoint.regions import ITEM_BYTES, StoredTensor
from planish.errors import CheckpointError, LayoutMismatch
from planish.records.files import write_files
from planish.records.refs import Ref
from planish.store import open_store

POLICY_SCHEMA = "policy/1"

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_HEADER_LIMIT_BYTES = 100 << 20
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}

Bytes = npt.NDArray[Any]


@dataclass(frozen=True)
class Entry:
    """One tensor inside a safetensors file."""

    dtype: str
    """Key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    """Of the entry."""
    start: int
    """First byte in the file."""


def read_header(data: bytes, *, name: str) -> tuple[int, dict[str, Entry]]:
    """Parse the first bytes of a safetensors file.

    Args:
        data: 8 bytes of length and the header; what follows is ignored.
        name: what to call the file in errors.

    Returns:
        Bytes up to the first tensor, and the entries by name.

    Raises:
        CheckpointError: not safetensors.
    """
    try:
        (length,) = struct.unpack("<Q", data[:8])
        if not 2 <= length <= _HEADER_LIMIT_BYTES:
            raise ValueError(f"a header of {length} bytes")
        raw = json.loads(data[8 : 8 + length])
        start = 8 + length
        entries = {
            key: Entry(value["dtype"], tuple(value["shape"]), start + int(value["data_offsets"][0]))
            for key, value in raw.items()
            if key != "__metadata__"
        }
        unknown = sorted({e.dtype for e in entries.values()} - ITEM_BYTES.keys())
        if unknown:
            raise ValueError(f"types {unknown}")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"`{name}` must be a safetensors file, got {data[:40]!r} ({error})"
        ) from None
    return start, entries


def export(
    pin: str,
    uri: str,
    *,
    source: str,
    parents: Mapping[str, str],
    attributes: Mapping[str, Any],
    max_file_bytes: int,
) -> Ref:
    """Write the policy of a train state to `uri`; see `planish.checkpoint.api.export_hf`."""
    state = StateFolder.open(pin)
    policy = StateFolder.open(source, schema=POLICY_SCHEMA)
    files: dict[str, Path | bytes] = {
        name: policy.read(name) for name in policy.files if not name.endswith(_WEIGHTS)
    }
    wanted = _source_types(policy)
    stored = {
        name.removeprefix("model."): tensor
        for name, tensor in state.index().items()
        if name.startswith("model.")
    }
    _check_names(stored, wanted, uri=state.uri)
    dtypes = {wanted[name].dtype for name in stored}
    facts = {
        **attributes,
        "dtype": _DTYPE_NAMES.get(dtypes.pop(), "mixed") if len(dtypes) == 1 else "mixed",
        "layout": "hf",
    }
    with tempfile.TemporaryDirectory(prefix="planish-export-") as name:
        scratch = Path(name)
        files |= _write_weights(state, stored, wanted, scratch, max_file_bytes)
        return write_files(uri, POLICY_SCHEMA, files, parents=parents, attributes=facts)


def _source_types(policy: StateFolder) -> dict[str, Entry]:
    """Read names, types and shapes from the headers of a policy's weights."""
    store = open_store(policy.uri)
    entries: dict[str, Entry] = {}
    for name in policy.files:
        if not name.endswith(".safetensors"):
            continue
        place = f"{policy.uri}/{name}"
        prefix = store.read(place, 0, 8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        header = store.read(place, 0, 8 + min(length, _HEADER_LIMIT_BYTES))
        entries |= read_header(header, name=place)[1]
    return entries


def _check_names(
    stored: Mapping[str, StoredTensor], wanted: Mapping[str, Entry], *, uri: str
) -> None:
    faults = [f"`{name}` is missing" for name in sorted(wanted.keys() - stored.keys())]
    faults += [
        f"`{name}` is not in the source policy" for name in sorted(stored.keys() - wanted.keys())
    ]
    faults += [
        f"`{name}` must have the shape {list(wanted[name].shape)}, got {list(tensor.shape)}"
        for name, tensor in stored.items()
        if name in wanted and wanted[name].shape != tensor.shape
    ]
    if faults:
        raise LayoutMismatch(
            f"`{uri}` must hold the weights of its source policy: {'; '.join(faults)}; "
            "export with the policy that training began with"
        )


def _write_weights(
    state: StateFolder,
    stored: Mapping[str, StoredTensor],
    wanted: Mapping[str, Entry],
    scratch: Path,
    max_file_bytes: int,
) -> dict[str, Path | bytes]:
    """Write `model*.safetensors` below `scratch`; return what belongs into the folder."""
    reader = _RegionReader(state, scratch)
    groups = _fill_files(wanted, max_file_bytes)
    files: dict[str, Path | bytes] = {}
    places: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = (
            "model.safetensors"
            if len(groups) == 1
            else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        with (scratch / file).open("wb") as stream:
            stream.write(encode_header({name: wanted[name] for name in names}))
            for name in names:
                whole = reader.merge(f"model.{name}", stored[name])
                stream.write(cast(whole, stored[name], wanted[name]).tobytes())
        files[file] = scratch / file
        places |= dict.fromkeys(names, file)
    if len(groups) > 1:
        total = sum(_num_bytes(entry) for entry in wanted.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        text = json.dumps(index, sort_keys=True, indent=2)
        files["model.safetensors.index.json"] = text.encode()
    return files


def _num_bytes(entry: Entry) -> int:
    return ITEM_BYTES[entry.dtype] * math.prod(entry.shape)


def _fill_files(entries: Mapping[str, Entry], max_file_bytes: int) -> list[list[str]]:
    """Group names into files in the order that keeps every tensor aligned: wide types first."""
    order = sorted(entries, key=lambda name: (-ITEM_BYTES[entries[name].dtype], name))
    groups: list[list[str]] = [[]]
    filled = 0
    for name in order:
        size = _num_bytes(entries[name])
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def encode_header(entries: Mapping[str, Entry]) -> bytes:
    """Return the first bytes of a safetensors file whose tensors follow in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, entry in entries.items():
        stop = start + _num_bytes(entry)
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded, so that the tensors begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class _RegionReader:
    """Merges the regions of a tensor from verified local files."""

    def __init__(self, state: StateFolder, scratch: Path) -> None:
        self.state = state
        self.scratch = scratch / "state"
        self.opened: dict[str, tuple[Path, dict[str, Entry]]] = {}

    def merge(self, name: str, tensor: StoredTensor) -> Bytes:
        """Return the whole tensor as an array of opaque elements."""
        size = ITEM_BYTES[tensor.dtype]
        whole = np.zeros(tensor.shape, dtype=f"V{size}")
        for region in tensor.regions:
            path, entries = self._open(region.file)
            entry = entries.get(region.entry(name))
            if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, region.lengths):
                raise CheckpointError(
                    f"`{self.state.uri}/{region.file}` must hold `{region.entry(name)}` as its "
                    f"index says, got {entry}; export an earlier state"
                )
            count = math.prod(region.lengths)
            with path.open("rb") as file:
                file.seek(entry.start)
                data = file.read(count * size)
            part = np.frombuffer(data, dtype=f"V{size}").reshape(region.lengths)
            box = tuple(
                slice(a, a + b) for a, b in zip(region.offsets, region.lengths, strict=True)
            )
            whole[box] = part
        return whole

    def _open(self, file: str) -> tuple[Path, dict[str, Entry]]:
        if file not in self.opened:
            path = self.state.local(file, self.scratch)
            with path.open("rb") as stream:
                prefix = stream.read(8)
                length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
                header = prefix + stream.read(min(length, _HEADER_LIMIT_BYTES))
            self.opened[file] = path, read_header(header, name=f"{self.state.uri}/{file}")[1]
        return self.opened[file]


def cast(whole: Bytes, stored: StoredTensor, wanted: Entry) -> Bytes:
    """Return the elements in the wanted float type, rounded to nearest, ties to even."""
    if stored.dtype == wanted.dtype:
        return whole
    if stored.dtype not in _FLOATS or wanted.dtype not in {*_FLOATS, "BF16"}:
        raise LayoutMismatch(
            f"weights must be exported between float types, got {stored.dtype} to {wanted.dtype}"
        )
    numbers = whole.view(_FLOATS[stored.dtype])
    if wanted.dtype != "BF16":
        with np.errstate(over="ignore"):
            return numbers.astype(_FLOATS[wanted.dtype])
    return to_bfloat16(numbers.astype(np.float32))


def to_bfloat16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to the upper 16 bits, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), rounded).astype(np.uint16)
