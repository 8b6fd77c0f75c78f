import json
import math
import struct
from collections import OrderedDict

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import CheckpointCorrupt, CheckpointError
from planish.checkpoint.format.items import ITEM_BYTES, TORCH_TYPES
from planish.checkpoint.format.safetensors_file import (
    NewEntry,
    header_bytes,
    parse_header,
    plan_header,
)
from planish.checkpoint.format.small_objects import decode_extra, encode_extra
from tests.processes import python
from tests.thin import examples
from tests.unit.checkpoint.format.test_version_1 import EXTRA, same


def back(value, **options):
    return decode_extra(encode_extra(value, **options), **options)


keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False)
    | st.text(max_size=30) | st.binary(max_size=30) | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def typed(value):
    """Return a value with the types of all its parts: 1, 1.0 and True are equal otherwise."""
    if isinstance(value, (list, tuple)):
        return type(value), [typed(part) for part in value]
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(part)) for key, part in value.items()]
    return type(value), repr(value)


@pytest.mark.slow
@given(values)
@settings(max_examples=examples(500), deadline=None)
def test_plain_data_come_back_with_their_types_and_order(value):
    data = encode_extra(value)
    assert typed(decode_extra(data)) == typed(value)
    assert encode_extra(decode_extra(data)) == data


def test_every_kind_comes_back_and_keys_like_our_tags_are_kept_apart():
    assert same(EXTRA, back(EXTRA))
    value = {"samples": [OrderedDict(b=1, a=bytearray(b"x"))], "!bytes": 3, 0: "int", "0": "text"}
    assert same(value, back(value))
    assert same({"!bytes": 3}, back({"!bytes": 3}))


@pytest.mark.parametrize("dtype", sorted(TORCH_TYPES))
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)])
def test_tensors_of_every_type_come_back_bit_by_bit(dtype, shape):
    kind = getattr(torch, TORCH_TYPES[dtype])
    count = math.prod(shape) * ITEM_BYTES[dtype]
    raw = torch.arange(count, dtype=torch.uint8) % (2 if dtype == "BOOL" else 251)
    tensor = raw.view(kind).reshape(shape) if count else torch.empty(shape, dtype=kind)
    read = back(tensor)
    assert (read.dtype, read.shape) == (kind, torch.Size(shape))
    assert read.reshape(-1).view(torch.uint8).tolist() == raw.tolist() if count else True


def itself():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": [0, {"b": {1, 2}}]}, r"`a\[1\]\.b` must be plain data"),
        ({"f": lambda: 0}, r"`f` must be plain data .*function"),
        ({"t": torch.zeros(2, device="meta")}, r"`t` must be a plain dense tensor, .*meta"),
        ({"t": torch.eye(2).to_sparse()}, r"`t` must be a plain dense tensor, .*sparse"),
        (np.array(["a"]), "`the value` must be plain data"),
        (np.array([None]), "`the value` must be plain data"),
        (torch.float32, "`the value` must be plain data"),
        ({b"k": 1}, "keys of `the value` must be texts"),
        ({"a": {(1, b"k"): 1}}, "keys of `a` must be texts"),
        (1 << 5000, "at most 4096 bits"),
        (itself(), "nested more than 64 deep"),
    ],
)
def test_what_is_not_data_is_refused_by_its_place(value, told):
    with pytest.raises(TypeError, match=told):
        encode_extra(value)


def test_other_objects_need_permission_at_both_ends(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'run')!r}, 'w')",))

    data = encode_extra({"x": Bomb()}, allow_pickle=True)
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        decode_extra(data)
    assert not (tmp_path / "run").exists()
    assert back({"x": {1, 2}}, allow_pickle=True) == {"x": {1, 2}}


def forged(text, blobs=b""):
    return struct.pack("<8sII", b"PLNSHEXT", 1, len(text)) + text + blobs


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "at least 16 bytes"),
        (b"x" * 40, "is damaged"),
        (forged(b"1")[:-1], "is damaged"),
        (forged(b"1", b"more"), "4 bytes follow"),
        (forged(b"NaN"), "must be JSON"),
        (forged(b"[" * 100_000), "must be JSON"),
        (forged(b'{"!set":[1]}'), "unknown kind of value"),
        (forged(b'{"!bytes":1,"b":2}', b"x"), "is damaged"),
        (forged(b'{"!bytes":5}', b"x"), "goes over the end"),
        (forged(b'{"!bytes":-1}', b"x"), "goes over the end"),
        (forged(b'{"!bytes":"1"}', b"x"), "goes over the end"),
        (forged(b'{"!float":"1e5"}'), "is damaged"),
        (forged(b'{"!map":[[1,2],[1,3]]}'), "appears twice"),
        (forged(b'{"!map":[[[1],2]]}'), "is damaged"),
        (forged(b'{"!map":[[1]]}'), "is damaged"),
        (forged(b'{"!array":["|O",[1],8]}', bytes(8)), "is damaged"),
        (forged(b'{"!array":["<i8",[2],8]}', bytes(8)), "in 8 bytes"),
        (forged(b'{"!array":["<i8",[-1],8]}', bytes(8)), "must hold counts"),
        (forged(b'{"!array":["<i8",[0,4611686018427387904],0]}'), "in 0 bytes"),
        (forged(b'{"!array":["i4,i4",[1],8]}', bytes(8)), "is damaged"),
        (forged(b'{"!array":["<i8",1]}'), "is damaged"),
        (forged(b'{"!scalar":["<i8"]}'), "is damaged"),
        (forged(b'{"!scalar":{}}'), "is damaged"),
        (forged(b'{"!tensor":["F7",[1],1]}', b"x"), "is damaged"),
        (forged(b'{"!tensor":["F32",[3],4]}', bytes(4)), "in 4 bytes"),
        (forged(json.dumps({"!tensor": ["F32", [1] * 65, 4]}).encode(), bytes(4)), "in 4 bytes"),
        (forged(b'{"!complex":15}', bytes(15)), "is damaged"),
    ],
)
def test_damaged_bytes_are_refused(data, told):
    with pytest.raises(CheckpointCorrupt, match=told) as caught:
        decode_extra(data, file="data/main.extra/00000.bin")
    assert caught.value.file == "data/main.extra/00000.bin"


def test_plain_data_need_neither_torch_nor_pickle():
    code = (
        "import pickle, sys; pickle.loads = pickle.dumps = None\n"
        "from planish.checkpoint.format.small_objects import decode_extra, encode_extra\n"
        "assert decode_extra(encode_extra({'a': (1, b'x')})) == {'a': (1, b'x')}\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


ENTRIES = [
    NewEntry("step||", "F64", ()),
    NewEntry("w|0,0|2,3", "F32", (2, 3)),
    NewEntry("w|2,0|1,3", "F32", (1, 3)),
    NewEntry("h|0|3", "BF16", (3,)),
    NewEntry("m|0|5", "BOOL", (5,)),
]


def test_other_libraries_read_the_file():
    entries = [e for e in ENTRIES if e.dtype != "BF16"]
    header, starts = plan_header(entries, notes={"format": "pt"})
    data = np.arange(8 + 24 + 12 + 5, dtype=np.uint8) % 2
    read = safetensors.numpy.load(header + data.tobytes())
    assert set(read) == {entry.name for entry in entries}
    for entry, start in zip(entries, (starts - len(header)).tolist(), strict=True):
        assert read[entry.name].shape == entry.shape
        assert read[entry.name].tobytes() == data[start : start + entry.nbytes].tobytes()


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_type_has_a_place_in_the_file(dtype):
    header, starts = plan_header([NewEntry("w|0,0|2,3", dtype, (2, 3))])
    size = len(header) + 6 * ITEM_BYTES[dtype]
    stored = parse_header(header, size)["w|0,0|2,3"]
    assert (stored.start, stored.stop) == (int(starts[0]), size)
    if dtype in {"C64", "C128"}:
        assert stored.dtype == {"C64": "F32", "C128": "F64"}[dtype]
        assert stored.shape == (2, 3, 2)
    elif dtype.endswith("FNUZ"):
        assert (stored.dtype, stored.shape) == ("U8", (2, 3))
    else:
        assert (stored.dtype, stored.shape) == (dtype, (2, 3))


def test_entries_of_more_than_two_gib_have_right_places():
    count = 2**31 + 10
    header, starts = plan_header(
        [NewEntry("a|0|1", "F32", (count,)), NewEntry("b|0|1", "U8", (3,))]
    )
    assert (starts - len(header)).tolist() == [0, 4 * count]
    stored = parse_header(header, len(header) + 4 * count + 3)
    assert stored["a|0|1"].shape == (count,)
    assert stored["b|0|1"].stop == len(header) + 4 * count + 3


def text_of(**changes):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return json.dumps({"w": entry}).encode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (text_of(shape=[3]), "must fit its shape"),
        (text_of(shape=[-2]), "counts"),
        (text_of(shape=[2.0]), "counts"),
        (text_of(shape=[True, 2]), "counts"),
        (text_of(shape=[2**70]), "counts"),
        (text_of(shape=[1] * 65), "counts"),
        (text_of(shape="2"), "counts"),
        (text_of(dtype="F7"), "unknown type"),
        (text_of(dtype=[]), "unknown type"),
        (text_of(data_offsets=[8, 16]), "must begin at"),
        (text_of(data_offsets=[0]), "must fit"),
        (text_of(data_offsets=[8, 0]), "must fit"),
        (text_of(shape=[4], data_offsets=[0, 16]), "the entries end at"),
        (text_of(more=1), "must have dtype, shape and data_offsets"),
        (b"{}", "the entries end at"),
        (b"[]", "must be an object"),
        (b"", "must be JSON"),
        (b"[" * 50_000, "must be JSON"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"__metadata__":{"a":1}}', "must hold texts"),
        (b'{"__metadata__":[]}', "must hold texts"),
        (b"\xff", "must be JSON"),
        (b"9" * 5000, "must be JSON"),
    ],
)
def test_headers_that_lie_are_refused(text, told):
    data = struct.pack("<Q", len(text)) + text
    with pytest.raises(CheckpointCorrupt, match=told) as caught:
        parse_header(data, len(data) + 8, file="data/w.safetensors")
    assert caught.value.file == "data/w.safetensors"


@pytest.mark.parametrize(
    ("word", "size"), [(b"", 0), (b"\x01", 100), (b"\xff" * 8, 100), (struct.pack("<Q", 93), 100)]
)
def test_a_header_larger_than_its_file_is_refused_before_it_is_read(word, size):
    with pytest.raises(CheckpointCorrupt):
        header_bytes(word, size)
    assert header_bytes(struct.pack("<Q", 92), 100) == 100


def test_a_header_cut_short_is_refused():
    header, _ = plan_header(ENTRIES)
    with pytest.raises(CheckpointCorrupt, match="got 100"):
        parse_header(header[:100], len(header) + 55)
