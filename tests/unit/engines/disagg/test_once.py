"""A reply, or the rows of a rank, are taken once and only by who waits for them."""

import queue

import pytest
import torch

from planish.base.errors import ProtocolError
from planish.engines.disagg.exchange import ExpertExchange
from planish.engines.disagg.m2n.frames import Frame, FrameHeader, FrameKind
from planish.engines.disagg.placement import ExpertLayout
from tests.unit.engines.disagg.test_packing import on_meta, settings

REPLIES = {
    "twice": {},
    "of no expert rank": {"source": 3},
    "of an attention rank": {"source": 0},
    "of another layer": {"source": 2, "layer": 1},
    "of an earlier iteration": {"source": 2, "iteration": 39},
    "of other weights": {"source": 2, "weight_version": 1},
    "of a micro-batch that does not wait": {"source": 2, "micro_batch": 1},
}


def frame(kind, **changes):
    numbers = {"source": 1, "target": 0, "weight_version": 0, "iteration": 40, "layer": 0}
    numbers |= {"micro_batch": 0, "num_rows": 0, "row_bytes": 4, "num_local_experts": 0}
    header = FrameHeader(**{"kind": kind, "dtype": torch.float32, **numbers, **changes})
    return Frame(header, torch.zeros(0, dtype=torch.int32), torch.zeros(0, 1))


@pytest.mark.parametrize("changes", REPLIES.values(), ids=REPLIES)
def test_only_one_reply_of_each_expert_rank_is_taken(changes):
    layout = ExpertLayout.of([[1.0] * 4], num_nodes=2, num_redundant=0)
    cpu = settings(layout).plain() | {"device": "cpu", "stage_s": (0.0, 0.0)}
    found = []

    class Sender:
        def room(self, first, num_rows):
            return torch.empty(num_rows, 1)

        def send(self, header, counts, rows):
            pass

    class Waiter:
        current = 0

        def pause(self):
            assert not exchange.deliver(frame(FrameKind.REPLY))
            with pytest.raises(ProtocolError, match="that its micro-batch waits for, once"):
                exchange.deliver(frame(FrameKind.REPLY, **changes))
            reply = frame(FrameKind.REPLY, source=2)
            found.append(exchange.deliver(reply))

    exchange = ExpertExchange(type(settings(layout)).parse(cpu), queue.SimpleQueue(), Waiter())
    exchange.transport = Sender()
    exchange.begin(40, is_prefill=False)
    index = torch.zeros(0, 2, dtype=torch.int64)
    exchange.compute(0, torch.zeros(0, 1), index, torch.zeros(0, 2))
    assert found == [True]


def test_rows_that_come_twice_or_after_their_iteration_are_not_computed(monkeypatch):
    exchange = on_meta(0, monkeypatch)
    rank = exchange.transport._deliver.__closure__[0].cell_contents[0]
    rank.plan({"participants": {"0": [0, 3]}, "iteration": 40})
    one = frame(FrameKind.DISPATCH, source=0, target=1)
    rank.take(frame(FrameKind.DISPATCH, source=0, target=1, iteration=39, layer=5))
    assert not rank._frames
    rank.take(one)
    with pytest.raises(ProtocolError, match="a frame must come once, got another"):
        rank.take(one)
    assert not rank.has_work
