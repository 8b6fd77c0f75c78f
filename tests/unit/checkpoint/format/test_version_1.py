"""Checkpoints that the program wrote in format 1: kept in `written_by_1/`, read to the last bit.

`checkpoint` was saved by two ranks from `state_of`; `state` is a train state of a run, its tensors
cut to a few elements. The reader of format 1 stays as long as the project is 0.x.
"""

import hashlib
import random
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from planish.checkpoint import api, train_state
from planish.checkpoint.adapters.base import RandomStreams
from planish.checkpoint.adapters.loader_state import LoaderShard
from planish.checkpoint.adapters.placement import FlatShard
from planish.checkpoint.format.items import TORCH_TYPES
from planish.checkpoint.format.small_objects import decode_extra
from planish.checkpoint.loading.extras import names_of
from planish.checkpoint.loading.reader import BlockReader, open_state
from planish.checkpoint.loading.slices import SliceReader
from tests.unit.checkpoint.written import stored

FOLDER = Path(__file__).parent / "written_by_1"
STATE_SHA256 = "ce0cb0ae676c8ff779e3fb4610f4fdfcc2325056417fbc31c3768eb244e62645"
STATE_TENSORS_SHA256 = "f5eb99b22d7db32a75a66a46f52ddd191ad6e1a5241779e08dfb15a29aa7654b"
SHAPE = (3, 5)
EXTRA = {
    "step": 7,
    "big": 1 << 70,
    "none": None,
    "flags": [True, False],
    "numbers": [1.5, float("inf"), float("-inf"), float("nan"), -0.0],
    "complex": complex(1, float("inf")),
    "text": "é\U0001f600\n",
    "bytes": b"\x00\xff",
    "tuple": (1, ("a", ()), [2]),
    "!marked": {0: "int", 1.5: "float", (0, "a"): "tuple", None: "none", True: "bool"},
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "big_endian": np.array([1.5, -2], ">f4"),
    "complexes": np.array([1 + 2j], np.complex64),
    "no_elements": np.zeros((0, 4)),
    "scalar": np.float32(0.1),
    "bf16": torch.arange(5).to(torch.bfloat16),
    "scalar_tensor": torch.tensor(3, dtype=torch.int64),
}
"""Small values of every kind."""


def tensors():
    """Return a whole tensor of each type by its name, with bytes of any pattern."""
    found = {}
    for number, (name, attribute) in enumerate(TORCH_TYPES.items()):
        kind = getattr(torch, attribute)
        raw = np.random.default_rng(number).integers(0, 256, (15 * kind.itemsize), np.uint8)
        raw = raw % 2 if kind is torch.bool else raw
        found[f"layers.{number}.{name}"] = torch.from_numpy(raw).view(kind).reshape(SHAPE)
    return found


def streams(rank):
    """Seed the generators of this process and return them."""
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    return RandomStreams(5, step=7, coordinate={"dp": rank}, layout={"dp": 2})


class Samples:
    """A loader whose ranks hold a buffer each."""

    num_readers, dp_size = 1, 2

    def __init__(self, dp_rank):
        self.dp_rank = dp_rank

    def ckpt_common(self):
        return {"consumed": {"web": {"count": 6, "ahead": [9]}}, "ratios": {"web": 0.5}}

    def ckpt_shards(self):
        kept = OrderedDict([("b", bytearray(b"ab")), ("a", self.dp_rank)])
        buffer = [np.arange(3) + self.dp_rank, {"ids": [1, 2]}, kept]
        return [LoaderShard(self.dp_rank, 0, buffer=buffer, cursor={"web": 6 + self.dp_rank})]


def state_of(rank):
    """Return what a rank of two saves: `api.save(..., {"policy": "flat", "critic": "plain"})`."""
    model = {}
    for name, tensor in tensors().items():
        part = slice(8 * rank, min(15, 8 * rank + 8))
        flat = tensor.reshape(-1)[part].clone()
        model[name] = FlatShard(name, SHAPE, (0, 0), SHAPE, part.start, part.stop, flat)
    policy = {
        "model": model,
        "optimizer": {"step": torch.tensor(7.0), "empty": torch.zeros(0, 3)},
        "random": streams(rank),
        "extra": EXTRA,
        "dataloader": Samples(rank),
    }
    return {"policy": policy, "critic": {"model": {"odd name/..|é": torch.ones(2, 2).t()}}}


def same(a, b):
    """Whether two values have equal types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        raw = (t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in (a, b))
        return (a.dtype, a.shape) == (b.dtype, b.shape) and len({*raw}) == 1
    if isinstance(a, (np.ndarray, np.generic)):
        little = a.dtype.newbyteorder("<")
        bits = a.astype(little).tobytes()
        return (b.dtype, b.shape, b.tobytes()) == (little, a.shape, bits)
    return repr(a) == repr(b)


def test_every_tensor_has_its_bits_and_every_small_value_its_kind():
    opened = open_state(f"file://{FOLDER}/checkpoint")
    reader, blocks = SliceReader(opened), BlockReader(opened)
    assert opened.commit.format == 1
    assert (opened.metadata.header["step"], opened.commit.roles) == (7, ("critic", "policy"))
    expected = {("policy", "model", name): tensor for name, tensor in tensors().items()}
    expected["policy", "optim", "step"] = torch.tensor(7.0)
    expected["policy", "optim", "empty"] = torch.zeros(0, 3)
    expected["critic", "model", "odd name/..|é"] = torch.ones(2, 2)
    assert opened.metadata.tensor_ids.keys() == expected.keys()
    for (role, kind, fqn), tensor in expected.items():
        spec = stored(reader, fqn, role=role, kind=kind)
        assert (TORCH_TYPES[spec.dtype], spec.shape) == (str(tensor.dtype)[6:], tensor.shape)
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert reader.read(spec).tobytes() == raw, fqn

    def decoded(key):
        return decode_extra(blocks.read_file(key), file=key)

    names = names_of(opened.metadata.objects, "policy")
    assert same(EXTRA, decoded(names.shared)["extra"])
    for rank, shard in enumerate(names.shards):
        loader = Samples(rank)
        assert same(loader.ckpt_shards()[0].to_data(), decoded(shard["key"]))
        assert same(streams(rank).capture(), decoded(names.own[str(rank)])["random"])
    assert same(loader.ckpt_common(), decoded(names.common)["common"])


def test_it_loads_verifies_and_is_written_anew(tmp_path):
    copy = f"file://{tmp_path}/checkpoint"
    shutil.copytree(FOLDER / "checkpoint", tmp_path / "checkpoint")
    assert not api.verify(copy).faults
    blank = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    loader = Samples(0)
    loader.dp_size = 1
    loader.ckpt_restore = lambda common, shards: vars(loader).update(found=(common, shards))
    state = {"policy": {"model": blank, "dataloader": loader, "extra": {}}}
    info = api.load(copy, state, "plain", parts=("model", "extra", "loader"))
    assert info.step == 7
    assert all(same(tensor, blank[name]) for name, tensor in tensors().items())
    assert same(EXTRA, state["policy"]["extra"])
    held = [sample for shard in loader.found[1] for sample in shard.buffer]
    assert same(held, [*Samples(0).ckpt_shards()[0].buffer, *Samples(1).ckpt_shards()[0].buffer])


def test_a_train_state_of_a_run_opens_by_its_pin(tmp_path):
    shutil.copytree(FOLDER / "state", tmp_path / "states/step-00000192")
    ref = train_state.latest(f"file://{tmp_path}")
    assert ref.manifest_sha256 == STATE_SHA256
    extra = train_state.read_state_info(ref.pin())
    assert (extra["step"], extra["data"]["next"], extra["device"]) == (192, 2801, "cpu")
    assert train_state.parts(ref.pin()) == {"model", "optimizer", "random"}
    reader, found = SliceReader(train_state.open_checkpoint(ref.pin())), hashlib.sha256()
    for role, kind, fqn in sorted(reader.opened.metadata.tensor_ids):
        data = reader.read(stored(reader, fqn, role=role, kind=kind)).tobytes()
        found.update(f"{kind} {fqn} {len(data)} ".encode() + data)
    assert found.hexdigest() == STATE_TENSORS_SHA256
