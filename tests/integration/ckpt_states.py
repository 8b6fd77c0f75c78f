"""States of known content for saves, and what a store holds, read by one process."""

import json

import numpy as np
import torch

from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import Collected, LocalItem, TensorSpec
from planish.checkpoint.format.small_objects import decode_extra
from planish.checkpoint.loading.reader import open_state
from planish.checkpoint.loading.slices import SliceReader
from planish.checkpoint.loading.verify import verify
from planish.store import open_store

NUMPY = {"F32": np.float32, "I64": np.int64, "U8": np.uint8}


def values(shape, seed):
    """Float32 values of a whole tensor, the same on every rank."""
    count = int(np.prod(shape, dtype=np.int64))
    start = np.float32(seed * 1000)
    return torch.from_numpy(np.arange(count, dtype=np.float32) + start).reshape(shape)


def sharded(rank, size, *, rows=8, cols=6, tensors=3, seed=0, kind="model", role="main"):
    """Items of `tensors` matrices cut along dim 0, ceil chunks: the last ranks may have less."""
    step = -(-rows // size)
    low, high = min(rows, rank * step), min(rows, (rank + 1) * step)
    items = []
    for index in range(tensors):
        spec = TensorSpec(role, kind, f"layer.{index}", "F32", (rows, cols))
        data = values((rows, cols), seed + index)[low:high].clone()
        boxes = (Box((low, 0), (high - low, cols)),) if high > low else ()
        items.append(LocalItem(spec, boxes, data))
    return items


def replicated(*, rows=8, cols=6, tensors=2, seed=50, kind="model", role="main"):
    items = []
    for index in range(tensors):
        spec = TensorSpec(role, kind, f"shared.{index}", "F32", (rows, cols))
        items.append(
            LocalItem(spec, (whole((rows, cols)),), values((rows, cols), seed + index).clone())
        )
    return items


def state_of(rank, size, *, seed=0, rows=8, cols=6, tensors=3):
    """One role: sharded model, replicated optimizer, small values."""
    items = sharded(rank, size, rows=rows, cols=cols, tensors=tensors, seed=seed)
    items += replicated(rows=rows, cols=cols, seed=seed + 50, kind="optim")
    shared = {"extra": {"step": seed, "name": "run"}}
    return {"main": Collected(items, shared=shared, own={"random": {"torch": bytes([rank])}})}


def expected_tensors(*, seed=0, rows=8, cols=6, tensors=3):
    found = {
        ("main", "model", f"layer.{i}"): values((rows, cols), seed + i) for i in range(tensors)
    }
    for i in range(2):
        found["main", "optim", f"shared.{i}"] = values((rows, cols), seed + 50 + i)
    return {key: value.numpy() for key, value in found.items()}


def read_back(uri):
    """Return (commit, metadata, tensors, small objects) of what is committed, all checked."""
    opened = open_state(uri)
    reader, tensors = SliceReader(opened), {}
    for key, row in opened.metadata.tensor_ids.items():
        spec = opened.metadata.tensors.spec(row)
        tensors[key] = reader.read(spec).view(NUMPY[spec.dtype])
    names = [key for key in opened.metadata.files.keys if key.endswith(".bin")]
    small = {key: decode_extra(reader.reader.read_file(key)) for key in names}
    assert verify(uri).is_intact
    return opened.commit, opened.metadata, tensors, small


def assert_holds(uri, **arguments):
    """Check that the checkpoint at `uri` is `state_of(..., **arguments)` of all ranks."""
    commit, meta, tensors, small = read_back(uri)
    expected = expected_tensors(**arguments)
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(tensors[key], value, err_msg=str(key))
    assert small["data/main.extra/shared.bin"]["extra"]["step"] == arguments.get("seed", 0)
    for rank, key in meta.objects["main"].get("own", {}).items():
        assert small[key] == {"random": {"torch": bytes([int(rank)])}}
    return commit, meta


def attempts(uri):
    """Names of the attempt folders at a checkpoint, and whether something is committed."""
    storage, path = open_store(uri)
    found = {stat.key[len(path) + 1 :].split("/")[0] for stat in storage.list(path)}
    return sorted(name for name in found if name.startswith("a-")), "COMMIT" in found


def commit_json(uri):
    storage, path = open_store(uri)
    return json.loads(storage.get(f"{path}/COMMIT", 1 << 20)[0])
