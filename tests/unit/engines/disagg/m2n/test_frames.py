from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import ConfigError, ProtocolError
from planish.engines.disagg.m2n.frames import (
    CONTROL_MICRO_BATCH,
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    FrameLimits,
    Slot,
)
from tests.unit.engines.disagg.m2n.ranks import LIMITS, header

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)


def unsigned(bits):
    return st.integers(0, 2**bits - 1)


headers = st.builds(
    FrameHeader,
    kind=st.sampled_from([FrameKind.DISPATCH, FrameKind.REPLY, FrameKind.CREDIT]),
    source=unsigned(16),
    target=unsigned(16),
    weight_version=unsigned(32),
    iteration=unsigned(64),
    layer=unsigned(32),
    micro_batch=unsigned(16),
    num_rows=unsigned(32),
    row_bytes=st.integers(0, 2**28).map(lambda width: 8 * width),
    dtype=st.sampled_from(DTYPES),
    num_local_experts=unsigned(16),
    placement_version=unsigned(32),
    is_prefill=st.booleans(),
    sent_ns=unsigned(64),
    released=unsigned(32),
    payload_crc=unsigned(32),
)


@given(headers)
def test_a_header_of_64_bytes_comes_back_as_it_was(one):
    data = one.encode()
    assert len(data) == HEADER_BYTES == 64
    assert FrameHeader.decode(data) == one


@given(headers, st.integers(0, 63), st.integers(1, 255))
def test_no_byte_of_a_header_can_change_unseen(one, place, change):
    data = bytearray(one.encode())
    data[place] ^= change
    with pytest.raises(ProtocolError):
        FrameHeader.decode(data)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data):
    with pytest.raises(ProtocolError):
        FrameHeader.decode(data, LIMITS)


def test_the_header_is_laid_out_as_documented():
    one = header(5, layer=3, micro_batch=2, weight_version=9, iteration=2**40, is_prefill=True)
    data = one.encode()
    assert data[:8] == b"M2NF" + bytes([1, FrameKind.DISPATCH, 2, 1])
    words = [int.from_bytes(data[at : at + 2], "little") for at in range(8, 16, 2)]
    assert words == [0, 1, 2, 3]
    assert int.from_bytes(data[16:20], "little") == 9
    assert int.from_bytes(data[24:32], "little") == 2**40
    assert [int.from_bytes(data[at : at + 4], "little") for at in (40, 44, 48)] == [3, 5, 16]


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [(0, 0, "magic"), (4, 2, "protocol version"), (20, 1, "CRC"), (63, 1, "CRC")],
)
def test_the_error_names_what_is_wrong(place, value, what):
    data = bytearray(header(5).encode())
    data[place] = value if data[place] != value else value + 1
    with pytest.raises(ProtocolError, match=what):
        FrameHeader.decode(data)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_rows": 33}, "num_rows=33 exceeds the capacity 32"),
        ({"row_bytes": 36}, "row_bytes=36 exceeds the capacity 32"),
        ({"num_local_experts": 4}, "num_local_experts=4 exceeds the capacity 3"),
        ({"micro_batch": 4}, "micro_batch=4 of 4"),
        ({"row_bytes": 6}, "row_bytes=6 is no multiple"),
        ({"kind": FrameKind.CONTROL}, "CONTROL has micro_batch=0"),
    ],
)
def test_sizes_over_capacity_are_refused_by_name(changes, what):
    data = replace(header(32), **changes).encode()
    with pytest.raises(ProtocolError, match=what):
        FrameHeader.decode(data, LIMITS)


def test_a_frame_as_large_as_the_buffers_is_allowed():
    one = header(32, micro_batch=3, row_bytes=32)
    assert FrameHeader.decode(one.encode(), LIMITS) == one
    assert one.payload_bytes == 4 * 3 + 32 * 32


def test_a_field_that_does_not_fit_is_refused():
    with pytest.raises(ProtocolError, match="must fit"):
        header(5, source=-1).encode()
    with pytest.raises(ProtocolError, match="must fit"):
        header(5, dtype=torch.int8).encode()


def test_limits_hold_the_rows_of_the_largest_micro_batch():
    sizes = {"max_tokens": 8, "row_bytes": 4}
    assert FrameLimits.of(2, top_k=2, num_local_experts=4, **sizes).num_rows == 16
    assert FrameLimits.of(2, top_k=8, num_local_experts=4, **sizes).num_rows == 32
    limits = FrameLimits.of(2, top_k=2, num_local_experts=1, **sizes)
    limits.admit(8)
    with pytest.raises(ProtocolError, match="at most 8 rows, got 9"):
        limits.admit(9)
    with pytest.raises(ConfigError, match="num_micro_batches"):
        FrameLimits(CONTROL_MICRO_BATCH, 1, 1, 1)
    with pytest.raises(ConfigError, match="at least one row"):
        FrameLimits(1, 0, 1, 1)


def test_a_reply_goes_back_with_the_same_names_and_without_counts():
    reply = header(5, layer=3, micro_batch=2, is_prefill=True, placement_version=4).reply()
    assert (reply.kind, reply.source, reply.target) == (FrameKind.REPLY, 1, 0)
    assert (reply.layer, reply.iteration, reply.weight_version) == (3, 40, 7)
    assert (reply.num_rows, reply.num_local_experts, reply.is_prefill) == (5, 0, True)
    assert reply.slot == Slot(2, 1)
