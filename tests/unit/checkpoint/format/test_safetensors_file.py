import json
import struct

import numpy as np
import pytest
import safetensors.numpy

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.format.items import ITEM_BYTES
from planish.checkpoint.format.safetensors_file import (
    NewEntry,
    header_bytes,
    parse_header,
    plan_header,
)

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
    parsed = parse_header(header, size)
    stored = parsed.entries["w|0,0|2,3"]
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
    stored = parse_header(header, len(header) + 4 * count + 3).entries
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
    ("word", "size"),
    [(b"", 0), (b"\x01", 100), (b"\xff" * 8, 100), (struct.pack("<Q", 93), 100)],
)
def test_a_header_larger_than_its_file_is_refused_before_it_is_read(word, size):
    with pytest.raises(CheckpointCorrupt):
        header_bytes(word, size)
    assert header_bytes(struct.pack("<Q", 92), 100) == 100


def test_a_header_cut_short_is_refused():
    header, _ = plan_header(ENTRIES)
    with pytest.raises(CheckpointCorrupt, match="got 100"):
        parse_header(header[:100], len(header) + 55)
