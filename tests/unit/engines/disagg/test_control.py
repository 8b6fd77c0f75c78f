"""Messages between the coordinator and a rank."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from planish.base.errors import PeerLost, ProtocolError
from planish.engines.disagg.control import (
    MAX_BYTES,
    Channel,
    decode_outputs,
    decode_request,
    encode_outputs,
    encode_request,
)
from planish.engines.requests import Output, Request, Sampling
from planish.records.rollouts import FinishReason


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


def test_messages_arrive_whole_and_in_order(ends):
    here, there = (Channel(end) for end in ends)
    messages = [{"op": "a", "text": "x" * 500_000}, {"op": "b", "numbers": [1.5, -2]}]
    thread = threading.Thread(target=lambda: [here.send(message) for message in messages])
    thread.start()
    assert [there.receive(60.0), there.receive(60.0)] == messages
    thread.join()
    assert there.receive(0.0) is None


def test_a_closed_end_is_noticed_on_both_sides(ends):
    here, there = (Channel(end) for end in ends)
    here.close()
    here.close()
    with pytest.raises(PeerLost, match="has closed it"):
        there.receive(60.0)
    with pytest.raises(PeerLost, match="this end"):
        here.receive(60.0)
    with pytest.raises(PeerLost, match="is gone"):
        here.send({})


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((MAX_BYTES + 1).to_bytes(4, "little"), f"at most {MAX_BYTES} bytes, got {MAX_BYTES + 1}"),
        (b"\x02\0\0\0{{", "must be JSON"),
        (b"\x02\0\0\0[]", "must be an object"),
    ],
)
def test_what_is_no_message_is_refused(ends, data, text):
    ends[0].sendall(data)
    with pytest.raises(ProtocolError, match=text):
        Channel(ends[1]).receive(60.0)


def test_requests_and_outputs_survive_the_way():
    sampling = Sampling(max_new_tokens=3, temperature=0.7, stop_token_ids=(4, 5), seed=1 << 62)
    request = Request("r", "g", (1, 2), sampling, response_prefix=(3,), priority=2)
    assert decode_request(encode_request(request)) == request
    routing = np.arange(4, dtype=np.int8).reshape(2, 1, 2)
    output = Output("r", [7, 8], [-0.1, -1.5], [3, 3], FinishReason.STOP, 8, routing=routing)
    (again,) = decode_outputs(encode_outputs([output]))
    assert np.array_equal(again.routing, routing)
    assert again.routing.dtype == np.int8
    again.routing = output.routing = None
    assert again == output
